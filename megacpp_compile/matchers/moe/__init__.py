"""Finds layers of routed experts in all spellings, and experts that no matcher of this folder reads.

    what is found     routed_experts: a layer, or experts over sorted rows, and which nodes it is made of
    an expert         gemms, activation, experts
    choices           routing: masks of choices; gate_matrix: gates zero but for the chosen; rows and row_gates: which
                      rows an expert reads, and their gates; sorted_slots: all slots in the order of experts
    spellings         iterations, loop: an expert after the other; gathered_experts, outputs, grouped: all at once;
                      sorted_rows: grouped GEMMs
    skipped experts   token_counts, assumed: that a loop over experts with tokens is one over all

Unread experts are GEMMs with weights of which scores choose, in some other form. They fail with the tag `unread`, and
only where no other failure lies nearby, so that no layer of experts is passed over in silence. A loop over the experts
that any token chose breaks the graph in every iteration: a list of these fails with advice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.size_checks import FINDS
from megacpp_compile.fx.views import COMPOSITE_PERMUTATIONS, COPIES, PERMUTATIONS
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import gathered_experts, grouped, loop, sorted_rows
from megacpp_compile.matchers.moe.activation import match_product
from megacpp_compile.matchers.moe.experts import ONE_PROJECTION
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, SortedExperts, around
from megacpp_compile.matchers.moe.routing import numbers_of_scores
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.links import chain, through

_SPELLINGS = (loop.find, grouped.find_by_columns, grouped.find, sorted_rows.find_layers, loop.find_sorted)
_COUNTS = (aten.sum.dim_IntList, aten.sum.default, aten.any.dim, aten.any.dims, aten.bincount.default,
           aten.histc.default)  # fmt: skip
_ADVICE = "a loop over the experts that were hit breaks the graph; write `for e in range(num_experts):` instead"
_STEPS = 8  # between counting an expert's tokens and the list of those that have any
_GEMMS = ("bmm", "matmul", "mm", "addmm", "baddbmm", "linear", "einsum", "_grouped_mm", "grouped_mm_fallback")
_TAKEN = (
    *RESHAPES, aten.transpose.int, aten.t.default, aten.permute.default, aten.select.int, aten.index.Tensor,
    aten.index_select.default, aten.embedding.default, aten.alias.default, aten.clone.default, aten.contiguous.default,
    aten.unbind.int, aten.slice.Tensor,
)  # fmt: skip


def find(view: GraphView) -> list[RoutedExperts | SortedExperts | MatchFailure]:
    """Every layer, experts over sorted rows where there is no whole one, and why what is like either is none."""
    whole, in_doubt = find_layers(view)
    whole += _lists_of_those_hit(view)
    found = [*whole, *sorted_rows.find(view, whole)]
    return [*found, *unread(view, found, in_doubt)]


def find_layers(view: GraphView) -> tuple[list[RoutedExperts | MatchFailure], list[MatchFailure]]:
    """(every layer, and what is nearly one; why loops are none whose outputs may be weighted elsewhere)."""
    found = [one for spelling in _SPELLINGS for one in spelling(view)]
    ungated = list(loop.ungated(view, found))
    found += [one for one in ungated if isinstance(one, RoutedExperts)]
    by_rows = list(gathered_experts.find_by_rows(view, [*found, *ungated]))
    found = [*gathered_experts.without_theirs(found, by_rows), *by_rows]
    return found, [one for one in ungated if isinstance(one, MatchFailure)]


def _lists_of_those_hit(view: GraphView) -> Iterator[MatchFailure]:
    """A failure with advice at every list of the experts that have tokens."""
    for node in view.graph.nodes:
        if node.target not in FINDS or len(node.args) != 1:
            continue
        step, counted = node.args[0], False
        for _ in range(_STEPS):
            if not isinstance(step, Node) or step.op != "call_function" or not step.args:
                break
            counted = counted or step.target in _COUNTS
            if counted and step.target in (aten.one_hot.default, aten.bincount.default, aten.histc.default):
                yield MatchFailure(node, "loop-over-data", _ADVICE)
                break
            step = step.args[0]


def unread(
    view: GraphView, found: Sequence[RoutedExperts | SortedExperts | MatchFailure], in_doubt: Iterable[MatchFailure]
) -> Iterator[MatchFailure]:
    """Those of the failures `in_doubt` that nothing `found` covers, then one for every layer of unread experts."""
    for doubt in in_doubt:
        near = around(doubt.node)
        if not any(
            one.node in near if isinstance(one, MatchFailure) else doubt.node in one.inside
            for one in found
        ):
            found = [*found, doubt]
            yield doubt
    scores = numbers_of_scores(view.graph)
    counts, tokens = set(scores.values()), _inputs_of(scores)
    gemms = {node: stacks for node in view.graph.nodes if (stacks := _stacks(node, view.weights, counts, tokens))}
    if not gemms:
        return
    covered = set[Node]()
    for one in found:
        covered.update(_nearby(one.node, gemms) if isinstance(one, MatchFailure) else one.inputs)
    for node, stacks in gemms.items():
        if not stacks & covered:
            covered |= _nearby(node, gemms)
            if _reads_rows(node, stacks) and around(node).isdisjoint(gemms.keys() - {node}):
                yield MatchFailure(node, "projections", ONE_PROJECTION)
            else:
                yield MatchFailure(node, "unread", "weights of experts are multiplied here, in no form that is known")


def _reads_rows(node: Node, stacks: set[Node]) -> bool:
    """Whether the GEMM `node` multiplies anything that has a dimension of one expert's weight, out of `stacks`."""
    own = [n for w in node.all_input_nodes if w in stacks for n in value(w).shape[-2:]]
    rows = (n for a in node.all_input_nodes if a not in stacks for n in value(a).shape[-2:])
    return any(same_size(n, size) for n in rows for size in own)


