"""Edits of a captured graph that keep it valid: every node has a fake value, its place in order and its modes."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch._registry import release
from megacpp_compile._torch.dispatch import enable_python_dispatcher
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.fx.mode_states import ModeStates
from megacpp_compile.fx.walks import descendants

_INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", "recompute", "ac_graph_id", "custom", "seq_nr")

# Before 2.13 torch's ops of several others ask symbolic sizes for numbers, unless Python dispatches them.
_ASKS_SIZES = release(torch.__version__) < (2, 13)


def value(node: Any) -> Any:
    """The fake value of a node, or the argument itself when it is no node."""
    return node.meta.get("val") if isinstance(node, Node) else node


def arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> dict[str, Any]:
    """All arguments of a call of `op` by name, in its schema's order, with the defaults of those that are left out."""
    known = op._schema.arguments
    given = {a.name: given for a, given in zip(known, args, strict=False)} | {**kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in known}


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """What a call is given for its argument `name`, the one in `place`."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def dynamo_value(node: Node) -> Any:
    """The fake value of a node of Dynamo's graph, or of one that tracing made."""
    return node.meta.get("example_value", node.meta.get("val"))


def all_nodes(module: torch.nn.Module) -> list[Node]:
    """The nodes of a frame's graph and of the graphs that it calls."""
    return [n for m in module.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]


