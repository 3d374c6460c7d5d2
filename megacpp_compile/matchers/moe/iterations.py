"""What the iterations of a loop over experts do: each reads its expert's rows, and adds or writes its output."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.experts import Expert, first_unlike, match_expert
from megacpp_compile.matchers.moe.gemms import match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.no_expert import changed_before, one_projection_of_rows
from megacpp_compile.matchers.moe.routing import Mask, distinct_choices
from megacpp_compile.matchers.moe.row_gates import Gates, gates_of, gates_of_numbers, of_slots
from megacpp_compile.matchers.moe.row_updates import RowUpdate
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
from megacpp_compile.matchers.moe.slot_rows import once_a_choice
from megacpp_compile.matchers.moe.weighted_parts import weighted_part

aten = torch.ops.aten
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


def iterations_of(chain: list[RowUpdate], gated: bool = True) -> list[Iteration] | MatchFailure:
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


def in_order(iterations: list[Iteration]) -> list[Iteration] | MatchFailure:
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


def _read(update: RowUpdate, out: Node, gates: list[Gates], gated: bool = True) -> Iteration | MatchFailure:
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
            return MatchFailure(out, NO_GATE, "neither what an expert reads nor what it adds is multiplied by a gate")
    return _of_rows(update, expert, rows, gates, scaled_input)


def _of_rows(
    update: RowUpdate, expert: Expert | None, rows: Node, gates: list[Gates], scaled_input: bool = False,
    whole: Node | None = None,
) -> Iteration | MatchFailure:  # fmt: skip
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
