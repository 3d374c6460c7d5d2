"""Matches the loop over all experts: each reads its rows, and adds its outputs to the sum. Where rows follow one
another in the experts' order, a sum over each token's choices may read all outputs: joined by `cat`, each written to
its part of one buffer, or to a row for every choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_blank, is_filled
from megacpp_compile.fx.groups import by_key
from megacpp_compile.matchers._match import MatchFailure, Refused, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, computed_from
from megacpp_compile.matchers.moe.gate_matrix import match_chosen, match_column
from megacpp_compile.matchers.moe.gemms import match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.iterations import (
    NO_GATE,
    Iteration,
    RowUpdate,
    chains,
    in_expert_order,
    iterations_of,
    joined,
    row_update,
    row_updates,
)
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded, gate_after
from megacpp_compile.matchers.moe.routing import Mask, match_mask, scores_of
from megacpp_compile.matchers.moe.row_gates import Gates, gates_in_order, of_slots
from megacpp_compile.matchers.moe.rows import has_choices, in_order
from megacpp_compile.matchers.moe.sorted_rows import Combine, layers_after, unsorted
from megacpp_compile.matchers.moe.sorted_slots import SortedIds, expert_between, slots, sorted_by
from megacpp_compile.reader.index_reads import SCATTERS, adds
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import concatenated
from megacpp_compile.reader.products import multiplied

_PICKED = (aten.index_add.default, *SCATTERS)


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every loop over experts whose rows are weighted in it, then sums over nearly the rows of an expert."""
    updates = row_updates(view)
    at_once = _at_once(view)
    for chain in (*chains(updates), *at_once.values()):
        found = match_chain(view, chain)
        if isinstance(found, RoutedExperts) or not (_unweighted(chain) or found.tag == NO_GATE):
            yield found
    yield from _changed(view, {*updates, *at_once})


def ungated(view: GraphView, found: Sequence[RoutedExperts | MatchFailure]) -> Iterator[RoutedExperts | MatchFailure]:
    """Every loop that adds or writes outputs as they are, and is in no layer that is `found`: the gates are 1, or the
    gate of a token's one choice multiplies the sum."""
    layers = [one for one in found if isinstance(one, RoutedExperts)]
    for chain in (*chains(row_updates(view)), *_at_once(view).values()):
        end = chain[-1].node
        if any(end in one.inside for one in layers):
            continue
        gated = match_chain(view, chain)
        if isinstance(gated, MatchFailure) and (_unweighted(chain) or gated.tag == NO_GATE):
            layer = match_chain(view, chain, gated=False)
            yield layer if isinstance(layer, RoutedExperts) else dataclasses.replace(layer, node=end)


def _at_once(view: GraphView) -> dict[Node, list[RowUpdate]]:
    """The updates that all experts' rows, joined, make at once, by the node that does."""
    return {node: chain for node in view.graph.nodes if (chain := joined(node))}


def _unweighted(chain: list[RowUpdate]) -> bool:
    """Whether every expert overwrites its rows, and no output is multiplied."""
    return all(update.overwrites and strip_row_views(update.added).target is not aten.mul.Tensor for update in chain)


def _changed(view: GraphView, updates: Container[Node]) -> Iterator[MatchFailure]:
    """Sums over what is nearly the rows of an expert, one failure a loop."""
    reported = set[Node]()
    for node in view.graph.nodes:
        if node in updates or node.target not in (*_PICKED, aten.index_put.default):
            continue
        index, added = (node.args[2], node.args[3]) if node.target in _PICKED else (node.args[1][0], node.args[2])
        indices = next(filter(None, map(_chosen_by, computed_from(index))), None)
        if indices is None or indices in reported or not any(match_linear_gemm(n) for n in computed_from(added)):
            continue
        reported.add(indices)
        if node.target in SCATTERS and not adds(node):
            yield MatchFailure(node, "no-sum", "experts' outputs are written or reduced by other means than a sum")
        else:
            yield MatchFailure(node, "no-rows", "an expert adds to other rows than all those that chose it")


def _chosen_by(node: Node) -> Node | None:
    """The choices of which `node` marks one expert's, or has the gates."""
    if (mask := match_mask(node)) is not None:
        return mask.indices if mask.expert is not None else None
    if value(node).is_floating_point() and value(node).dim() and (column := match_column(node)) is not None:
        chosen = match_chosen(column[0])
        return None if chosen is None else chosen.indices
    return None


