"""Matches the loop over all experts: each reads its rows, and adds its outputs to the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.filled import is_blank, is_filled
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.combines import unsorted
from megacpp_compile.matchers.moe.experts import Expert, first_unlike, match_expert
from megacpp_compile.matchers.moe.gate_behind import gate_behind
from megacpp_compile.matchers.moe.gate_matrix import match_chosen, match_column
from megacpp_compile.matchers.moe.gemms import match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.index_reads import SCATTERS, adds
from megacpp_compile.matchers.moe.nearby import computed_from
from megacpp_compile.matchers.moe.no_expert import changed_before, one_projection_of_rows
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.routing import Mask, distinct_choices, match_mask, scores_of
from megacpp_compile.matchers.moe.row_gates import Gates, gates_of, gates_of_numbers, of_slots
from megacpp_compile.matchers.moe.row_updates import RowUpdate, chains, joined, row_update
from megacpp_compile.matchers.moe.rows import (
    by_slot,
    choices_of,
    has_choices,
    match_rows,
    picked,
    read_at,
    read_over,
    tokens_of,
)
from megacpp_compile.matchers.moe.segments import segments
from megacpp_compile.matchers.moe.slot_rows import once_a_choice
from megacpp_compile.matchers.moe.weighted_parts import weighted_part

aten = torch.ops.aten
_PICKED = (aten.index_add.default, *SCATTERS)
_NO_GATE = "no-gate"
_MAY_COME_TWICE = (
    "a token's rows are written, not added to, and may come twice: no `topk` in this graph is seen to choose experts"
)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One expert's iteration of the loop.
    Attributes:
        expert: None for one that returns what it reads.
        x: the tokens whose rows `expert` reads.
        gates: what the gate may be read from, each with whether it is a matrix [T, E]; some spellings fit both.
        scaled_input: whether the gate multiplies what the expert reads.
    """
    update: RowUpdate
    expert: Expert | None
    x: Node
    gates: list[Gates]
    scaled_input: bool = False


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every loop over experts whose rows are weighted in it, then sums over nearly the rows of an expert."""
    updates = row_updates(view)
    at_once = {node: chain for node in view.graph.nodes if (chain := joined(node))}
    for chain in (*chains(updates), *at_once.values()):
        found = match_chain(view, chain)
        if isinstance(found, RoutedExperts) or not (_unweighted(chain) or found.tag == _NO_GATE):
            yield found
    yield from _changed(view, {*updates, *at_once})


def row_updates(view: GraphView) -> dict[Node, RowUpdate]:
    """All updates of rows in the graph."""
    return {node: update for node in view.graph.nodes if (update := row_update(node)) is not None}


def ungated(view: GraphView, found: Sequence[RoutedExperts | MatchFailure]) -> Iterator[RoutedExperts | MatchFailure]:
    """Every loop that adds or writes outputs as they are, and is in no layer that is `found`: the gates are 1, or the
    gate of a token's one choice multiplies the sum."""
    layers = [one for one in found if isinstance(one, RoutedExperts)]
    at_once = (chain for node in view.graph.nodes if (chain := joined(node)))
    for chain in (*chains(row_updates(view)), *at_once):
        end = chain[-1].node
        if any(end in one.inside for one in layers):
            continue
        gated = match_chain(view, chain)
        if isinstance(gated, MatchFailure) and (_unweighted(chain) or gated.tag == _NO_GATE):
            layer = match_chain(view, chain, gated=False)
            yield layer if isinstance(layer, RoutedExperts) else dataclasses.replace(layer, node=end)


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


def match_chain(
    view: GraphView, chain: list[RowUpdate], gated: bool = True, gates: list[Gates] | None = None
) -> RoutedExperts | MatchFailure:
    """The layer of experts that `chain` adds up, weighted by `gates` that are read elsewhere; without gates if not
    `gated`."""
    if chain[0].by_slot:
        reason = "outputs are written for every choice, and no sum of a token's own times their gates reads them"
        return MatchFailure(chain[-1].node, _NO_GATE, reason)
    found = _iterations(chain, gated and gates is None)
    if isinstance(found, MatchFailure):
        return found
    if gates is not None:
        found = [dataclasses.replace(iteration, gates=gates) for iteration in found]
    first, iterations = found[0], found
    mask = first.update.token
    identities = [t for t in found if t.expert is None]
    iterations = [t for t in found if t.expert is not None]
    if not iterations:
        return MatchFailure(first.update.node, "no-expert", "what is weighted is no expert's output")
    gates, scaled_input = [g for g in first.gates if all(g in t.gates for t in found)], iterations[0].scaled_input
    if mask.above is not None:  # rows that others choose may have gates that count for nothing
        gates = [g for g in gates if g == (mask.above.gates, mask.above.by_expert)]
    if gated and not gates or any(t.scaled_input != scaled_input for t in iterations):
        return MatchFailure(iterations[-1].update.node, "gates", "experts are weighted by different gates")
    passed = _numbers(identities, iterations)
    if isinstance(passed, MatchFailure):
        return passed
    served = _one_choice(iterations)
    if isinstance(served, MatchFailure):
        return served
    iterations, column = served
    ordered = _in_order(iterations)
    if isinstance(ordered, MatchFailure):
        return ordered
    start = chain[0].previous
    empty = is_filled(start, 0.0)
    if any(update.overwrites for update in chain):
        one = len({t.update.token.choice for t in found}) == 1
        every = is_blank(start) or _every_row(mask, ordered)
        if not (one and all(update.overwrites for update in chain) and every):
            return MatchFailure(chain[-1].node, "twice", "rows are written over what was there before")
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
    return bounded(view, layer if gated else gate_behind(layer))


