"""From what was recognised of routed experts to the op, alike for every spelling."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile.fx.edit import Builder, move_behind, place, value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, Weight
from megacpp_compile.matchers.moe.gate_matrix import is_filled
from megacpp_compile.passes._moe_precision import REASON, decide
from megacpp_compile.passes._rule import Match

aten = torch.ops.aten
_REPLACED = "megacpp_moe_replaced_by"
_ASSERTS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    torch._check,
)


@dataclasses.dataclass(frozen=True)
class Routed:
    """`node = base + sum over choices of gate * expert(x)`. `experts`: one for every number from `first` on, or one
    whose weights hold them all. x is [.., d]; indices and gates are [.., k], or [T] for one choice, or with `choices`
    of any shape over slots; gates may be a matrix [.., E], of which each choice's is read. `column`: of [T, k] that
    choice alone. `scaled`: the gate multiplies what the expert reads instead, `base + sum of expert(gate * x)`."""

    node: Node
    x: Node
    indices: Node
    gates: Node
    experts: list[Expert]
    first: int = 0
    base: Node | None = None
    choices: int | None = None
    matrix: bool = False
    column: int | None = None
    scaled: bool = False


def match(view: GraphView, routed: Routed) -> Match | MatchFailure:
    node = routed.node
    weights = [p.weight.tensor for e in routed.experts for p in (*e.ups, e.down)]
    inputs = list(dict.fromkeys([routed.x, routed.indices, routed.gates, *weights]))
    if routed.base is not None and routed.base not in inputs:
        inputs.append(routed.base)
    inside = between(inputs, node)
    for n in inside - {node}:
        outside = next((u for u in n.users if u not in inside and not _of_size(u)), None)
        if outside is not None and not _counts(n):
            return MatchFailure(n, "escapes", f"an expert's intermediate value is used elsewhere too ({outside.name})")
        fake, modes = value(n), view.mode_states
        if isinstance(fake, torch.Tensor) and fake.is_floating_point() and modes[n] != modes[node]:
            return MatchFailure(n, "region", "part of it runs under another grad or autocast mode")
    if place(inputs, [node], node, view.mode_states) is None:
        return MatchFailure(node, "region", "a weight is computed under another grad or autocast mode")
    return Match(node, inputs, [node], lambda: _rewrite(view, routed, inputs, inside))


def between(inputs: list[Node], node: Node) -> set[Node]:
    """All nodes that `node` is computed by from `inputs`; what makes the inputs themselves is not among them."""
    inside, stack = set[Node](), [node]
    while stack:
        n = stack.pop()
        if n not in inside and n not in inputs and n.op == "call_function":
            inside.add(n)
            if not is_filled(n, 0.0):  # zeros have but the shape of what they are made like
                stack.extend(n.all_input_nodes)
    return inside


def _counts(node: Node) -> bool:
    """Whether `node` is about which tokens go where, and of a size known now: it may as well be made for others."""
    fake = value(node)
    integer = isinstance(fake, torch.Tensor) and not fake.is_floating_point()
    return integer and not free_unbacked_symbols(fake.shape)


def _of_size(node: Node) -> bool:
    """Whether `node` only speaks of how many rows there are, to be checked at run time."""
    if node.target in _ASSERTS:
        return True
    numbers = isinstance(value(node), (int, bool, torch.SymInt, torch.SymBool))
    return numbers and all(_of_size(u) for u in node.users)


def _drop_checks(nodes: set[Node]) -> None:
    """Erase what checks at run time how many rows an expert has, where nobody but the checks asks."""
    pending = [u for n in nodes for u in n.users if u not in nodes and _of_size(u)]
    order = list(dict.fromkeys(pending))
    for n in order:
        order.extend(u for u in n.users if u not in order)
    for n in sorted(set(order), reverse=True):
        if not n.users:
            n.graph.erase_node(n)


def _rewrite(view: GraphView, routed: Routed, inputs: list[Node], inside: set[Node]) -> tuple[Node, list[Node]]:
    old = routed.node
    # What feeds this site may itself have been rewritten since: one layer's output is the next one's input.
    routed = dataclasses.replace(
        routed,
        x=_now(routed.x),
        indices=_now(routed.indices),
        gates=_now(routed.gates),
        base=None if routed.base is None else _now(routed.base),
    )
    inputs[:] = [_now(n) for n in inputs]
    where = place(inputs, [old], old, view.mode_states)
    assert where is not None
    anchor, moved = where
    build = Builder(view.graph, view.fake_mode, anchor, old, view.mode_states)
    expert = routed.experts[0]
    dtype = value(expert.down.node).dtype
    indices, gates, x = routed.indices, routed.gates, routed.x
    if routed.column is not None:
        cut = routed.column, routed.column + 1
        indices = build(aten.slice.Tensor, indices, -1, *cut)
        gates = gates if routed.matrix else build(aten.slice.Tensor, gates, -1, *cut)
    if routed.matrix:
        if routed.choices is not None:
            indices = build(aten.reshape.default, indices, [-1, routed.choices])
        elif value(indices).dim() == 1:
            indices = build(aten.unsqueeze.default, indices, -1)
        if value(indices).dim() != value(gates).dim():
            indices, gates = (build(aten.reshape.default, n, [-1, value(n).shape[-1]]) for n in (indices, gates))
        gates = build(aten.gather.default, gates, -1, indices)
    if value(x).dim() != 2:
        x = build(aten.reshape.default, x, [-1, value(x).shape[-1]])
    if routed.choices is not None or value(indices).dim() > 2:
        choices = routed.choices if routed.choices is not None else value(indices).shape[-1]
        indices, gates = (build(aten.reshape.default, n, [-1, choices]) for n in (indices, gates))
    elif value(indices).dim() == 1:
        indices, gates = build(aten.unsqueeze.default, indices, 1), build(aten.unsqueeze.default, gates, 1)
    if routed.first:
        indices = build(aten.sub.Tensor, indices, routed.first)
    choices = value(indices).shape[1]
    if routed.scaled:  # every choice is a row of its own, with one choice
        x = build(aten.mul.Tensor, build(aten.unsqueeze.default, x, 1), build(aten.unsqueeze.default, gates, -1))
        x = build(aten.reshape.default, x, [-1, value(x).shape[-1]])
        indices = build(aten.reshape.default, indices, [-1, 1])
        gates = build(aten.ones_like.default, build(aten.reshape.default, gates, [-1, 1]))
    count = len(expert.ups)
    stacks = [_weights(build, [e.ups[i].weight for e in routed.experts], dtype) for i in range(count)]
    down = _weights(build, [e.down.weight for e in routed.experts], dtype)
    args = (
        build.cast(x, dtype), indices, gates, stacks[0] if count == 2 else [], stacks[-1], down,
        expert.activation, expert.layout, value(old).dtype,
    )  # fmt: skip
    parts = dict.fromkeys(module_fqn(p.node) for e in routed.experts for p in (*e.ups, e.down))
    precision, reason = decide(view.config.precision, module_fqn(old), parts, args)
    node = build(torch.ops.megacpp.moe.default, *args, *((True, precision) if precision else ()))
    node.meta[REASON] = reason
    y = build.item(node, 0)
    if routed.scaled and choices != 1:
        y = build(aten.sum.dim_IntList, build(aten.reshape.default, y, [-1, choices, value(y).shape[-1]]), [1])
    if tuple(value(y).shape) != tuple(value(old).shape):
        y = build(aten.reshape.default, y, list(value(old).shape))
    if routed.base is not None:
        y = build(aten.add.Tensor, routed.base, y)
    move_behind(moved, build.emitted[-1])
    _drop_checks(inside)
    old.replace_all_uses_with(y)
    old.meta[_REPLACED] = y
    return node, [y]


def _now(node: Node) -> Node:
    """What stands for `node` after earlier rewrites; itself where one was undone."""
    while not node.users and _REPLACED in node.meta:
        node = node.meta[_REPLACED]
    return node


def _weights(build: Builder, weights: list[Weight], dtype: torch.dtype) -> list[Node]:
    """Every expert's weight as [out, in] in `dtype`: the tensor that holds them all in order, or one each."""
    first = weights[0]
    stacked = value(first.tensor).dim() == 3 and all(
        w.tensor is first.tensor and w.transposed == first.transposed and w.index == i for i, w in enumerate(weights)
    )
    if first.every or (stacked and len(weights) == value(first.tensor).shape[0]):
        return [_turned(build, first.tensor, first.transposed, dtype)]
    own = [w.tensor if w.index is None else build(aten.select.int, w.tensor, 0, w.index) for w in weights]
    return [_turned(build, t, w.transposed, dtype) for t, w in zip(own, weights, strict=True)]


def _turned(build: Builder, tensor: Node, transposed: bool, dtype: torch.dtype) -> Node:
    tensor = build.cast(tensor, dtype)
    return build(aten.transpose.int, tensor, -2, -1) if transposed else tensor


