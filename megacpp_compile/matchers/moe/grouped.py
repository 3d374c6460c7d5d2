"""Matches all slots at once: GEMMs over an axis of experts or of choices, and the gated sum over that axis.

Either every expert multiplies every token (`einsum('td,ehd->teh', x, w)`, `bmm` over a repeated x, a `stack` of the
outputs of separate experts) and a matrix of gates, zero where an expert was not chosen, leaves k of them; or every
choice is multiplied by its own copy of a weight (`w[indices]`); or every expert's rows were written to their places
(`y[ids == e] = expert(rows[ids == e])`).

Or experts' outputs on every token are added up one after the other, each weighted by its column of a gate matrix, `y +=
gates[:, e, None] * expert_e(x)`, or by the sum of those of a token's gates that are its own,
`y += (gates * (indices == e)).sum(-1, keepdim=True) * expert_e(x)`. Most of the matrix is zero where `topk` chooses the
experts, and an output that is multiplied by zero need not be computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import uncast
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import outputs
from megacpp_compile.matchers.moe.experts import match_expert
from megacpp_compile.matchers.moe.gate_matrix import RouteAxes, match_chosen_gate, match_column, over_choices
from megacpp_compile.matchers.moe.gathered_experts import (
    NEGATIVE,
    biased_gemms,
    by_choice,
    expert_behind,
)
from megacpp_compile.matchers.moe.gemms import copies_of, match_linear_gemm
from megacpp_compile.matchers.moe.outputs import all_experts, refuse_other_rows, weighted_by_matrix
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.routing import is_nonnegative, numbers_of_scores
from megacpp_compile.reader.factors import (
    Axis,
    Dims,
    Factor,
    added_to_every,
    beneath,
    factors,
    longer_dims,
    over,
)
from megacpp_compile.reader.index_reads import SUMS_OF_ROWS
from megacpp_compile.reader.products import multiplied

_SUMS = (aten.sum.dim_IntList, aten.einsum.default, aten.bmm.default, aten.mm.default, aten.matmul.default)


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every gated sum over experts or choices, and what is nearly one and no part of another."""
    sums = (node for node in view.graph.nodes if node.target in (*_SUMS, *SUMS_OF_ROWS))
    found = [one for node in sums if (one := _check(view, node)) is not None]
    inside = set[Node]().union(*(one.inside for one in found if isinstance(one, RoutedExperts)))
    yield from (one for one in found if isinstance(one, RoutedExperts) or one.node not in inside)


@or_failure
@or_none
def _check(view: GraphView, node: Node) -> RoutedExperts | MatchFailure | None:
    """The layer of experts whose sum is `node`."""
    added = NoMatch.unless(added_to_every(node) if node.target in SUMS_OF_ROWS else (None, node, *[over(node)] * 2))
    base, summed, dims, inner = added
    known = longer_dims(dims)
    NoMatch.when(not known or not value(node).is_floating_point())
    tokens, (out,) = tuple(a for d in known[:-1] for a in d), known[-1]
    parts = factors(summed, inner, lambda axes: out in axes and not (tokens and axes.isdisjoint(tokens)))
    scales = [p for p in parts if p.axes <= set(tokens)]
    of = RouteAxes(tokens, (), base)
    if (summed_too := over_choices(node, parts, tokens, out)) is not None:
        tokens = tokens if summed_too.each is None else (*tokens, summed_too.each)
        matrix = Factor(node, (*((t,) for t in tokens), (summed_too.experts,)), node)  # that the sum would make
        parts = [*summed_too.other, matrix]
        of = RouteAxes(tokens, (), base, summed_too.chosen, summed_too.each)
    one = [p for p in parts if p.axes == set(tokens)]
    several = [p for p in parts if out not in p.axes and p.axes > set(tokens) and len(p.axes) == len(tokens) + 1]
    outs = [p for p in parts if out in p.axes]
    found = _weighted(view, node, of, parts, one or several, outs, out)  # one or several choices of a token
    own = [_scale(p, dims) for p in scales]
    if found is None and scales and len(several) == 1 and None not in own:
        rest = [p for p in parts if p not in scales]
        of = dataclasses.replace(of, scales=tuple(own))  # type: ignore[arg-type]
        found = _weighted(view, node, of, rest, several, outs, out)
    if found is None:
        outputs.refuse_otherwise_weighted(view, node, outs, of)
    return found


