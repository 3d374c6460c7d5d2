"""Matches what the iterations of a loop over experts do: each reads its expert's rows, and updates rows by its output,
in a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import CASTS, COPIES
from megacpp_compile.matchers._match import MatchFailure, Refused, refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import (
    Expert,
    changed_before,
    match_expert,
    one_projection_of_rows,
    refuse_unlike,
)
from megacpp_compile.matchers.moe.gemms import match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.routing import Mask, distinct_choices
from megacpp_compile.matchers.moe.row_gates import (
    Gates,
    gates_of,
    gates_of_numbers,
    numbers_of_column,
    of_slots,
    weighted_part,
)
from megacpp_compile.matchers.moe.rows import (
    at_slots,
    choices_of,
    has_choices,
    once_a_choice,
    picked,
    read_at,
    read_over,
    tokens_of,
)
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.index_reads import added_rows, indexed
from megacpp_compile.reader.links import chain, through
from megacpp_compile.reader.parts import concatenated
from megacpp_compile.reader.products import multiplied

_CASTS = (is_cast, COPIES)


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """`node` is `previous` with `added` in the rows of `token`, a mask over tokens.

    Attributes:
        once: the sum of both is written, so that a row that comes twice counts once.
        overwrites: `added` alone is written; what was there before is lost.
        by_slot: what is written to has a row for every choice of a token, [T, k, d].
        gate: what multiplies `added`, where that is done to all experts' rows at once.
    """

    node: Node
    previous: Node
    token: Mask
    added: Node
    once: bool = False
    overwrites: bool = False
    by_slot: bool = False
    gate: Node | None = None


def row_update(node: Node) -> RowUpdate | None:
    """The update of one expert's rows that `node` is."""
    args = node.args
    if (sum_ := added_rows(node)) is not None:
        rows = picked([sum_[1]])
        return RowUpdate(node, _unviewed(sum_[0]), rows, sum_[2]) if rows else None
    if node.target is aten.index_put.default:
        previous, positions, added, *more = args
        rows = picked(positions)  # type: ignore[arg-type]
        if rows is None and isinstance(added, Node) and not (more and more[0]):
            return _of_slots(node)
        if rows is None or not isinstance(added, Node):
            return None
        previous = _unviewed(previous)  # type: ignore[arg-type]
        if more and more[0]:
            return RowUpdate(node, previous, rows, added)  # type: ignore[arg-type]
        sum_of = _before_rounding(added)
        if sum_of.target is aten.add.Tensor and not sum_of.kwargs:
            for old, new in (sum_of.args, sum_of.args[::-1]):
                read = indexed(old) if isinstance(old, Node) else None
                if read and _unviewed(read[0]) is previous and picked(read[1]) == rows and isinstance(new, Node):
                    return RowUpdate(node, previous, rows, new, once=True)  # type: ignore[arg-type]
        if rows.dims == ("t",) and not rows.any:
            return RowUpdate(node, previous, rows, added, overwrites=True)  # type: ignore[arg-type]
    return None


def row_updates(view: GraphView) -> dict[Node, RowUpdate]:
    """All updates of rows in the graph."""
    return {node: update for node in view.graph.nodes if (update := row_update(node)) is not None}


def _before_rounding(node: Node) -> Node:
    """The sum that `node` rounds, as one in place does to the dtype of what is added to."""
    if node.target not in CASTS:
        return node
    inner: Node = node.args[0]  # type: ignore[assignment]
    wide = torch.promote_types(value(inner).dtype, value(node).dtype) == value(inner).dtype
    return inner if wide else node


def _of_slots(node: Node) -> RowUpdate | None:
    """The write of one expert's outputs to the places of its tokens and choices."""
    previous, positions, added, *_ = node.args
    slots, shape = picked(positions, slots=True), value(previous).shape  # type: ignore[arg-type]
    if slots is None or len(shape) != len(positions) + 1 or len(positions) != value(slots.indices).dim():  # type: ignore[arg-type]
        return None
    if not all(map(same_size, shape[:-1], value(slots.indices).shape)):
        return None
    return RowUpdate(node, _unviewed(previous), slots, added, overwrites=True, by_slot=True)  # type: ignore[arg-type]


def _unviewed(node: Node) -> Node:
    """`node` before reshapes that end in its own shape, which in-place additions to a view leave behind."""
    first, *others = chain(node, RESHAPES)
    return [first, *(n for n in others if same_shape(n, node) or is_filled(n, 0.0))][-1]


def joined(node: Node) -> list[RowUpdate]:
    """Every expert's update in the sum `node` of all experts' rows, which are joined by `cat` as their tokens are:
    `y.index_add(0, torch.cat(tokens), torch.cat(outputs) * torch.cat(gates)[:, None])`."""
    found = added_rows(node)
    tokens = [] if found is None else concatenated(through(found[1], *_CASTS))
    if found is None or not tokens:
        return []
    rows, gates = through(found[2], *_CASTS), list[Node | None]([None] * len(tokens))
    outs = concatenated(rows)
    for out, gate in [] if outs else multiplied(rows):
        cut, own = concatenated(through(out, *_CASTS)), concatenated(numbers_of_column(gate))
        if cut and len(own) == len(tokens):
            outs, gates = cut, list(own)
            break
    if len(outs) != len(tokens):
        return []
    updates = list[RowUpdate]()
    for token, out, gate in zip(tokens, outs, gates, strict=True):
        mask, lengths = picked([token]), [value(part).shape[0] for part in (token, out, gate) if part is not None]
        if mask is None or not all(same_size(lengths[0], n) for n in lengths):
            return []
        updates.append(RowUpdate(node, _unviewed(found[0]), mask, out, gate=gate))
    return updates


