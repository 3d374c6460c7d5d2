"""Matches every expert on every token, weighted by its column of a gate matrix: `y += gates[:, e, None] * expert_e(x)`,
or by the sum of those of a token's gates that are its own:
`y += (gates * (indices == e)).sum(-1, keepdim=True) * expert_e(x)`.

Most of the matrix is zero where `topk` chooses the experts, and an output that is multiplied by zero need not be
computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, first_unlike, match_expert, one_projection_of_all
from megacpp_compile.matchers.moe.gate_matrix import Chosen, match_chosen, match_chosen_gate, match_column
from megacpp_compile.matchers.moe.gathered_experts import by_choice
from megacpp_compile.matchers.moe.gemms import match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.reader.factors import is_one

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class WeightedOutput:
    """`node` is `out` times column `expert` of `matrix`, or of the matrix that a pair (indices, gates) stands for."""

    node: Node
    matrix: Node | tuple[Node, Node]
    expert: int
    out: Node


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
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
            if (checked := _check(view, node, base, found)) is not None:
                yield checked


def _weighted_output(node: Node) -> WeightedOutput | None:
    """The column and the rest where `node` multiplies a tensor by a column of gates."""
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return None
    for gate, out in (node.args, node.args[::-1]):
        if not value(gate).dim() == value(out).dim() > 0 or not same_size(value(gate).shape[-1], 1):
            continue
        column: tuple[Node | tuple[Node, Node], int] | None = match_column(gate)  # type: ignore[arg-type]
        if column is None and (own := match_chosen_gate(gate)) is not None:  # type: ignore[arg-type]
            return WeightedOutput(node, own[:2], own[2], out)  # type: ignore[arg-type]
        if column is None or not all(map(same_size, value(column[0]).shape[:-1], value(out).shape[:-1])):
            continue
        return WeightedOutput(node, *column, out)  # type: ignore[arg-type]
    return None


def _check(
    view: GraphView, node: Node, base: Node | None, outputs: list[WeightedOutput]
) -> RoutedExperts | MatchFailure | None:
    """The layer whose sum is `node`, of `base` and `outputs`; None where the first of these is no expert's."""
    matrix = outputs[0].matrix
    by_number = {one.expert: one for one in outputs}
    if match_expert(outputs[0].out, match_linear_gemm) is None:
        alike = isinstance(matrix, Node) and all(one.matrix is matrix for one in outputs)
        if not alike or len(by_number) < len(outputs):
            return None  # some other weighted sum
        return by_choice(view, node, matrix, {n: one.out for n, one in by_number.items()}, base)  # type: ignore[arg-type]
    for one in outputs:
        if one.matrix != matrix:
            return MatchFailure(one.node, "gates", "experts are weighted by different gates")
    first = 0 if isinstance(matrix, Node) else min(by_number)
    gaps = sorted(by_number) != list(range(first, first + len(outputs)))
    if gaps or isinstance(matrix, Node) and not same_size(value(matrix).shape[-1], len(outputs)):
        return MatchFailure(node, "gaps", "not every column of the gates weights one expert")
    found = all_experts([by_number[first + e].out for e in range(len(outputs))])
    if found is None or isinstance(found, MatchFailure):
        return found
    if isinstance(matrix, Node):
        return by_matrix(view, node, matrix, *found, base)
    x, experts = found
    outer, tokens = value(x).shape[:-1], value(matrix[0]).shape[:-1]
    if len(outer) != len(tokens) or not all(map(same_size, outer, tokens)):
        return MatchFailure(x, "rows", "there are not as many rows as choices")
    return bounded(view, RoutedExperts(node, x, matrix[0], matrix[1], tuple(experts), first, base))


def all_experts(outs: list[Node]) -> tuple[Node, list[Expert]] | MatchFailure | None:
    """(what all experts read, the experts) where `outs` are their outputs; None where the first is no expert's."""
    experts: list[Expert] = []
    for out in outs:
        expert = match_expert(out, match_linear_gemm)
        if expert is None:
            return MatchFailure(out, "no-expert", "what is weighted is no expert's output") if experts else None
        if isinstance(expert, MatchFailure):
            return one_projection_of_all(outs) or expert
        if experts and strip_row_views(expert.x) is not strip_row_views(experts[0].x):
            return MatchFailure(expert.node, "inputs", "experts read different inputs")
        experts.append(expert)
    if (other := first_unlike(experts)) is not None:
        return MatchFailure(other, "experts-differ", "the experts are not built alike")
    return strip_row_views(experts[0].x), experts


def by_matrix(
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
    found = match_chosen(matrix, transposed)
    if found is None:
        return MatchFailure(
            matrix, "dense-gates", "the gates may all differ from zero: every expert works on every token"
        )
    if scaled_input and any(expert.biased for expert in experts):
        return MatchFailure(experts[0].node, "bias", "an expert with a bias makes something of rows of zeros")
    gates = matrix if found.gates is None else found.gates
    if value(matrix).dim() == 1:
        return MatchFailure(matrix, "gates", "the gates of one token have no dimension of tokens")
    one = value(found.indices).dim() < value(matrix).dim()  # the only choice of a token
    outer, tokens = [n for n in value(x).shape[:-1] if not is_one(n)], list(value(found.indices).shape)
    tokens = [n for n in (tokens if one else tokens[:-1]) if not is_one(n)]
    if len(outer) != len(tokens) or not all(map(same_size, outer, tokens)):
        return MatchFailure(x, "rows", "there are not as many rows as choices")
    routed = RoutedExperts(
        node, x, found.indices, gates, tuple(experts), 0, base, by_expert=found.gates is None,
        scaled_input=scaled_input, choices=1 if one else None, matrix=None if found.gates is None else matrix,
        transposed=transposed, column=found.column, scales=scales,
    )  # fmt: skip
    return bounded(view, routed)


def by_choices(
    view: GraphView, node: Node, chosen: Chosen, x: Node, experts: list[Expert], base: Node | None = None,
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = (),
) -> RoutedExperts | MatchFailure:
    """The layer in which gates of the choices [.., k] weight what `experts` make of `x`."""
    outer, tokens = ([n for n in value(t).shape[:-1] if not is_one(n)] for t in (x, chosen.indices))
    if len(outer) != len(tokens) or not all(map(same_size, outer, tokens)):
        return MatchFailure(x, "rows", "there are not as many rows as choices")
    layer = RoutedExperts(node, x, chosen.indices, chosen.gates, tuple(experts), 0, base, scales=scales)
    return bounded(view, layer)