@or_failure
def match_chain(
    view: GraphView, chain: list[RowUpdate], gated: bool = True, gates: list[Gates] | None = None
) -> RoutedExperts | MatchFailure:
    """The layer of experts that `chain` adds up, weighted by `gates` that are read elsewhere; without gates if not
    `gated`."""
    reason = "outputs are written for every choice, and no sum of a token's own times their gates reads them"
    refuse_if(chain[0].by_slot, chain[-1].node, NO_GATE, reason)
    found = iterations_of(chain, gated and gates is None)
    if gates is not None:
        found = [dataclasses.replace(iteration, gates=gates) for iteration in found]
    first, mask = found[0], found[0].update.token
    identities = [t for t in found if t.expert is None]
    iterations = [t for t in found if t.expert is not None]
    refuse_if(not iterations, first.update.node, "no-expert", "what is weighted is no expert's output")
    gates, scaled_input = [g for g in first.gates if all(g in t.gates for t in found)], iterations[0].scaled_input
    if mask.above is not None:  # rows that others choose may have gates that count for nothing
        gates = [g for g in gates if g == (mask.above.gates, mask.above.by_expert)]
    differ = gated and not gates or any(t.scaled_input != scaled_input for t in iterations)
    refuse_if(differ, iterations[-1].update.node, "gates", "experts are weighted by different gates")
    passed = _numbers(identities, iterations)
    iterations, column = _one_choice(iterations)
    ordered = in_expert_order(iterations)
    start = chain[0].previous
    empty = is_filled(start, 0.0)
    if any(update.overwrites for update in chain):
        one = len({t.update.token.choice for t in found}) == 1
        once = one and all(update.overwrites for update in chain) and (is_blank(start) or _every_row(mask, ordered))
        refuse_if(not once, chain[-1].node, "twice", "rows are written over what was there before")
        empty = True
    (weights, by_expert), number = gates[0] if gated else (None, False), ordered[0].update.token.expert
    assert number is not None
    experts = tuple(t.expert for t in ordered if t.expert is not None)
    base = None if empty else start
    layer = RoutedExperts(
        chain[-1].node, first.x, mask.indices, weights, experts, number, base, by_expert=by_expert, column=column,
        scaled_input=scaled_input, identities=passed, above=None if mask.above is None else mask.above.above,
        choices=None if has_choices(mask) or value(mask.indices).dim() == 1 else 1,
    )  # fmt: skip
    return bounded(view, layer if gated else gate_after(layer))


def _every_row(mask: Mask, ordered: list[Iteration]) -> bool:
    """Whether every token's choice is one of the experts."""
    scores = None if mask.any or "s" in mask.dims else scores_of(mask.indices)
    first = ordered[0].update.token.expert
    return scores is not None and first == 0 and same_size(value(scores).shape[-1], len(ordered))


def _numbers(identities: list[Iteration], others: list[Iteration]) -> range:
    """The numbers of experts that return what they read, which are a range, and none of them another expert's."""
    if not identities:
        return range(0)
    last, served = identities[-1].update, [t.update.token.expert for t in (*identities, *others)]
    of_one = any(t.update.token.choice is not None for t in identities)
    refuse_if(of_one, last.node, "choices", "an expert that returns what it reads serves one choice alone")
    refuse_if(len({*served}) != len(served), last.node, "twice", f"choice {last.token.expert} is served twice")
    numbers = sorted(served[: len(identities)])  # type: ignore[type-var]
    a_range = range(numbers[0], numbers[0] + len(numbers))  # type: ignore[arg-type, operator]
    reason = "the numbers of the experts that return what they read are no range"
    refuse_if(numbers != list(a_range), last.node, "gaps", reason)
    return a_range


def _one_choice(iterations: list[Iteration]) -> tuple[list[Iteration], int | None]:
    """(the iterations of one choice, its column), or all of them and None; where every choice has a loop of its own,
    alike, one of the loops and None."""
    first = iterations[0].update
    mask = first.token
    if mask.choice is None:
        return iterations, None
    by_choice = by_key((iteration.update.token.choice, iteration) for iteration in iterations)
    every = by_choice.keys() == set(range(value(mask.indices).shape[-1]))
    some = not every and len(by_choice) > 1
    refuse_if(some, first.node, "choices", "only some of a token's choices are served")
    weights = [_weights(in_expert_order(own)) for own in by_choice.values()]
    differ = any(own != weights[0] for own in weights)
    refuse_if(differ, first.node, "experts-differ", "other experts serve a token's other choices")
    return by_choice[mask.choice], None if every else mask.choice


def _weights(iterations: list[Iteration]) -> list[Any]:
    """The weights and biases of all experts, in order."""
    return [part for iteration in iterations if iteration.expert for part in iteration.expert.parameters]