def called(node: Node) -> str:
    """The name of the method or function that a call of Dynamo's graph calls, "" for one without."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


_IN_PLACE = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul setitem".split()
)
# Functions of `operator` that write to nothing: words of Python, which keep them from the plain name.
_OPERATORS = ("and_", "or_", "not_", "is_")


def named_in_place(name: str) -> bool:
    """Whether a call of this name, see `called`, writes to its first argument."""
    return name in _IN_PLACE or name.endswith("_") and not name.endswith("__") and name not in _OPERATORS


def of_tensors(node: Node) -> bool:
    """Whether every argument of `node` is a tensor's node: one may stand for a number that is an input, as every float
    of the model does under `dynamic=True`."""
    return all(isinstance(a, Node) and isinstance(value(a), torch.Tensor) for a in node.args)


class Builder:
    """Emits nodes before `anchor`, with fake values, with its modes, and with the provenance of `like`.

    in_region: autocast casts what is emitted in its region; else no op is emitted that it would cast.
    """

    def __init__(
        self, graph: fx.Graph, fake_mode: FakeTensorMode, anchor: Node, like: Node,
        mode_states: ModeStates | None = None, in_region: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.fake_mode, self.anchor, self.like = graph, fake_mode, anchor, like
        self.mode_states, self.in_region = mode_states if mode_states is not None else {}, in_region
        self.emitted: list[Node] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        for key in _INHERITED:
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
        asks = enable_python_dispatcher() if _ASKS_SIZES else contextlib.nullcontext()
        with self.fake_mode, torch.no_grad(), self._region(), asks:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        if self.anchor in self.mode_states:
            self.mode_states[node] = self.mode_states[self.anchor]
        self.emitted.append(node)
        return node

    def _region(self) -> contextlib.ExitStack:
        """The autocast region of `anchor`."""
        entered, state = contextlib.ExitStack(), self.mode_states.get(self.anchor) if self.in_region else None
        for device, dtype in state.autocast if state is not None else ():
            entered.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
        return entered

    def item(self, node: Node, index: int) -> Node:
        return self(operator.getitem, node, index)

    def size(self, node: Node, dim: int) -> Any:
        """A size of `node`, by a node that reads it only where it is no number."""
        known = value(node).shape[dim]
        return known if isinstance(known, int) else self(torch.ops.aten.sym_size.int, node, dim)

    def flat(self, node: Node) -> Node:
        """`node` with one dimension, by a node only where it has not."""
        return node if value(node).dim() == 1 else self(torch.ops.aten.reshape.default, node, [-1])

    def joined(self, nodes: Sequence[Node], *dim: int) -> Node:
        """`nodes` side by side, by a node only where there are several."""
        return nodes[0] if len(nodes) == 1 else self(torch.ops.aten.cat.default, nodes, *dim)

    def folded(self, op: Any, nodes: Iterable[Node]) -> Node | None:
        """`nodes` put together by an op of two, from the first on; None where there are none."""
        left = iter(nodes)
        return functools.reduce(lambda made, one: self(op, made, one), left, next(left, None))

    def part(self, node: Node, dim: int, first: int, size: Any) -> Node:
        """`size` places of `node` from `first` on, by a node only where they are not known to be all of them."""
        whole = value(node).shape[dim]
        if not isinstance(size, int) or isinstance(whole, int) and (first, size) == (0, whole):
            return node
        return self(torch.ops.aten.slice.Tensor, node, dim, first, first + size)

    def permuted(self, node: Node, order: Sequence[int]) -> Node:
        """`node` with its dimensions in `order`, by a node only where they are not so already."""
        return node if [*order] == sorted(order) else self(torch.ops.aten.permute.default, node, [*order])

    def squeezed(self, node: Node, dims: Collection[int]) -> Node:
        """`node` without `dims`, by a node only where there are any."""
        return self(torch.ops.aten.squeeze.dims, node, [*dims]) if dims else node

    def unsqueezed(self, node: Node, dims: Iterable[int]) -> Node:
        """`node` with dimensions of size 1 at `dims` of the result, in ascending order."""
        return functools.reduce(lambda made, dim: self(torch.ops.aten.unsqueeze.default, made, dim), dims, node)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """`node` in `dtype`, by a node only where it is not so already."""
        return node if value(node).dtype == dtype else self(torch.ops.aten._to_copy.default, node, dtype=dtype)


def place(
    inputs: Iterable[Node],
    outputs: Iterable[Node],
    like: Node,
    states: ModeStates,
    autocast_blind: Set[Any] = frozenset(),
) -> tuple[Node, list[Node]] | None:
    """Where an op reading `inputs` and replacing `outputs` can stand: (the node it goes before, the nodes that have to
    move behind it because they read `outputs` earlier). None where no place behind `inputs` has the modes of `like`.

    autocast_blind: the ops that may change their autocast region; with any, what goes there may, too.
    """
    inputs = list(inputs)
    node = max(inputs).next

    def fits(node: Node) -> bool:
        here, there = states[node], states[like]
        return here.grad == there.grad and (bool(autocast_blind) or here == there)

    while node.op in ("placeholder", "get_attr") or (node.op != "output" and not fits(node)):
        node = node.next
    if node.op == "output":
        return None
    moved = early_users(outputs, node)
    if any(states[n] != states[node] and not (fits(n) and n.target in autocast_blind) for n in moved):
        return None
    return None if set(moved) & set(inputs) else (node, moved)


def early_users(values: Iterable[Node], anchor: Node) -> list[Node]:
    """All nodes before `anchor` that depend on `values`, in graph order: they have to move behind it."""
    users = {user for node in values for user in node.users if user < anchor}
    return sorted(descendants(users, lambda user: user < anchor))


def move_after(nodes: Sequence[Node], anchor: Node) -> None:
    """Move `nodes` (in order) directly behind `anchor`."""
    at = anchor
    for node in nodes:
        at.append(node)
        at = node


def unread_without(values: Iterable[Node], unread: Set[Node], draws: Collection[Node] = ()) -> set[Node]:
    """`unread`, and those of `values`, and of what they are computed from, that nothing but such nodes reads. draws:
    nodes whose random numbers are of no use but to their readers."""
    found, pending = set(unread), list(values)
    while pending:
        node = pending.pop()
        kept = node.op != "call_function" or has_effects(node) and node not in draws
        if node not in found and not kept and found.issuperset(node.users):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def attribute_of(module: Any, path: Any) -> Any:
    """What a `get_attr` node with target `path` reads."""
    for name in str(path).split("."):
        module = getattr(module, name)
    return module


def has_effects(node: Node) -> bool:
    """Whether `node` does more than compute its value. Torch says so of any attention and of any dropout, which draw
    random numbers only where they drop."""
    if node.target is torch.ops.aten.dropout.default:
        return node.args[1] != 0 and node.args[2] is not False
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return dropout != 0.0
    return bool(node.is_impure())


def replace(node: Node, by: Any) -> None:
    """Have what reads `node` read `by`, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def drop_dead(graph: fx.Graph) -> bool:
    """Erase values nobody reads; whether there were any. Unlike `eliminate_dead_code` this leaves submodules alone: the
    bodies of higher-order ops are shared with Dynamo's graph, and in them an in-place op without readers is not dead.
    Nor is a method that writes, which a captured graph has on DTensors alone.
    """
    erased = False
    for node in reversed(graph.nodes):
        written = node.op == "call_method" and str(node.target).endswith("_")
        if not node.users and node.op not in ("placeholder", "output") and not written and not has_effects(node):
            graph.erase_node(node)
            erased = True
    return erased


def same_shape(a: Node, b: Node) -> bool:
    """Whether two tensors are known to have one shape."""
    return same_sizes(value(a).shape, value(b).shape)


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, as `same_size` knows it."""
    return len(a) == len(b) and all(map(same_size, a, b))


def same_size(a: Any, b: Any) -> bool:
    """Sizes known to be equal, as they are or by guards that hold already; never adds a guard on a symbolic size."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def long_dimensions(node: Node) -> int:
    """How many dimensions are more than one element long."""
    return sum(not same_size(n, 1) for n in value(node).shape)
