"""Matches the loop over all experts: each reads its rows, and adds its outputs to the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, first_unlike, match_expert
from megacpp_compile.matchers.moe.gate_matrix import is_filled, match_chosen_gate
from megacpp_compile.matchers.moe.gemms import Gemm, match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.routing import (
    Mask,
    distinct_choices,
    indexed,
    match_mask,
    match_rows,
    one_choice,
    picked,
    read_by,
    read_over,
    scores_of,
)
from megacpp_compile.matchers.moe.row_updates import RowUpdate, chains, row_update

aten = torch.ops.aten
_PICKED = (aten.index_add.default, aten.scatter_add.default)
_NEAR = 24  # nodes to look at
_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)


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
    gates: list[tuple[Node, bool]]
    scaled_input: bool = False


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every loop over experts but those that `unweighted` is about, then sums over nearly the rows of an expert."""
    updates = {node: update for node in view.graph.nodes if (update := row_update(node)) is not None}
    for chain in chains(updates):
        found = _check(view, chain)
        if isinstance(found, RoutedExperts) or not _unweighted(chain):
            yield found
    yield from _changed(view, updates)


def unweighted(view: GraphView) -> Iterator[MatchFailure]:
    """Why loops that write outputs without a gate do not match; no near miss where the outputs are weighted later, see
    `written`."""
    updates = {node: update for node in view.graph.nodes if (update := row_update(node)) is not None}
    for chain in filter(_unweighted, chains(updates)):
        if isinstance(found := _check(view, chain), MatchFailure):
            yield dataclasses.replace(found, node=chain[-1].node)


def _unweighted(chain: list[RowUpdate]) -> bool:
    """Whether every expert overwrites its rows, and no output is multiplied."""
    return all(update.overwrites and strip_row_views(update.added).target is not aten.mul.Tensor for update in chain)


def _changed(view: GraphView, updates: dict[Node, RowUpdate]) -> Iterator[MatchFailure]:
    """Sums over what is nearly the rows of an expert, one failure a loop."""
    reported = set[Node]()
    for node in view.graph.nodes:
        if node in updates or node.target not in (*_PICKED, aten.index_put.default):
            continue
        index = node.args[2] if node.target in _PICKED else node.args[1][0]
        for _ in range(6):
            rows = match_rows(index) if isinstance(index, Node) else None
            if rows is not None or not isinstance(index, Node) or not index.all_input_nodes:
                break
            index = index.all_input_nodes[0]
        mask = rows.mask if rows is not None else match_mask(index) if isinstance(index, Node) else None
        if mask is not None and mask.indices not in reported:
            reported.add(mask.indices)
            yield MatchFailure(node, "no-rows", "an expert adds to other rows than all those that chose it")


def _check(view: GraphView, chain: list[RowUpdate]) -> RoutedExperts | MatchFailure:
    """The layer of experts that `chain` adds up."""
    found = _iterations(chain)
    if isinstance(found, MatchFailure):
        return found
    first, iterations = found[0], found
    mask = first.update.token
    identities = [t for t in found if t.expert is None]
    iterations = [t for t in found if t.expert is not None]
    if not iterations:
        return MatchFailure(first.update.node, "no-expert", "what is weighted is no expert's output")
    gates, scaled_input = [g for g in first.gates if all(g in t.gates for t in found)], iterations[0].scaled_input
    if not gates or any(t.scaled_input != scaled_input for t in iterations):
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
        if not (one and all(update.overwrites for update in chain) and _blank(start)):
            return MatchFailure(chain[-1].node, "twice", "rows are written over what was there before")
        empty = True
    (weights, by_expert), number = gates[0], ordered[0].update.token.expert
    assert number is not None
    experts = tuple(t.expert for t in ordered if t.expert is not None)
    base = None if empty else start
    layer = RoutedExperts(
        chain[-1].node, first.x, mask.indices, weights, experts, number, base, by_expert=by_expert, column=column,
        scaled_input=scaled_input, identities=passed,
        choices=None if _choices(mask) or value(mask.indices).dim() == 1 else 1,
    )  # fmt: skip
    return bounded(view, layer)


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


def _choices(mask: Mask) -> bool:
    """Whether `mask.indices` have a dimension of a token's choices."""
    return mask.any or mask.choice is not None or "s" in mask.dims


def _blank(node: Node) -> bool:
    """Whether `node` holds nothing that matters: zeros, or uninitialised memory."""
    return is_filled(node, 0.0) or node.target in _EMPTY


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
        alike = (other.choice is None, other.any) == (mask.choice is None, mask.any)
        if other.indices is not mask.indices or not alike:
            return MatchFailure(update.node, "indices", "experts take their rows by different choices")
        if iteration.x is not first.x:
            return MatchFailure(update.node, "inputs", "experts read different inputs")
        if update.once and "s" in other.dims and not distinct_choices(mask.indices):
            return MatchFailure(update.node, "twice", "a token's rows are written, not added to, and may come twice")
    return iterations


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


def written(node: Node) -> tuple[Node, Node, list[Expert], int] | MatchFailure | None:
    """(choices, the rows experts read, the experts, the first one's number) where `node` holds, for every choice, its
    expert's output of the row in the same place; None for anything else."""
    chain: list[RowUpdate] = []
    while (update := row_update(node)) is not None and update.overwrites:
        chain.insert(0, update)
        node = update.previous
    if not chain or not _blank(node) or value(chain[0].token.indices).dim() != 1:
        return None
    iterations = _iterations(chain, gated=False)
    ordered = iterations if isinstance(iterations, MatchFailure) else _in_order(iterations)
    if isinstance(ordered, MatchFailure):
        return ordered
    mask = ordered[0].update.token
    assert mask.expert is not None
    return mask.indices, ordered[0].x, [t.expert for t in ordered if t.expert is not None], mask.expert