def chains(updates: dict[Node, RowUpdate]) -> Iterator[list[RowUpdate]]:
    """The updates of one another's results, first update first."""
    inside = {update.previous for update in updates.values() if update.previous in updates}
    for node, last in updates.items():
        if node not in inside:
            chain = [last]
            while chain[0].previous in updates:
                chain.insert(0, updates[chain[0].previous])
            yield chain


NO_GATE = "no-gate"  # the tag of a failure: nothing is weighted
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


def iterations_of(chain: list[RowUpdate], gated: bool = True) -> list[Iteration]:
    """Every expert's iteration, all by the same choices and over the same tokens; `gated`: each with a gate. Raises
    Refused."""
    iterations = [_iteration(update, gated) for update in chain]
    first, mask = iterations[0], iterations[0].update.token
    for iteration in iterations:
        update, other = iteration.update, iteration.update.token
        alike = (other.choice is None, other.any, _by(other)) == (mask.choice is None, mask.any, _by(mask))
        alike = alike and other.indices is mask.indices
        refuse_if(not alike, update.node, "indices", "experts take their rows by different choices")
        refuse_if(iteration.x is not first.x, update.node, "inputs", "experts read different inputs")
        several = update.once and "s" in other.dims and not distinct_choices(mask.indices)
        refuse_if(several, update.node, "twice", _MAY_COME_TWICE)
    return iterations


def _by(mask: Mask) -> tuple[Any, ...]:
    """By what gates the rows are chosen, and in which order they come."""
    above = () if mask.above is None else (mask.above.gates, mask.above.by_expert, mask.above.above)
    return *above, mask.order


def in_expert_order(iterations: list[Iteration]) -> list[Iteration]:
    """`iterations` in the order of the experts' numbers, which are a range. Raises Refused."""
    by_number = {iteration.update.token.expert: iteration for iteration in iterations}
    for t in iterations:
        number = t.update.token.expert
        refuse_if(by_number[number] is not t, t.update.node, "twice", f"choice {number} is served twice")
    numbers = sorted(n for n in by_number if n is not None)
    a_range = numbers == list(range(numbers[0], numbers[0] + len(iterations)))
    refuse_if(not a_range, iterations[0].update.node, "gaps", "the experts' numbers are no range")
    ordered = [by_number[n] for n in numbers]
    refuse_unlike([t.expert for t in ordered if t.expert is not None])
    return ordered


def _iteration(update: RowUpdate, gated: bool = True) -> Iteration:
    """The iteration of the expert that adds, to its rows, its output times, if `gated`, the gate of the choice."""
    weighted = strip_row_views(update.added)
    if not gated:
        return _read(update, weighted, [], gated=False)
    return _read(update, *_weighted(weighted, update, "output"))


def _weighted(node: Node, update: RowUpdate, what: str) -> tuple[Node, list[Gates]]:
    """(what is weighted, the gates) of a product of rows and their gates; (node, no gates) where it is no product.
    what: of an expert's the node is."""
    reason = f"what an expert's {what} is multiplied by is not the gate of its choice"
    if update.gate is not None and node is strip_row_views(update.added):
        gates = gates_of_numbers(update.gate, update.token)
        refuse_if(not gates, node, "gates", reason)
        return node, gates
    pairs = multiplied(node)
    for a, b in pairs:
        if found := gates_of(a, update.token):
            return b, found
    refuse_if(pairs, node, "gates", reason)
    return node, []


def _read(update: RowUpdate, out: Node, gates: list[Gates], gated: bool = True) -> Iteration:
    """The iteration whose expert's output is `out`. `gated`: without `gates` its input has to be multiplied by some."""
    expert = match_expert(out, match_linear_gemm)
    rows = strip_row_views(out)
    if expert is None and gates and read_at(rows) is not None:
        return _of_rows(update, None, rows, gates)
    if expert is None:
        refuse(out, "no-expert", changed_before(out))
    if isinstance(expert, MatchFailure):
        raise Refused(one_projection_of_rows(rows, update.token) or expert)
    rows, scaled_input = strip_row_views(expert.x), gated and not gates
    if scaled_input:
        if (weighted := weighted_part(rows)) is not None:
            whole, gates = weighted[0], of_slots(weighted[1], update.token)
            refuse_if(not gates, rows, "gates", "there is not one gate per choice")
            return _of_rows(update, expert, rows, gates, scaled_input, whole)
        rows, gates = _weighted(rows, update, "input")
        rows = strip_row_views(rows)
        refuse_if(not gates, out, NO_GATE, "neither what an expert reads nor what it adds is multiplied by a gate")
    return _of_rows(update, expert, rows, gates, scaled_input)


def _of_rows(
    update: RowUpdate, expert: Expert | None, rows: Node, gates: list[Gates], scaled_input: bool = False,
    whole: Node | None = None,
) -> Iteration:  # fmt: skip
    """The iteration whose expert reads `rows`, a part of `whole` but for gates."""
    read = read_at(rows, whole)
    if read is None or picked(read[1]) != update.token:
        x = None if read is None else _once_a_choice(*read, update.token)
        if x is None:
            refuse(rows, "rows", "an expert reads other rows than it adds to")
        return Iteration(update, expert, x, gates, scaled_input)
    whole_rows = read_over(read[0], read[1], update.token.indices, has_choices(update.token))
    refuse_if(not whole_rows, rows, "rows", "there are not as many rows as choices")
    return Iteration(update, expert, read[0], gates, scaled_input)


def _once_a_choice(repeated: Node, positions: list[Any], mask: Mask) -> Node | None:
    """The tokens of which `repeated`, read at the slots of `mask`, has one row for each choice."""
    return once_a_choice(repeated, tokens_of(mask), choices_of(mask)) if at_slots(positions, mask) else None
