"""Matches rows in the order of experts: the sum over each token's choices of such rows, grouped GEMMs of all slots
between their sort and that sum, which are a whole layer, and experts between grouped GEMMs whose rows come sorted and
leave so, as behind the dispatch of expert parallelism. There it is given where each expert's rows end, and neither
choices nor gates need be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled, padded_with
from megacpp_compile.fx.views import COPIES, uncast
from megacpp_compile.fx.walks import near
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.activation import bound_of
from megacpp_compile.matchers.moe.experts import Expert, expert_ending_in, match_expert
from megacpp_compile.matchers.moe.gemms import Gemm, Weight, strip_row_views, with_bias
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, SortedExperts, around, bounded
from megacpp_compile.matchers.moe.row_gates import gates_in_order
from megacpp_compile.matchers.moe.rows import choices_numbered, order_of_tokens, tokens_in_order
from megacpp_compile.matchers.moe.sorted_slots import ascends, number, slots, sorted_by
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.index_reads import added_rows, row_read
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import concatenated
from megacpp_compile.reader.products import multiplied

_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_NEAR = 24  # nodes to look at before a GEMM
_LIKE = (aten.empty_like.default, aten.zeros_like.default)


@dataclasses.dataclass(frozen=True)
class Combine:
    """The sum of each token's `choices` among the `weighted` rows, which lie in `order` of slots, added to `base`."""

    weighted: Node
    order: Node
    choices: int
    base: Node | None = None


Check = Callable[[GraphView, Node, Combine], RoutedExperts | MatchFailure | None]


def layers_after(view: GraphView, check: Check) -> Iterator[RoutedExperts | MatchFailure]:
    """What `check` makes of every combine of the graph, where that is a layer or nearly one."""
    for node in view.graph.nodes:
        combine = match_combine(node)
        if combine is not None and (found := or_failure(check)(view, node, combine)) is not None:
            yield found


def match_combine(node: Node) -> Combine | None:
    """The combine that `node` is."""
    return _slots_summed(node) if node.target is aten.sum.dim_IntList else _rows_added(node)


@or_none
def _slots_summed(node: Node) -> Combine | None:
    """The combine that puts rows back into the order of slots, and sums over the choices."""
    slots = uncast(node.args[0])  # type: ignore[arg-type]
    NoMatch.when(value(slots).dim() != 3 or reduced_dims(node) != ([1], False) or slots.target not in RESHAPES)
    choices = value(slots).shape[1]
    read = NoMatch.unless(unsorted(uncast(slots.args[0])))  # type: ignore[arg-type]
    NoMatch.when(value(read[0]).dim() != 2 or not isinstance(choices, int))
    return Combine(uncast(read[0]), read[1], choices)


@or_none
def _rows_added(node: Node) -> Combine | None:
    """The combine that adds rows to those of their tokens."""
    found = NoMatch.unless(added_rows(node, to_zeros=True))
    base, token, rows = found
    NoMatch.when(value(rows).dim() != 2)
    tokens = value(base).shape[0]
    choices = choices_numbered(token, tokens)
    order = None if choices is None else order_of_tokens(token, tokens, choices)
    if choices is None or order is None or sorted_by(order) is None:
        return None
    return Combine(uncast(rows), order, choices, None if is_filled(base, 0.0) else base)


def unsorted(node: Node) -> tuple[Node, Node] | None:
    """(rows in some order, that order) where `node` puts them back into the order of slots."""
    if node.target is aten.index_put.default and len(node.args) == 3 and len(node.args[1]) == 1:  # type: ignore[arg-type]
        buffer, (order,), rows = node.args  # type: ignore[misc]
        whole = buffer.target in _LIKE and buffer.args[0] is rows  # type: ignore[union-attr]
        whole = whole or same_size(value(buffer).shape[0], value(order).shape[0])
        put = whole and value(rows).dim() == value(buffer).dim()  # type: ignore[arg-type]
        return (rows, order) if put and sorted_by(order) is not None else None  # type: ignore[return-value, arg-type]
    read = row_read(node)
    order = None if read is None else _inverted(read[1])
    return (read[0], order) if read is not None and order is not None and sorted_by(order) is not None else None


def _inverted(back: Node) -> Node | None:
    """The order that `back` puts back: an argsort of it, or every place put where the order has it."""
    if ascends(back):
        return back.args[0]  # type: ignore[return-value]
    if back.target is not aten.index_put.default or len(back.args) != 3 or len(back.args[1]) != 1:  # type: ignore[arg-type]
        return None
    empty, (order,), numbers = back.args  # type: ignore[misc]
    numbers = through(numbers, RESHAPES)
    counts_up = numbers.target is aten.arange.default and len(numbers.args) == 1  # type: ignore[union-attr]
    return order if counts_up and value(numbers).shape == value(empty).shape else None