def _iteration(update: RowUpdate, gated: bool = True) -> Iteration | MatchFailure:
    """The iteration of the expert that adds, to its rows, its output times, if `gated`, the gate of the choice."""
    weighted = strip_row_views(update.added)
    if not gated:
        return _read(update, weighted, [], gated=False)
    split = _weighted(weighted, update)
    if split is None:
        return MatchFailure(weighted, "gates", "what an expert's output is multiplied by is not the gate of its choice")
    return _read(update, *split)


def _weighted(node: Node, update: RowUpdate) -> tuple[Node, list[tuple[Node, bool]]] | None:
    """(what is weighted, the gates) of a product of rows and their gates; (node, no gates) where it is no product, None
    where it is one of something else."""
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return node, []
    for a, b in (node.args, node.args[::-1]):
        if found := _gates(a, update):  # type: ignore[arg-type]
            return b, found  # type: ignore[return-value]
    return None


def _read(
    update: RowUpdate, out: Node, gates: list[tuple[Node, bool]], gated: bool = True
) -> Iteration | MatchFailure:
    """The iteration whose expert's output is `out`. `gated`: without `gates` its input has to be multiplied by some."""
    expert = match_expert(out, match_linear_gemm)
    rows = strip_row_views(out)
    if expert is None and gates and indexed(rows) is not None:
        return _of_rows(update, None, rows, gates)
    if expert is None:
        return MatchFailure(out, "no-expert", _changed_before(out))
    if isinstance(expert, MatchFailure):
        return expert
    rows, scaled_input = strip_row_views(expert.x), gated and not gates
    if scaled_input:
        split = _weighted(rows, update)
        if split is None:
            return MatchFailure(rows, "gates", "what an expert's input is multiplied by is not the gate of its choice")
        rows, gates = strip_row_views(split[0]), split[1]
        if not gates:
            return MatchFailure(out, "no-gate", "neither what an expert reads nor what it adds is multiplied by a gate")
    return _of_rows(update, expert, rows, gates, scaled_input)


def _changed_before(out: Node) -> str:
    """Why `out`, which is weighted, is no expert's output: what its last GEMM goes through, if there is one."""
    between, gemms = [out], 0
    for node in between:
        if isinstance(match_linear_gemm(strip_row_views(node)), Gemm):
            gemms += 1
        elif node.op == "call_function" and len(between) < _NEAR:
            between += [n for n in node.all_input_nodes if n not in between]
    changes = [n for n in sorted(between) if n.op == "call_function" and strip_row_views(n) is n]
    own = [n for n in changes if not match_linear_gemm(n)]
    named = dict.fromkeys(str(n.target).removeprefix("aten.").split(".")[0] for n in own)
    if gemms != 1:
        return "what is weighted is no expert's output"
    return f"an expert's output goes through {', '.join(named)} before it is weighted: only a bias may be added there"


def _of_rows(
    update: RowUpdate, expert: Expert | None, rows: Node, gates: list[tuple[Node, bool]], scaled_input: bool = False
) -> Iteration | MatchFailure:
    """The iteration whose expert reads `rows`."""
    read = indexed(rows)
    if read is None or picked(read[1]) != update.token:
        return MatchFailure(rows, "rows", "an expert reads other rows than it adds to")
    if not read_over(read[0], read[1], update.token.indices, _choices(update.token)):
        return MatchFailure(rows, "rows", "there are not as many rows as choices")
    return Iteration(update, expert, read[0], gates, scaled_input)


def _gates(node: Node, update: RowUpdate) -> list[tuple[Node, bool]]:
    """What `node` is read from, each with whether it is a matrix: gates [.., k] of which it is `gates[token, choice]`,
    one per row, or a matrix [.., E] of which it is the expert's column."""
    if value(node).dim() != 2 or not same_size(value(node).shape[-1], 1):
        return []
    while node.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten._to_copy.default,
                          aten.to.dtype, aten.clone.default):  # fmt: skip
        node = node.args[0]  # type: ignore[assignment]
    mask, column = update.token, None
    if node.target is aten.select.int and node.args[1] in (1, -1):
        node, column = node.args[0], node.args[2]  # type: ignore[assignment]
    read = indexed(node)
    if read is None:
        return []
    gates, indices = read[0], value(mask.indices)
    if column is None and mask.any and (own := match_chosen_gate(gates)) is not None:
        meant = own[0] is mask.indices and own[2] == mask.expert and picked(read[1]) == mask
        return [(own[1], False)] if meant else []
    if column is None:
        gates, column = one_choice(gates)
    if column is None:
        slots, positions = "s" in mask.dims, read[1]
        if mask.choice is not None or mask.any or picked(positions, slots) != mask:
            return []
        whole = value(gates).dim() == read_by(positions)
        alike = not slots or same_size(value(gates).shape[-1], indices.shape[-1])
        alike = alike and read_over(gates, positions[: len(positions) - slots], mask.indices, slots)
        return [(gates, False)] if whole and alike else []
    if picked(read[1]) != mask or not read_over(gates, read[1], mask.indices, _choices(mask)):
        return []
    found = []
    if column == mask.choice and same_size(value(gates).shape[-1], indices.shape[-1]):
        found.append((gates, False))
    scores = scores_of(mask.indices)
    if column == mask.expert and scores is not None and same_size(value(gates).shape[-1], value(scores).shape[-1]):
        found.append((gates, True))
    return found