def find_sorted(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every sum over outputs of experts that lie in the experts' order."""
    return layers_after(view, _check)


def writes(layer: RoutedExperts) -> Iterator[RowUpdate]:
    """The outputs of single experts in `layer` that are joined or written to a buffer, in the experts' order."""
    sorts = ((order, sorted_by(order)) for order in sorted(layer.inside))
    # The order that puts rows back may be an argsort, too: of the experts' order.
    orders = [order for order, ids in sorts if ids is not None and slots(ids.ids) is layer.indices]
    for node in sorted(layer.inside):
        if node.target in (aten.cat.default, aten.slice_scatter.default) and value(node).is_floating_point():
            for order in orders:
                yield from segments(node, order)


def _check(view: GraphView, node: Node, combine: Combine) -> RoutedExperts | MatchFailure | None:
    """The layer that ends in `combine`; None where what it adds up are no outputs of experts."""
    outputs, gate = combine.weighted, None
    chain = segments(outputs, combine.order)
    for a, b in [] if chain else multiplied(outputs):
        if chain := segments(a, combine.order):
            gate = b
            break
    if not chain:
        return None
    gates = None if gate is None else gates_in_order(gate, combine.order)
    own = None if gates is None else of_slots(gates, chain[0].token)
    return match_chain(view, [_added(update, node, combine) for update in chain], gates=own)


def _added(update: RowUpdate, node: Node, combine: Combine) -> RowUpdate:
    """`update` as one that adds to the sum."""
    base: Any = combine.base
    return RowUpdate(node, base, update.token, update.added)


def segments(node: Node, order: Node) -> list[RowUpdate]:
    """Every expert's outputs that `node` holds in `order`, which the experts' rows have to be checked against; none
    where it holds something else."""
    ids = sorted_by(order)
    node = strip_row_views(node)
    if ids is None:
        return []
    joined = [_write(part, part, ids, expert, part) for expert, part in enumerate(concatenated(node))]
    return joined or _written(node, ids)


def _written(node: Node, ids: SortedIds) -> list[RowUpdate]:
    """The writes to parts of `node`."""
    updates: list[RowUpdate] = []
    while node.target is aten.slice_scatter.default:
        previous, added, *where = node.args
        dim, start, end, step = where + [0, None, None, 1][len(where) :]  # type: ignore[list-item]
        expert = expert_between(ids, start, end) if (dim, step) == (0, 1) else None
        if expert is None:
            return []
        updates.insert(0, _write(node, previous, ids, expert, _own_rows(added)))  # type: ignore[arg-type]
        node = previous  # type: ignore[assignment]
    return updates if is_blank(node) else []


def _write(node: Node, previous: Node, ids: SortedIds, expert: int, added: Node) -> RowUpdate:
    token = in_order(ids, expert)
    return RowUpdate(node, previous, token, added, overwrites=True, by_slot="s" in token.dims)


def _own_rows(added: Node) -> Node:
    """`added` before it takes the number of rows of the part, which an expert's outputs have in any case."""
    return through(added, _expands_rows)


def _expands_rows(node: Node) -> bool:
    if node.target is not aten.expand.default:
        return False
    shape, own = value(node).shape, value(node.args[0]).shape
    return len(own) == len(shape) and all(map(same_size, own[1:], shape[1:]))


@dataclasses.dataclass(frozen=True)
class Written:
    """Outputs for every choice, in its place.

    Attributes:
        rows: what experts read: of every choice a row in the same place, or with `by_token` the tokens.
        first: the first expert's number.
        flat: outputs have one dimension for all choices, whatever the shape of these.
    """

    choices: Node
    rows: Node
    experts: list[Expert]
    first: int
    by_token: bool
    flat: bool = False


@or_none
def written_to(node: Node) -> Written | None:
    """What experts have written to `node`; None for anything else."""
    chain: list[RowUpdate] = []
    if (put := unsorted(node)) is not None:
        chain = segments(*put)
    else:
        while (update := row_update(node)) is not None and update.overwrites:
            chain.insert(0, update)
            node = update.previous
        chain = chain if is_blank(node) else []
    NoMatch.when(not chain)
    by_slot = chain[0].by_slot
    NoMatch.when(
        any(update.by_slot != by_slot for update in chain) or not by_slot and value(chain[0].token.indices).dim() != 1
    )
    try:
        ordered = in_expert_order(iterations_of(chain, gated=False))
    except Refused:
        return None
    mask = ordered[0].update.token
    assert mask.expert is not None
    experts = [t.expert for t in ordered if t.expert is not None]
    return Written(mask.indices, ordered[0].x, experts, mask.expert, by_slot, flat=put is not None)