def _every_row(mask: Mask, ordered: list[Iteration]) -> bool:
    """Whether every token's choice is one of the experts."""
    scores = None if mask.any or "s" in mask.dims else scores_of(mask.indices)
    first = ordered[0].update.token.expert
    return scores is not None and first == 0 and same_size(value(scores).shape[-1], len(ordered))


def _numbers(identities: list[Iteration], others: list[Iteration]) -> range | MatchFailure:
    """The numbers of experts that return what they read, which are a range, and none of them another expert's."""
    if not identities:
        return range(0)
    last, served = identities[-1].update, [t.update.token.expert for t in (*identities, *others)]
    if any(t.update.token.choice is not None for t in identities):
        return MatchFailure(last.node, "choices", "an expert that returns what it reads serves one choice alone")
    if len(set(served)) != len(served):
        return MatchFailure(last.node, "twice", f"choice {last.token.expert} is served twice")
    numbers = sorted(served[: len(identities)])  # type: ignore[type-var]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):  # type: ignore[arg-type, operator]
        return MatchFailure(last.node, "gaps", "the numbers of the experts that return what they read are no range")
    return range(numbers[0], numbers[-1] + 1)  # type: ignore[arg-type, operator]


def _one_choice(iterations: list[Iteration]) -> tuple[list[Iteration], int | None] | MatchFailure:
    """(the iterations of one choice, its column), or all of them and None; where every choice has a loop of its own,
    alike, one of the loops and None."""
    first = iterations[0].update
    mask = first.token
    if mask.choice is None:
        return iterations, None
    by_choice: dict[int | None, list[Iteration]] = {}
    for iteration in iterations:
        by_choice.setdefault(iteration.update.token.choice, []).append(iteration)
    every = by_choice.keys() == set(range(value(mask.indices).shape[-1]))
    if not every and len(by_choice) > 1:
        return MatchFailure(first.node, "choices", "only some of a token's choices are served")
    loops = [_in_order(own) for own in by_choice.values()]
    for own in loops:
        if isinstance(own, MatchFailure):
            return own
        if _weights(own) != _weights(loops[0]):
            return MatchFailure(first.node, "experts-differ", "other experts serve a token's other choices")
    return by_choice[mask.choice], None if every else mask.choice


def _weights(iterations: list[Iteration] | MatchFailure) -> list[Any]:
    """The weights and biases of all experts, in order."""
    if isinstance(iterations, MatchFailure):
        return []
    return [part for iteration in iterations if iteration.expert for part in iteration.expert.parameters]


def _iterations(chain: list[RowUpdate], gated: bool = True) -> list[Iteration] | MatchFailure:
    """Every expert's iteration, all by the same choices and over the same tokens; `gated`: each with a gate."""
    iterations: list[Iteration] = []
    for update in chain:
        found = _iteration(update, gated)
        if isinstance(found, MatchFailure):
            return found
        iterations.append(found)
    first = iterations[0]
    mask = first.update.token
    for iteration in iterations:
        update, other = iteration.update, iteration.update.token
        alike = (other.choice is None, other.any, _by(other)) == (mask.choice is None, mask.any, _by(mask))
        if other.indices is not mask.indices or not alike:
            return MatchFailure(update.node, "indices", "experts take their rows by different choices")
        if iteration.x is not first.x:
            return MatchFailure(update.node, "inputs", "experts read different inputs")
        if update.once and "s" in other.dims and not distinct_choices(mask.indices):
            return MatchFailure(update.node, "twice", _MAY_COME_TWICE)
    return iterations


def _by(mask: Mask) -> tuple[Any, ...]:
    """By what gates the rows are chosen, and in which order they come."""
    above = () if mask.above is None else (mask.above.gates, mask.above.by_expert, mask.above.above)
    return *above, mask.order


def _in_order(iterations: list[Iteration]) -> list[Iteration] | MatchFailure:
    """`iterations` in the order of the experts' numbers, which are a range."""
    by_number = {iteration.update.token.expert: iteration for iteration in iterations}
    if len(by_number) != len(iterations):
        repeated = next(t for t in iterations if by_number[t.update.token.expert] is not t)
        return MatchFailure(repeated.update.node, "twice", f"choice {repeated.update.token.expert} is served twice")
    numbers = sorted(n for n in by_number if n is not None)
    if numbers != list(range(numbers[0], numbers[0] + len(iterations))):
        return MatchFailure(iterations[0].update.node, "gaps", "the experts' numbers are no range")
    ordered = [by_number[n] for n in numbers]
    if (other := first_unlike([t.expert for t in ordered if t.expert is not None])) is not None:
        return MatchFailure(other, "experts-differ", "the experts are not built alike")
    return ordered


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