def _scale(factor: Factor, dims: Dims) -> tuple[Node, tuple[int, ...]] | None:
    """What multiplies a sum over `dims` by numbers for some of them, and for which."""
    places = [dims.index(dim) for dim in longer_dims(factor.dims) if dim in dims]
    plain = len(places) == len(longer_dims(factor.dims)) and places == sorted(places)
    return (factor.node, tuple(places)) if plain else None


def _weighted(
    view: GraphView, node: Node, of: RouteAxes, parts: list[Factor], gates: list[Factor], outs: list[Factor], out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer of experts whose sum `node` has the factors `parts`, with `gates` and experts' outputs among them.

    of: its axes but for those of routes, here and below.
    """
    if not gates and len(parts) == 2 and len(outs) == 1:
        return _ungated(view, node, of, outs[0], next(p for p in parts if p is not outs[0]), out)
    if len(gates) != 1 or len(outs) != 1:
        copies = [p for p in outs if copies_of(p) is not None]
        ungated = copies and len(outs) == len(parts) - 1 > 1
        refuse_if(ungated, node, "gates", "an expert's output is not multiplied by one gate per choice")
        return None
    (gate,) = gates
    axes = dataclasses.replace(of, routes=tuple(gate.axes - set(of.tokens)))
    if len(parts) == 2:
        return _outputs(view, node, axes, outs[0], gate, out)
    hidden = next(p for p in parts if p not in (gate, outs[0]))
    if len(parts) > 3 or len(hidden.axes - gate.axes) != 1 or not hidden.axes > gate.axes:
        return None
    return _from_down(view, node, axes, outs[0], gate, hidden, out)


@or_none
def _ungated(
    view: GraphView, node: Node, of: RouteAxes, weight: Factor, hidden: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer whose sum `node` has no gates; they may multiply what experts read."""
    *_, (_, dims) = beneath(hidden)
    tokens = set(of.tokens)
    routes = hidden.axes - {*tokens, *dims[-1]}
    NoMatch.when(len(routes) != 1 or len(dims[-1]) != 1 or not routes < weight.axes | tokens)
    axes = dataclasses.replace(of, routes=tuple(routes))
    chosen_from = numbers_of_scores(view.graph).values()  # what is summed over may be heads, say
    experts = copies_of(weight) is not None or axes.choices is not None and axes.choices in chosen_from
    NoMatch.when(not experts or not hidden.axes > {*tokens, *routes})
    found = or_failure(_from_down)(view, node, axes, weight, None, hidden, out)
    routed = isinstance(found, MatchFailure) and copies_of(weight) is None and _goes_by_choices(weight.node)
    return None if routed else found  # what puts rows back in their places is summed over experts, too


def _goes_by_choices(node: Node) -> bool:
    """Whether `node` is computed of numbers that the graph chooses, as rows in places are and no weight is."""
    made = (value(n) for n in ancestors([node]) if n.op == "call_function")
    return any(isinstance(fake, torch.Tensor) and fake.dtype in (torch.int64, torch.bool) for fake in made)


@or_none
def _from_down(
    view: GraphView, node: Node, axes: RouteAxes, weight: Factor, gate: Factor | None, hidden: Factor, out: Axis,
    added: Factor | None = None,
) -> RoutedExperts | MatchFailure | None:
    """The layer whose last GEMM multiplies `hidden` by `weight`, which may be `added` to and weighted by `gate`."""
    found = NoMatch.unless(expert_behind(axes, weight, hidden, out, added))
    expert, scaled_input = found.expert, gate is None
    ends = "neither what an expert reads nor what it makes is" if scaled_input else "both ends of an expert are"
    refuse_if(scaled_input == (found.gate is None), node, "gates", f"{ends} multiplied by gates")
    gate = gate or found.gate
    assert gate is not None
    if found.ids is None:
        return outputs.by_matrix(view, node, axes, gate, expert.x, [expert], scaled_input)
    NoMatch.when(axes.choices is None or axes.chosen is not None)
    gates = outputs.gates_of_choices(gate, axes)
    refuse_if(not is_nonnegative(found.ids), found.ids, "range", NEGATIVE)
    layer = RoutedExperts(
        node, expert.x, found.ids, gates, (expert,), base=axes.base, choices=axes.choices,
        scaled_input=scaled_input, scales=axes.scales,
    )  # fmt: skip
    return bounded(view, layer)


def _outputs(
    view: GraphView, node: Node, axes: RouteAxes, rows: Factor, gate: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer that weights outputs of experts that are modules of their own, or end in a sum with a bias."""
    for inner, dims in beneath(rows):
        biased = _biased(view, node, axes, inner, dims, gate, out)
        if (found := biased or outputs.layer_of(view, node, axes, inner, dims, gate, out)) is not None:
            return found
    return None


def _biased(
    view: GraphView, node: Node, axes: RouteAxes, inner: Node, dims: Dims, gate: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer whose outputs `inner` are the sum of a GEMM and a bias."""
    for parts in biased_gemms(inner, dims, out, axes.routes):
        weight, hidden, added = parts
        if len(hidden.axes - gate.axes) != 1 or not hidden.axes > gate.axes:
            continue
        if (found := _from_down(view, node, axes, weight, gate, hidden, out, added)) is not None:
            return found
    return None


@dataclasses.dataclass(frozen=True)
class WeightedOutput:
    """`node` is `out` times column `expert` of `matrix`, or of the matrix that a pair (indices, gates) stands for."""

    node: Node
    matrix: Node | tuple[Node, Node]
    expert: int
    out: Node


def find_by_columns(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every sum of experts' outputs that are weighted by columns."""
    weighted: dict[Node, WeightedOutput] = {}
    sums: dict[Node, tuple[Node | None, list[WeightedOutput]]] = {}  # what was added to, None for nothing
    for node in view.graph.nodes:
        if (one := _weighted_output(node)) is not None:
            weighted[node] = one
        elif node.target is aten.add.Tensor and not node.kwargs:
            for old, new in (node.args, node.args[::-1]):
                if not isinstance(uncast(new), Node) or (added := weighted.get(uncast(new))) is None:
                    continue
                if old in sums:
                    base, before = sums[old]
                    sums[node] = base, [*before, added]
                elif (start := weighted.get(uncast(old))) is not None and start.matrix == added.matrix:
                    sums[node] = None, [start, added]
                else:
                    empty = not isinstance(old, Node) and old == 0 or is_filled(old, 0.0)
                    sums[node] = None if empty else old, [added]
                break
            else:
                if node.args[1] == 0 and (start := weighted.get(uncast(node.args[0]))) is not None:  # as `sum` begins
                    sums[node] = None, [start]
    for node, (base, found) in sums.items():
        if len(found) > 1 and not any(u in sums for u in node.users):
            if (checked := _of_columns(view, node, base, found)) is not None:
                yield checked


def _weighted_output(node: Node) -> WeightedOutput | None:
    """The column and the rest where `node` multiplies a tensor by a column of gates."""
    for gate, out in multiplied(node):
        if not value(gate).dim() == value(out).dim() > 0 or not same_size(value(gate).shape[-1], 1):
            continue
        column: tuple[Node | tuple[Node, Node], int] | None = match_column(gate)  # type: ignore[arg-type]
        if column is None and (own := match_chosen_gate(gate)) is not None:  # type: ignore[arg-type]
            return WeightedOutput(node, own[:2], own[2], out)  # type: ignore[arg-type]
        if column is None or not all(map(same_size, value(column[0]).shape[:-1], value(out).shape[:-1])):
            continue
        return WeightedOutput(node, *column, out)  # type: ignore[arg-type]
    return None


@or_failure
@or_none
def _of_columns(
    view: GraphView, node: Node, base: Node | None, outputs: list[WeightedOutput]
) -> RoutedExperts | MatchFailure | None:
    """The layer whose sum is `node`, of `base` and `outputs`; None where the first of these is no expert's."""
    matrix = outputs[0].matrix
    by_number = {one.expert: one for one in outputs}
    if match_expert(outputs[0].out, match_linear_gemm) is None:
        alike = isinstance(matrix, Node) and all(one.matrix is matrix for one in outputs)
        NoMatch.when(not alike or len(by_number) < len(outputs))  # some other weighted sum
        return by_choice(view, node, matrix, {n: one.out for n, one in by_number.items()}, base)  # type: ignore[arg-type]
    for one in outputs:
        refuse_if(one.matrix != matrix, one.node, "gates", "experts are weighted by different gates")
    first = 0 if isinstance(matrix, Node) else min(by_number)
    gaps = sorted(by_number) != list(range(first, first + len(outputs)))
    gaps = gaps or isinstance(matrix, Node) and not same_size(value(matrix).shape[-1], len(outputs))
    refuse_if(gaps, node, "gaps", "not every column of the gates weights one expert")
    found = NoMatch.unless(all_experts([by_number[first + e].out for e in range(len(outputs))]))
    if isinstance(matrix, Node):
        return weighted_by_matrix(view, node, matrix, *found, base)
    x, experts = found
    refuse_other_rows(x, value(x).shape[:-1], value(matrix[0]).shape[:-1])
    return bounded(view, RoutedExperts(node, x, matrix[0], matrix[1], tuple(experts), first, base))
