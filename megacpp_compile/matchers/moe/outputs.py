"""Matches gated sums of experts' outputs: of all experts on all tokens, of which gates or indices choose, or one for
every choice that is written to its place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, same_sizes, value
from megacpp_compile.matchers._match import MatchFailure, Refused, or_refuse, refuse_if, refuse_unless
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, match_expert, one_projection_of_all, refuse_unlike
from megacpp_compile.matchers.moe.gate_matrix import Chosen, RouteAxes, match_chosen
from megacpp_compile.matchers.moe.gathered_experts import by_choice
from megacpp_compile.matchers.moe.gemms import match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.loop import Written, written_to
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.routing import numbers_of_scores, scores_of
from megacpp_compile.matchers.moe.rows import once_a_choice
from megacpp_compile.matchers.views import is_cast
from megacpp_compile.reader.factors import Axis, Dims, Factor, beneath, is_one, longer_dims, seen_as
from megacpp_compile.reader.index_reads import repeated_over_channels
from megacpp_compile.reader.links import through


@or_none
def layer_of(
    view: GraphView, node: Node, axes: RouteAxes, inner: Node, dims: Dims, gate: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer whose sum `node` weights the outputs `inner`, which run over `dims`, by `gate`."""
    if _stacked(inner) is not None:
        return _of_all(view, node, axes, inner, dims, gate, out)
    NoMatch.when(axes.chosen is not None)
    if inner.target is aten.gather.default:
        return _chosen_of_all(view, node, axes, inner, dims, gate, out)
    written = NoMatch.unless(written_to(inner) if longer_dims(dims) in map(longer_dims, axes.slots((out,))) else None)
    NoMatch.when(not written.flat and len(dims) != value(written.choices).dim() + 1)
    return _of_written(view, node, axes, gate, written)


