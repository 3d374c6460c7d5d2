"""Which block of the model a forward node belongs to, and of what kind that block is.

A layer is a numbered module ("layers.3") of a container that holds attention, scans or convolutions; a block is a
direct child of a layer, or of the frame where a layer is compiled by itself. Each call of a module in a loop over depth
is a layer of its own (`depth_loops`). The user's patterns decide the kind of a
block; without one its operations do: "mblock" has a scan, a causal convolution or a linear recurrence of a state,
"ablock" attention, "rblock" a GEMM whose input depends on an earlier GEMM with the same weight, or a module with the
class name of a recurrent one, "eblock" any other GEMM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from megacpp_compile.config.globs import longest_hit
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.matchers.recurrences import find_recurrences
from megacpp_compile.remat.depth_loops import LayerCall, calls_of
from megacpp_compile.remat.nodes import is_core, is_depthwise, is_gemm
from megacpp_compile.remat.plan import BlockRef

_RECURRENT = re.compile(r"gru|lstm|(^|[^a-z])rnn|recurrent", re.IGNORECASE)


def blocks_of(forward: Sequence[Node], patterns: Mapping[str, str]) -> dict[Node, BlockRef]:
    """The block of every forward node. forward: in graph order; patterns: glob over module names -> kind."""
    fqns: dict[Node, str] = {}
    calls = calls_of(forward, _mixes)
    last = ""
    for node in forward:  # a node that a pattern of Inductor's inserted has no module: it takes its neighbours'
        own = module_fqn(node)
        like = node if own else next((a for a in node.all_input_nodes if fqns.get(a)), None)
        last = fqns[node] = own or (fqns[like] if like is not None else last)
        if like in calls:
            calls[node] = calls[like]
    containers = _containers(forward, fqns)
    members: dict[tuple[str, str], list[Node]] = {}
    named: dict[tuple[str, str], str] = {}
    of: dict[Node, tuple[str, str]] = {}
    for node in forward:
        layer, child = _split(fqns[node], containers)
        if (call := calls.get(node)) is not None:
            layer, child = _within(call, layer, child, fqns[node])
        named_by = longest_hit(patterns, fqns[node])
        block = (layer, named_by[0] if named_by else f"{layer}.{child}".strip(".") if child else "")
        if named_by:
            named[block] = patterns[named_by[1]]
        of[node] = block
        members.setdefault(block, []).append(node)
    kinds = {b: named.get(b) or (kind_of(nodes) if b[1] else "") for b, nodes in members.items()}
    repeated = {of[n][0] for n, call in calls.items() if call.beside}
    return {n: BlockRef(b[0], b[1] if kinds[b] else None, kinds[b], b[0] in repeated) for n, b in of.items()}


def _within(call: LayerCall, layer: str, child: str | None, fqn: str) -> tuple[str, str | None]:
    """The layer and the child of it that a node in a loop over depth is in: a numbered layer inside of the module that
    is called, or that module."""
    inside = f"{layer}.".startswith(f"{call.module}.")
    if not inside:
        layer, child = call.module, fqn[len(call.module) + 1 :].partition(".")[0] or None
    return f"{layer}@{call.number}", child


def _containers(forward: Sequence[Node], fqns: Mapping[Node, str]) -> set[str]:
    """Names of modules whose numbered children are layers: the innermost around nodes that mix tokens, or the outermost
    where none does. A layer's experts are numbered, too, but are no layers."""
    mixing, outermost = set(), set()
    for node in forward:
        parts = fqns[node].split(".")
        numbered = [".".join(parts[:i]) for i, p in enumerate(parts) if p.isdigit()]
        numbered = [c for c in numbered if "expert" not in c.rpartition(".")[2].lower()]
        if numbered:
            outermost.add(numbered[0])
            if _mixes(node):
                mixing.add(numbered[-1])
    if mixing or any(_mixes(n) for n in forward):
        return mixing
    return outermost


def _mixes(node: Node) -> bool:
    """Whether it mixes tokens."""
    return is_core(node) or _convolves(node) or _attends(node)


def _convolves(node: Node) -> bool:
    """Whether it is a depthwise convolution along the tokens, or another op that only a state-space block has."""
    if name_of(node) == "aten::convolution":
        return value(node).dim() == 3 and is_depthwise(node)
    return traits_of(node).block_kind == "mblock"


def _attends(node: Node) -> bool:
    """Whether it is a batched GEMM that reads a softmax, in autograd's graph exp(x - amax(x)) / sum."""
    return name_of(node) == "aten::bmm" and any(_is_softmax(a, 8) for a in node.all_input_nodes)


def _is_softmax(node: Node, steps: int) -> bool:
    name = name_of(node)
    if name in ("aten::_softmax", "aten::softmax"):
        return True
    if name == "aten::exp":
        near = [b for a in node.all_input_nodes for b in a.all_input_nodes]
        return any("max" in name_of(n) or "online" in name_of(n) for b in near for n in (b, *b.all_input_nodes))
    if steps == 0 or is_gemm(node) or is_core(node):
        return False
    return any(_is_softmax(a, steps - 1) for a in node.all_input_nodes)


def _split(fqn: str, containers: set[str]) -> tuple[str, str | None]:
    """("model.layers.3", "self_attn") of "model.layers.3.self_attn.q_proj"; in no layer: ("", first part)."""
    parts = [p for p in fqn.split(".") if p]
    depths = [i + 1 for i, p in enumerate(parts) if p.isdigit() and ".".join(parts[:i]) in containers]
    depth = depths[-1] if depths else 0
    return ".".join(parts[:depth]), parts[depth] if len(parts) > depth else None


def kind_of(nodes: Iterable[Node]) -> str:
    """The kind of a block by its operations; "" for one without a GEMM, such as a norm."""
    nodes = list(nodes)
    if any(map(_convolves, nodes)) or any(True for _ in find_recurrences(nodes)):
        return "mblock"
    if any(traits_of(n).block_kind == "ablock" or _attends(n) for n in nodes):
        return "ablock"
    if any(_RECURRENT.search(t) for n in nodes for t in _types(n)) or _feeds_itself(nodes):
        return "rblock"
    return "eblock" if any(map(is_gemm, nodes)) else ""


def _feeds_itself(nodes: Sequence[Node]) -> bool:
    """Whether the input of a GEMM depends on an earlier GEMM with the same weight, as in a loop over time."""
    weights_of: dict[Node, frozenset[Node]] = {}  # the weights of all GEMMs that a node depends on
    for node in nodes:
        own = frozenset().union(*(weights_of.get(a, frozenset()) for a in node.all_input_nodes))
        if is_gemm(node):
            weights = frozenset(b for a in node.all_input_nodes if (b := base_of(a)).op == "placeholder")
            if weights & own:
                return True
            own |= weights
        weights_of[node] = own
    return False


def _types(node: Node) -> list[str]:
    """Class names of the modules around the node, short of the layer's own."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [getattr(e[1], "__name__", str(e[1]).rsplit(".", 1)[-1]) for e in stack.values() if isinstance(e, tuple)]
    return names[1:] if len(names) > 1 else names