def _inputs_of(nodes: Iterable[Node]) -> set[Node]:
    """The inputs of the graph that `nodes` are computed from."""
    return {node for node in ancestors(nodes) if node.op == "placeholder"}


def _stacks(node: Node, weights: frozenset[Node], counts: set[Any], tokens: set[Node]) -> set[Node]:
    """The weights, in all their views, that the GEMM `node` multiplies by, if they are of as many experts as there are
    scores to choose by. tokens: inputs that scores are computed from, of which one that asks for a gradient is among
    `weights` too, as are activations behind a graph break."""
    if node.op != "call_function" or str(node.target).split(".")[-2:][0] not in _GEMMS:
        return set()
    found, given = set[Node](), list[tuple[Node, bool]]()
    if any(_of_channels(operand) for operand in node.all_input_nodes):
        return found
    for operand in node.all_input_nodes:
        way = chain(operand, is_cast, _TAKEN, {operator.getitem})
        if way[-1] in weights:
            each = any(_of(n, counts) for n in way)
            given.append((way[-1], each))
            found.update(way if each else ())
    others = [operand for operand, each in given if not each]
    return found if len(given) - len(others) == 1 and tokens.issuperset(others) else set()


def _of_channels(operand: Node) -> bool:
    """Whether `operand` is a token's channels in groups, [.., groups, channels], perhaps transposed: heads, each of
    which a weight of its own reads. What experts made for their last GEMM is not meant."""
    operand = through(operand, PERMUTATIONS, COMPOSITE_PERMUTATIONS, COPIES, is_cast)
    if operand.target not in RESHAPES or value(operand).dim() < 3:
        return False
    groups, channels = value(operand).shape[-2:]
    source = through(  # of which the tokens alone are folded
        operand.args[0],
        lambda n: n.target in RESHAPES and value(n).dim() > 2
        and all(map(same_size, value(n).shape[-2:], (groups, channels))),
    )  # fmt: skip
    split = same_size(value(source).shape[-1], groups * channels)  # type: ignore[arg-type]
    return split and not same_size(groups, 1) and match_product(source) is None  # type: ignore[arg-type]


def _of(node: Node, counts: set[Any]) -> bool:
    """Whether `node` is [experts, ., .] with one of `counts` of experts."""
    fake = value(node)
    if not isinstance(fake, torch.Tensor) or fake.dim() < 3:
        return False
    return isinstance(fake.shape[0], int) and fake.shape[0] in counts


def _nearby(node: Node, gemms: dict[Node, set[Node]]) -> set[Node]:
    """The weights in GEMMs shortly before or behind `node`."""
    return {weight for n in around(node) for weight in gemms.get(n, ())}