@or_none
def grouped_gemm(node: Node) -> tuple[Gemm, Node] | None:
    """(the GEMM, where each expert's rows end) where `node` multiplies rows by a weight of every expert [E, ., .]."""
    NoMatch.when(str(node.target) not in _GROUPED or len(node.args) != 3 or node.kwargs)
    x, w, ends = node.args
    NoMatch.when(value(x).dim() != 2 or value(w).dim() != 3)
    assert isinstance(x, Node) and isinstance(w, Node) and isinstance(ends, Node)
    if w.target is aten.transpose.int and {d % 3 for d in w.args[1:3]} == {1, 2}:  # type: ignore[operator]
        return Gemm(node, x, Weight(w.args[0], False, every=True)), ends  # type: ignore[arg-type]
    return Gemm(node, x, Weight(w, True, every=True)), ends


def find_layers(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every sum over rows that are sorted by expert."""
    return layers_after(view, _layer_after)


def _layer_after(view: GraphView, node: Node, combine: Combine) -> RoutedExperts | MatchFailure | None:
    """The layer of experts that ends in `combine`; None where what it adds up is no expert's output."""
    weighted = combine.weighted
    for out, gate in multiplied(weighted) or [(weighted, None)]:
        match_gemm = _OfSlots(combine.order)
        expert = match_expert(match_gemm.unmasked(strip_row_views(out)), match_gemm)
        if expert is not None:
            return _routed(view, node, combine, expert, gate, match_gemm)
    return None


@or_failure
def _routed(
    view: GraphView,
    node: Node,
    combine: Combine,
    expert: Expert | MatchFailure,
    gate: Node | None,
    match_gemm: _OfSlots,
) -> RoutedExperts | MatchFailure | None:
    """The layer of `expert`, whose output `gate` multiplies; where that is None, a gate has to multiply its input."""
    if isinstance(expert, MatchFailure) or match_gemm.failure is not None:
        return expert if isinstance(expert, MatchFailure) else match_gemm.failure
    ids, order, scaled_input = match_gemm.ids, combine.order, gate is None
    rows = match_gemm.unmasked(strip_row_views(expert.x))
    if gate is None:
        reason = "neither what an expert reads nor what it adds is multiplied by a gate"
        refuse_if(not multiplied(rows), expert.x, "no-gate", reason)
        a, b = rows.args
        rows, gate = (a, b) if value(b).shape[-1:] == (1,) else (b, a)  # type: ignore[assignment]
        rows = strip_row_views(rows)
    gates = gates_in_order(gate, order)  # type: ignore[arg-type]
    x = tokens_in_order(rows, order, value(node).shape[0], combine.choices)
    refuse_if(
        x is None or not same_size(value(x).shape[0] * combine.choices, value(ids).shape[0]),
        expert.x, "rows", "what experts read are not the tokens, one row for each choice",
    )
    some = match_gemm.limits - {value(expert.down.weight.tensor).shape[0]}
    refuse_if(some, node, "masked", "rows of some experts are set to zero")
    layer = RoutedExperts(
        node, x, slots(ids), gates, (expert,), base=combine.base, choices=combine.choices, scaled_input=scaled_input
    )
    return bounded(view, layer)


class _OfSlots:
    """Matches grouped GEMMs whose groups end where each expert's rows do.

    Attributes:
        ids: the slots' experts, by which `order` sorts; sorted: the same, and where each expert's end.
        failure: the last GEMM whose groups end elsewhere.
        limits: the expert numbers from which on rows are set to zero.
    """

    def __init__(self, order: Node) -> None:
        found = sorted_by(order)
        assert found is not None
        self.sorted, self.ids, self.order = found, found.ids, order
        self.failure: MatchFailure | None = None
        self.limits = set[object]()

    def __call__(self, node: Node) -> Gemm | MatchFailure | None:
        return with_bias(self.unmasked(node), self._grouped, self._bias)

    @or_none
    def _bias(self, node: Node, rows: Node) -> Weight | None:
        """The experts' biases of which `node`, added to `rows`, has one for each row."""
        read = NoMatch.unless(row_read(strip_row_views(node)))
        NoMatch.when(value(read[0]).dim() != 2)
        NoMatch.when(not same_size(value(read[0]).shape[1], value(rows).shape[-1]))
        experts = value(read[0]).shape[0]
        # A clamp moves numbers of no expert alone.
        ids = through(read[1], COPIES, lambda n: (limit := bound_of(n)) is not None and limit[1].high >= experts - 1)
        return Weight(read[0], every=True) if self.sorted.has(ids, in_order=True) else None

    def unmasked(self, node: Node) -> Node:
        """`node` before rows of no expert are set to zero."""
        while node.target is aten.masked_fill.Scalar and node.args[2] == 0:
            mask = through(node.args[1], aten.unsqueeze.default, aten.view.default, aten.reshape.default)
            if mask.target is not aten.ge.Scalar or mask.args[0] is not self.sorted.ordered:  # type: ignore[union-attr]
                break
            self.limits.add(mask.args[1])  # type: ignore[union-attr]
            node = strip_row_views(node.args[0])  # type: ignore[arg-type]
        return node

    @or_none
    def _grouped(self, node: Node) -> Gemm | None:
        found = NoMatch.unless(grouped_gemm(node))
        gemm, ends = found
        if not self.sorted.end_at(ends, value(gemm.weight.tensor).shape[0]):
            self.failure = MatchFailure(node, "offsets", "the groups do not end where each expert's rows do")
        return gemm


def find(view: GraphView, found: Sequence[RoutedExperts | MatchFailure]) -> Iterator[SortedExperts | MatchFailure]:
    """Every expert over sorted rows that no layer `found` covers, in the graph's order."""
    covered = {node for one in found if isinstance(one, RoutedExperts) for node in one.inside}
    told = [one.node for one in found if isinstance(one, MatchFailure)]
    layers: list[SortedExperts | MatchFailure] = []
    for node in reversed(view.graph.nodes):
        if node in covered or (ends := _ends_of(node)) is None:
            continue
        layer = _layer(view, node, _SameGroups(ends))
        if isinstance(layer, SortedExperts):
            covered |= layer.inside
        elif layer is None or not around(node).isdisjoint(told):
            continue
        told.append(node)
        layers.append(layer)
    yield from reversed(layers)


def _layer(view: GraphView, node: Node, match_gemm: _SameGroups) -> SortedExperts | MatchFailure | None:
    """The expert that ends in `node`; None where nothing that is like one does."""
    down = match_gemm(node)
    if not isinstance(down, Gemm):
        return None  # the sum with some other bias; the GEMM in it is looked at by itself
    expert = expert_ending_in(down, match_gemm)
    if not isinstance(expert, MatchFailure):
        layer = SortedExperts(node, strip_row_views(expert.x), match_gemm.ends, (expert,), match_gemm.counts)
        return bounded(view, layer)
    linear = isinstance(match_gemm(strip_row_views(down.x)), Gemm)  # as adapters of several texts are
    return None if linear or not match_gemm.before(down.x) else expert


def _ends_of(node: Node) -> Node | None:
    """Where the groups end of the grouped GEMM that `node` is, or adds something to."""
    if (found := grouped_gemm(node)) is not None:
        return found[1]
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    sides = (grouped_gemm(strip_row_views(side)) for side in node.args if isinstance(side, Node))
    return next((found[1] for found in sides if found is not None), None)


class _SameGroups:
    """Matches grouped GEMMs whose groups end at `ends`, and what adds groups' biases, repeated by `counts`."""

    def __init__(self, ends: Node) -> None:
        self.ends = ends
        self.counts: Node | None = None

    def __call__(self, node: Node) -> Gemm | MatchFailure | None:
        return with_bias(node, self._grouped, self._bias)

    def before(self, node: Node) -> bool:
        """Whether such a GEMM lies shortly before `node`."""
        return any(self._grouped(n) is not None for n in near(node, _NEAR))

    def _grouped(self, node: Node) -> Gemm | None:
        found = grouped_gemm(node)
        return found[0] if found is not None and found[1] is self.ends else None

    @or_none
    def _bias(self, node: Node, rows: Node) -> Weight | None:
        """The biases of which `node`, added to `rows`, has one for each row: all repeated as often as rows are counted,
        and perhaps zeros for the rows behind them."""
        node = strip_row_views(node)
        NoMatch.when(node.target is not aten.repeat_interleave.self_Tensor or node.args[2:] != (0,))
        biases, counts = node.args[0], number(node.args[1])  # type: ignore[arg-type]
        assert isinstance(biases, Node)
        if counts.target is aten.cat.default:
            own, first = _before_a_row_of_zeros(biases), _before_a_last(counts)
            NoMatch.when(own is None or first is None)
            biases, counts = own, number(first)  # rows are as many as the repetitions, or it is an error
        summed = number(self.ends)
        counted = summed.target is aten.cumsum.default and number(summed.args[0]) is counts  # type: ignore[arg-type]
        wide = value(biases).dim() == 2 and same_size(value(biases).shape[1], value(rows).shape[-1])
        NoMatch.when(not counted or not wide)
        self.counts = counts
        return Weight(biases, every=True)


def _before_a_row_of_zeros(node: Node) -> Node | None:
    """What `node`, of two dimensions, has one row of zeros behind of; `canonicalize` writes concatenations so."""
    zeros = padded_with(node) == 0 and node.args[1] == [0, 0, 0, 1]
    return node.args[0] if zeros else None  # type: ignore[return-value]


def _before_a_last(node: Node) -> Node | None:
    """The first of two tensors of which `node` is the concatenation, where the last has one entry."""
    parts = concatenated(node)
    one = len(parts) == 2 and isinstance(value(parts[1]).shape[0], int) and value(parts[1]).shape[0] == 1
    return parts[0] if one else None
