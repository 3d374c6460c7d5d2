"""In-place writes to outputs that alias an input although the op's schema declares no alias.

Before autograd such ops are traced whole, as making a new tensor, and the write would not reach their input, which in
eager it does: `y = x.type_as(z); y += 1` where the dtypes agree. A dropout that drops nothing returns its input, one
that drops a new tensor; torch's export leaves open which of the two it is, and lets nobody write to either. Here it is
known: the input stands for itself, what is new is copied, and a frame that writes to a view is not captured.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend.hidden_writes import storage_id, storage_of, written_tensors
from megacpp_compile.fx.copies import changed, clone_for_users
from megacpp_compile.fx.edit import argument, called, dynamo_value, replace
from megacpp_compile.fx.provenance import source_line

_SAME = {"type_as", "sum_to_size"}
_VIEWS = {*_SAME, "einsum", "broadcast_tensors", "meshgrid", "cartesian_prod", "conj_physical", "to_dense"}


def without_writes_to_undeclared_aliases(gm: GraphModule) -> GraphModule:
    """`gm` with no write to what an op returns that may be its input unsaid; itself where there is none.

    Raises CaptureError where it is a view of an input.
    """
    nodes = list(gm.graph.nodes)
    asked = [n for n in nodes if _is_dropout(n) and not _hidden(n) or _name(n) in _VIEWS]
    last = {storage_of(w): n for n in nodes for w in written_tensors(n)} if asked else {}  # the last write to a memory
    for node in reversed(asked):  # one may be the input of the next
        if _returns_its_input(node) and (write := last.get(storage_of(node))) is not None:
            of = storage_of(node.all_input_nodes[0])
            last[of] = max(write, last.get(of, write))
    found = [n for n in asked if _is_written_to(n, {m for m, write in last.items() if m is not None and write > n})]
    return changed(gm, found, _told_apart)


def _told_apart(node: Node) -> None:
    if _returns_its_input(node):
        replace(node, node.all_input_nodes[0])
    else:
        clone_for_users(node)


def _is_written_to(node: Node, to: set[int | None]) -> bool:
    """Whether the memory `to` which something later writes is what `node` returns, or its input where that is the
    same."""
    if _returns_its_input(node):
        return storage_of(node) in to or storage_of(node.all_input_nodes[0]) in to
    if _is_dropout(node):
        return storage_of(node) in to
    made = dynamo_value(node)
    results = {storage_id(x) for x in (made if isinstance(made, list | tuple) else [made])}
    if results & to & {storage_of(a) for a in node.all_input_nodes}:
        reason = f"`{_name(node)}` returns a view of its input here, which is written to: copy it first (`.clone()`)"
        raise CaptureError(reason, source_line(node) or node.name)
    return False


def _returns_its_input(node: Node) -> bool:
    if _is_dropout(node):
        return not drops(node)
    made, of = (dynamo_value(n) for n in (node, node.all_input_nodes[0]))
    if _name(node) not in _SAME or storage_of(node) is None or storage_id(made) != storage_id(of):
        return False
    return made.shape == of.shape and made.stride() == of.stride()


def _is_dropout(node: Node) -> bool:
    """Whether `node` calls a dropout that is not to work in place: such a one writes, and is traced."""
    return _name(node) == "dropout" and not argument(node, 3, "inplace")


def _name(node: Node) -> str:
    return called(node).partition(".")[0] if node.op in ("call_function", "call_method") else ""


def drops(node: Node) -> bool:
    """Whether a dropout may drop anything: a probability that is an input is not known."""
    trains = argument(node, 2, "training", argument(node, 2, "train", True))
    return trains is not False and argument(node, 1, "p", 0.5) != 0


def _hidden(node: Node) -> bool:
    """Whether a dropout is made where autograd does not see it, of a tensor that has a gradient: its result would hide
    writes. Of a tensor without memory of its own nothing is known."""
    made, of = (dynamo_value(n) for n in (node, node.all_input_nodes[0]))
    if None in (storage_id(made), storage_id(of)):
        return True
    return of.requires_grad and not made.requires_grad