def _of_all(
    view: GraphView, node: Node, axes: RouteAxes, inner: Node, dims: Dims, gate: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer that weights the stack `inner` of all experts' outputs by a matrix."""
    stacked = _stacked(inner)
    if stacked is not None and axes.each is not None and dims[stacked[1]] == (axes.each,):
        return _once_a_choice(view, node, axes, stacked[0], dims[: stacked[1]] + dims[stacked[1] + 1 :], gate, out)
    if stacked is None or axes.place(dims, out) != stacked[1]:
        return None
    found = all_experts(stacked[0])
    if found is None and axes.chosen is None and (gates := seen_as(gate, axes.slots()[0])) is not None:
        return by_choice(view, node, gates[0], dict(enumerate(stacked[0])), axes.base, axes.scales)
    if found is None:
        return None
    return by_matrix(view, node, axes, gate, found[0], found[1])


_OTHER_ROWS = (
    "experts read other rows for each of a token's choices: give them each choice's row as a token with one choice, "
    "and add a token's results up behind them"
)


@or_none
def _once_a_choice(
    view: GraphView, node: Node, axes: RouteAxes, stacks: list[Node], dims: Dims, gate: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer of which `stacks`, over `dims`, hold all experts' outputs once for each of a token's choices."""
    one = dataclasses.replace(axes, tokens=axes.tokens[:-1], each=None)
    found: list[tuple[Node, list[Expert]]] = []
    for stack in stacks:
        for inner, inner_dims in beneath(Factor(stack, dims, stack)):
            stacked = _stacked(inner)
            if stacked is not None and one.place(inner_dims, out) == stacked[1]:
                layer = NoMatch.unless(all_experts(stacked[0]))
                found.append(layer)
                break
    NoMatch.when(len(found) != len(stacks))
    x, experts = found[0]
    refuse_if(any(other is not x for other, _ in found), node, "rows", _OTHER_ROWS)
    differ = any([_form(e) for e in others] != [_form(e) for e in experts] for _, others in found)
    refuse_if(differ, node, "experts-differ", "other experts serve a token's other choices")
    return by_matrix(view, node, one, gate, x, experts)


def _form(expert: Expert) -> tuple[Any, ...]:
    return expert.activation, expert.layout, expert.parameters


def refuse_otherwise_weighted(view: GraphView, node: Node, outs: list[Factor], axes: RouteAxes) -> None:
    """Raise Refused where the sum `node` has all experts' outputs among its factors `outs`, as many as there are scores
    to choose by, and something else for weights than gates; or where it has choices and their gates, and none that is
    known to be experts'."""
    unknown = isinstance(axes.chosen, Chosen) and axes.each is not None and scores_of(axes.chosen.indices) is not None
    reason = "what gates and one-hots of choices weight are no experts' outputs in a form that is known"
    refuse_if(unknown, node, "no-expert", reason)
    counts = set(numbers_of_scores(view.graph).values())
    stacks = [stacked[0] for part in outs for inner, _ in beneath(part) if (stacked := _stacked(inner)) is not None]
    stacks += [stacked[0] for parts in stacks for p in parts if (stacked := _stacked(p)) is not None]
    for parts in (parts for parts in stacks if len(parts) in counts):
        found = all_experts(parts)
        reason = "experts' outputs are multiplied by other numbers than one gate for each token and expert"
        refuse_if(found is not None, node, "gates", reason)


def _stacked(node: Node) -> tuple[list[Node], int] | None:
    """(the tensors, the dimension that tells them apart) where `node` is the stack of tensors, or the `cat` of tensors
    that were each given a dimension for it."""
    if node.target not in (aten.stack.default, aten.cat.default):
        return None
    parts: list[Node] = list(node.args[0])  # type: ignore[arg-type]
    at = (node.args[1] if len(node.args) > 1 else 0) % value(node).dim()  # type: ignore[operator]
    if node.target is aten.stack.default:
        return parts, at
    if any(p.target is not aten.unsqueeze.default or p.args[1] % value(p).dim() != at for p in parts):  # type: ignore[operator]
        return None
    return [p.args[0] for p in parts], at  # type: ignore[misc]


@or_none
def _chosen_of_all(
    view: GraphView, node: Node, axes: RouteAxes, inner: Node, dims: Dims, gate: Factor, out: Axis
) -> RoutedExperts | MatchFailure | None:
    """The layer that gathers each token's choices `inner` from a stack of all experts' outputs."""
    stack, dim, index = inner.args
    stack = through(stack, is_cast)
    place, stacked = axes.place(dims, out), _stacked(stack)  # type: ignore[arg-type]
    if stacked is None or place is None or axes.choices is None:
        return None
    NoMatch.when(not dim % len(dims) == stacked[1] == place == len(dims) - 2)  # type: ignore[operator]
    ids = repeated_over_channels(index)  # type: ignore[arg-type]
    wholes = (d for d in range(len(dims)) if d != place)
    whole = all(same_size(value(inner).shape[d], value(stack).shape[d]) for d in wholes)
    if ids is None or not whole:
        return None
    found = NoMatch.unless(all_experts(stacked[0]))
    layer = RoutedExperts(
        node, found[0], ids, gates_of_choices(gate, axes), tuple(found[1]), base=axes.base, choices=axes.choices,
        scales=axes.scales,
    )  # fmt: skip
    return bounded(view, layer)


def gates_of_choices(gate: Factor, axes: RouteAxes) -> Node:
    """The gates, one for each choice, of which `gate` is a view. Raises Refused."""
    reason = "the gates are in another order than the choices"
    return refuse_unless(seen_as(gate, *axes.slots()), gate.node, "gates", reason)[0]


def by_matrix(
    view: GraphView, node: Node, axes: RouteAxes, gate: Factor, x: Node, experts: list[Expert],
    scaled_input: bool = False
) -> RoutedExperts | MatchFailure:
    """The layer in which every expert works on every token, weighted by the matrix that `gate` is a view of."""
    chosen = or_refuse(axes.chosen)
    if chosen is not None:
        tokens = refuse_unless(x if axes.each is None else _of_tokens(x, axes), x, "rows", _OTHER_ROWS)
        return weighted_by_choices(view, node, chosen, tokens, experts, axes.base, axes.scales)
    matrix = seen_as(gate, axes.slots()[0])
    of_one = matrix is not None and is_one(value(matrix[0]).shape[-1])
    transposed = matrix is None or of_one and value(matrix[0]).dim() == 2 and bool(axes.routes)
    reason = "the gates are in another order than the tokens"
    matrix = refuse_unless(matrix or seen_as(gate, (axes.routes, axes.tokens)), gate.node, "gates", reason)
    return weighted_by_matrix(view, node, matrix[0], x, experts, axes.base, scaled_input, transposed, axes.scales)


def _of_tokens(x: Node, axes: RouteAxes) -> Node | None:
    """The tokens of which `x` has one row for each choice."""
    inner, (*tokens, each) = (Axis(value(x).shape[-1]),), axes.tokens
    one = dataclasses.replace(axes, tokens=tuple(tokens))
    for dims in axes.rows(inner):
        if len(dims) == value(x).dim() and (seen := seen_as(Factor(x, dims, x), *one.rows(inner))) is not None:
            return seen[0]
    return once_a_choice(x, math.prod(t.size for t in tokens), each.size) if value(x).dim() == 2 else None


def _of_written(
    view: GraphView, node: Node, axes: RouteAxes, gate: Factor, found: Written
) -> RoutedExperts | MatchFailure | None:
    """The layer whose experts have written an output for every slot; None where their rows are not the tokens, or the
    gates lie otherwise: then the experts are a layer without gates."""
    rows, channels = found.rows, Axis(value(found.rows).shape[-1])
    x: tuple[Node, int] | None = (rows, 0)
    if not found.by_token:
        x = seen_as(Factor(rows, axes.slots((channels,))[1], rows), *axes.rows((channels,)))
    gates = seen_as(gate, *axes.slots())
    if x is None or gates is None or axes.choices is None:
        return None
    experts = tuple(found.experts)
    layer = RoutedExperts(
        node, x[0], found.choices, gates[0], experts, found.first, axes.base, axes.choices, scales=axes.scales
    )
    return bounded(view, layer)


def all_experts(outs: list[Node]) -> tuple[Node, list[Expert]] | None:
    """(what all experts read, the experts) where `outs` are their outputs; None where the first is no expert's."""
    experts: list[Expert] = []
    for out in outs:
        expert = match_expert(out, match_linear_gemm)
        if expert is None:
            refuse_if(experts, out, "no-expert", "what is weighted is no expert's output")
            return None
        if isinstance(expert, MatchFailure):
            raise Refused(one_projection_of_all(outs) or expert)
        other = experts and strip_row_views(expert.x) is not strip_row_views(experts[0].x)
        refuse_if(other, expert.node, "inputs", "experts read different inputs")
        experts.append(expert)
    refuse_unlike(experts)
    return strip_row_views(experts[0].x), experts


def refuse_other_rows(x: Node, outer: Sequence[Any], tokens: Sequence[Any]) -> None:
    """Raise Refused where the dimensions `outer` of rows `x` are not those of the tokens that choose."""
    same = same_sizes(outer, tokens)
    refuse_if(not same, x, "rows", "there are not as many rows as choices")


def weighted_by_matrix(
    view: GraphView,
    node: Node,
    matrix: Node,
    x: Node,
    experts: list[Expert],
    base: Node | None = None,
    scaled_input: bool = False,
    transposed: bool = False,
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = (),
) -> RoutedExperts | MatchFailure:
    """The layer in which columns of `matrix` weight what `experts`, or the one that holds them all, make of `x`.

    scaled_input: the columns weight what experts read; an expert without a bias makes zeros of zeros. transposed: the
    matrix lies [E, T].
    """
    reason = "the gates may all differ from zero: every expert works on every token"
    found = refuse_unless(match_chosen(matrix, transposed), matrix, "dense-gates", reason)
    biased = scaled_input and any(expert.biased for expert in experts)
    refuse_if(biased, experts[0].node, "bias", "an expert with a bias makes something of rows of zeros")
    gates = matrix if found.gates is None else found.gates
    refuse_if(value(matrix).dim() == 1, matrix, "gates", "the gates of one token have no dimension of tokens")
    one = value(found.indices).dim() < value(matrix).dim()  # the only choice of a token
    outer, tokens = [n for n in value(x).shape[:-1] if not is_one(n)], list(value(found.indices).shape)
    refuse_other_rows(x, outer, [n for n in (tokens if one else tokens[:-1]) if not is_one(n)])
    routed = RoutedExperts(
        node, x, found.indices, gates, tuple(experts), 0, base, by_expert=found.gates is None,
        scaled_input=scaled_input, choices=1 if one else None, matrix=None if found.gates is None else matrix,
        transposed=transposed, column=found.column, scales=scales,
    )  # fmt: skip
    return bounded(view, routed)


def weighted_by_choices(
    view: GraphView, node: Node, chosen: Chosen, x: Node, experts: list[Expert], base: Node | None = None,
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = (),
) -> RoutedExperts | MatchFailure:
    """The layer in which gates of the choices [.., k] weight what `experts` make of `x`."""
    outer, tokens = ([n for n in value(t).shape[:-1] if not is_one(n)] for t in (x, chosen.indices))
    refuse_other_rows(x, outer, tokens)
    layer = RoutedExperts(node, x, chosen.indices, chosen.gates, tuple(experts), 0, base, scales=scales)
    return bounded(view, layer)
