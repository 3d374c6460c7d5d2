"""Matches an expert by its last GEMM, a contraction with the weights of all experts, or with each row's own copy.

Of copies there are two layers here: the sum over a token's choices, written out, each with GEMMs of its own,
`y = y + gates[:, k, None] * expert(x, w[indices[:, k]])`, and rows that have one choice each,
`act(x @ w_up[ids]) @ w_down[ids]`, whose own sum, such as over those of a token, is left to the graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import of_tensors, same_shape, same_size, value
from megacpp_compile.fx.walks import near
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, expert_ending_in, refuse_unlike
from megacpp_compile.matchers.moe.gate_matrix import RouteAxes, match_column
from megacpp_compile.matchers.moe.gemms import Gemm, StackedGemms, adds_up, is_biased_product, product_of
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, around, bounded, gate_after
from megacpp_compile.matchers.moe.routing import is_nonnegative
from megacpp_compile.reader.factors import Axis, Dims, Factor, beneath, broadcast, factors, longer_dims, over
from megacpp_compile.reader.index_reads import READS, indexed

NEGATIVE = "an expert's number may be negative, which would count from the end"


@dataclasses.dataclass(frozen=True)
class GatheredExpert:
    """`expert` with the weights of all experts, of which every row takes those that `ids` says, or where these are None
    all; `gate`: what multiplies what it reads."""

    expert: Expert
    ids: Node | None
    gate: Factor | None


@or_none
def expert_behind(
    axes: RouteAxes, weight: Factor, hidden: Factor, out: Axis, added: Factor | None = None, again: bool = False
) -> GatheredExpert | None:
    """The expert whose last GEMM multiplies `hidden` by `weight`, and may be `added` to. again: see `StackedGemms`.
    Raises Refused."""
    *_, (inner, dims) = beneath(hidden)
    (channels,) = hidden.axes - axes.both
    NoMatch.when(dims[-1] != (channels,))
    match_gemm = StackedGemms(axes, [d for d in dims[:-1] if d], again)
    found = NoMatch.unless(match_gemm.weight(weight, out, channels))
    bias = None if added is None else match_gemm.bias(added, out)
    if added is not None and bias is None:
        refuse(added.by, "bias", "what is added to an expert's projection is no bias of its own")
    summed = weight.by if added is None else added.by
    expert = or_refuse(expert_ending_in(Gemm(summed, inner, found, bias, value(weight.by).dtype), match_gemm))
    if match_gemm.mixed is not None:
        refuse(match_gemm.mixed, "indices", "an expert's projections go by different choices")
    return GatheredExpert(expert, match_gemm.ids, match_gemm.gate)


def biased_gemms(
    inner: Node, dims: Dims, out: Axis, routes: tuple[Axis, ...]
) -> Iterator[tuple[Factor, Factor, Factor]]:
    """(weight, rows, bias) of every way in which `inner` is the sum of a GEMM and a bias. Raises Refused."""
    sums: list[tuple[Any, Any]] = []
    if is_biased_product(inner):
        sums = [(inner, inner.args[0])]
    elif inner.target is aten.add.Tensor and of_tensors(inner) and not inner.kwargs:
        sums = [inner.args, inner.args[::-1]]  # type: ignore[list-item]
    for side, other in sums:
        if not same_shape(side, inner):
            continue
        parts = product_of(side, dims) or factors(side, dims, lambda below: out in below and below.issuperset(routes))
        if (split := _split(parts, out)) is not None:
            refuse_if(not adds_up(side, inner), inner, "bias", "an expert's bias is wider than what it is added to")
            yield *split, Factor(other, broadcast(other, dims), inner)


def _split(parts: list[Factor], out: Axis) -> tuple[Factor, Factor] | None:
    """(weight, rows) of a product of two, of which the weight alone runs over `out`."""
    weights = [p for p in parts if out in p.axes]
    if len(parts) != 2 or len(weights) != 1:
        return None
    return weights[0], next(p for p in parts if p is not weights[0])


def expert_of(node: Node) -> GatheredExpert | None:
    """The expert that makes `node` of rows with each one's own weights, one for each row. Raises Refused."""
    whole = Factor(node, over(node), node)
    *outer, last = longer_dims(whole.dims) or ((),)
    if len(last) != 1 or not value(node).is_floating_point():
        return None
    (out,), axes = last, RouteAxes(tuple(a for d in outer for a in d), ())
    for inner, dims in beneath(whole):
        plain = _split(factors(inner, dims, lambda below: out in below), out)
        for parts in itertools.chain(biased_gemms(inner, dims, out, ()), [(*plain, None)] if plain is not None else []):
            weight, hidden, added = parts
            if len(hidden.axes - axes.both) == 1:
                if (found := expert_behind(axes, weight, hidden, out, added, again=True)) is not None:
                    return found
    return None