def written(node: Node) -> Written | None:
    """What experts have written to `node`; None for anything else."""
    chain: list[RowUpdate] = []
    if (put := unsorted(node)) is not None:
        chain = segments(*put)
    else:
        while (update := row_update(node)) is not None and update.overwrites:
            chain.insert(0, update)
            node = update.previous
        chain = chain if is_blank(node) else []
    if not chain:
        return None
    by_slot = chain[0].by_slot
    if any(update.by_slot != by_slot for update in chain) or not by_slot and value(chain[0].token.indices).dim() != 1:
        return None
    iterations = _iterations(chain, gated=False)
    ordered = iterations if isinstance(iterations, MatchFailure) else _in_order(iterations)
    if isinstance(ordered, MatchFailure):
        return None
    mask = ordered[0].update.token
    assert mask.expert is not None
    experts = [t.expert for t in ordered if t.expert is not None]
    return Written(mask.indices, ordered[0].x, experts, mask.expert, by_slot, flat=put is not None)


def _iteration(update: RowUpdate, gated: bool = True) -> Iteration | MatchFailure:
    """The iteration of the expert that adds, to its rows, its output times, if `gated`, the gate of the choice."""
    weighted = strip_row_views(update.added)
    if not gated:
        return _read(update, weighted, [], gated=False)
    split = _weighted(weighted, update)
    if split is None:
        return MatchFailure(weighted, "gates", "what an expert's output is multiplied by is not the gate of its choice")
    return _read(update, *split)


def _weighted(node: Node, update: RowUpdate) -> tuple[Node, list[Gates]] | None:
    """(what is weighted, the gates) of a product of rows and their gates; (node, no gates) where it is no product, None
    where it is one of something else."""
    if update.gate is not None and node is strip_row_views(update.added):
        gates = gates_of_numbers(update.gate, update.token)
        return (node, gates) if gates else None
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return node, []
    for a, b in (node.args, node.args[::-1]):
        if found := gates_of(a, update.token):  # type: ignore[arg-type]
            return b, found  # type: ignore[return-value]
    return None


def _read(
    update: RowUpdate, out: Node, gates: list[Gates], gated: bool = True
) -> Iteration | MatchFailure:
    """The iteration whose expert's output is `out`. `gated`: without `gates` its input has to be multiplied by some."""
    expert = match_expert(out, match_linear_gemm)
    rows = strip_row_views(out)
    if expert is None and gates and read_at(rows) is not None:
        return _of_rows(update, None, rows, gates)
    if expert is None:
        return MatchFailure(out, "no-expert", changed_before(out))
    if isinstance(expert, MatchFailure):
        return one_projection_of_rows(rows, update.token) or expert
    rows, scaled_input = strip_row_views(expert.x), gated and not gates
    if scaled_input:
        if (weighted := weighted_part(rows)) is not None:
            whole, gates = weighted[0], of_slots(weighted[1], update.token)
            if not gates:
                return MatchFailure(rows, "gates", "there is not one gate per choice")
            return _of_rows(update, expert, rows, gates, scaled_input, whole)
        split = _weighted(rows, update)
        if split is None:
            return MatchFailure(rows, "gates", "what an expert's input is multiplied by is not the gate of its choice")
        rows, gates = strip_row_views(split[0]), split[1]
        if not gates:
            return MatchFailure(out, _NO_GATE, "neither what an expert reads nor what it adds is multiplied by a gate")
    return _of_rows(update, expert, rows, gates, scaled_input)


def _of_rows(
    update: RowUpdate, expert: Expert | None, rows: Node, gates: list[Gates], scaled_input: bool = False,
    whole: Node | None = None,
) -> Iteration | MatchFailure:
    """The iteration whose expert reads `rows`, a part of `whole` but for gates."""
    read = read_at(rows, whole)
    if read is None or picked(read[1]) != update.token:
        x = None if read is None else _once_a_choice(*read, update.token)
        if x is None:
            return MatchFailure(rows, "rows", "an expert reads other rows than it adds to")
        return Iteration(update, expert, x, gates, scaled_input)
    if not read_over(read[0], read[1], update.token.indices, has_choices(update.token)):
        return MatchFailure(rows, "rows", "there are not as many rows as choices")
    return Iteration(update, expert, read[0], gates, scaled_input)


def _once_a_choice(repeated: Node, positions: list[Any], mask: Mask) -> Node | None:
    """The tokens of which `repeated`, read at the slots of `mask`, has one row for each choice."""
    rows = by_slot(match_rows(positions[0])) if len(positions) == 1 else None
    if rows is None or rows.mask != mask:
        return None
    return once_a_choice(repeated, tokens_of(mask), choices_of(mask))