_OTHER = "a token's choices go through other experts, one with another's weights or one on other rows"


@or_none
def by_choice(
    view: GraphView, node: Node, gates: Node, outs: dict[int, Node], base: Node | None,
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = (),
) -> RoutedExperts | MatchFailure | None:  # fmt: skip
    """The layer whose sum `node` weights `outs`, by column of `gates` [.., k]; None where these are no experts'."""
    found: dict[int, GatheredExpert] = {}
    for column, out in sorted(outs.items()):
        expert = NoMatch.unless(expert_of(out))
        found[column] = expert
    choices = [None if one.ids is None else match_column(one.ids) for one in found.values()]
    NoMatch.when(any(one.gate is not None for one in found.values()) or None in choices)
    first, (indices, _) = next(iter(found.values())).expert, choices[0]  # type: ignore[misc]
    in_turn = [(indices, column) for column in found] == choices
    refuse_if(not in_turn, node, "indices", "a choice's output is multiplied by another choice's gate")
    every = list(found) == list(range(len(found))) and same_size(value(indices).shape[-1], len(found))
    refuse_if(not every, node, "choices", "only some of a token's choices are served")
    experts = [one.expert for one in found.values()]
    alike = all(e.x is first.x and e.parameters == first.parameters for e in experts)
    refuse_if(not alike or or_failure(refuse_unlike)(experts) is not None, node, "experts-differ", _OTHER)
    refuse_if(not is_nonnegative(indices), indices, "range", NEGATIVE)
    layer = RoutedExperts(node, first.x, indices, gates, (first,), base=base, choices=len(found), scales=scales)
    return bounded(view, layer)


_NEAR = 24  # nodes to look at
_ENDS = (
    aten.einsum.default, aten.bmm.default, aten.matmul.default, aten.baddbmm.default, aten.sum.dim_IntList,
    aten.add.Tensor,
)  # fmt: skip


def find_by_rows(
    view: GraphView, found: Sequence[RoutedExperts | MatchFailure]
) -> Iterator[RoutedExperts | MatchFailure]:
    """Every such layer that is no part of one that is `found`, and what is nearly one with no failure near."""
    if not any(map(_copies, view.graph.nodes)):
        return  # which is quicker than to read every product and sum
    inside = set[Node]().union(*(one.inside for one in found if isinstance(one, RoutedExperts)))
    failed = {one.node for one in found if isinstance(one, MatchFailure)}
    for node in reversed(view.graph.nodes):
        if node.target not in _ENDS or node in inside or (expert := or_failure(expert_of)(node)) is None:
            continue
        layer = expert if isinstance(expert, MatchFailure) else _layer(view, node, expert)
        if isinstance(layer, RoutedExperts):
            inside |= layer.inside
            yield layer
        elif layer is not None:
            told = not failed.isdisjoint(around(node))
            failed |= {node, layer.node}
            if not told:
                yield layer


def _copies(node: Node) -> bool:
    """Whether `node` may be weights, one for each row."""
    read = indexed(node) if node.target in READS else None
    return read is not None and value(read[0]).dim() == 3 and value(node).is_floating_point()


def without_theirs(
    found: Sequence[RoutedExperts | MatchFailure], layers: Sequence[RoutedExperts | MatchFailure]
) -> list[RoutedExperts | MatchFailure]:
    """`found` without failures of sums of what `layers` make of each row."""
    ends = {one.output for one in layers if isinstance(one, RoutedExperts)}
    return [one for one in found if isinstance(one, RoutedExperts) or ends.isdisjoint(near(one.node, _NEAR))]


@or_failure
def _layer(view: GraphView, node: Node, found: GatheredExpert) -> RoutedExperts | MatchFailure | None:
    """The layer that `found` is, whose output is `node`."""
    if found.ids is None or found.gate is not None:
        return None
    refuse_if(not is_nonnegative(found.ids), found.ids, "range", NEGATIVE)
    layer = RoutedExperts(node, found.expert.x, found.ids, None, (found.expert,), choices=1)
    return bounded(view, gate_after(layer))
