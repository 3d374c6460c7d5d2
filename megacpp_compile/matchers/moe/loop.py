"""The loop over all experts: each takes its rows, and adds what it makes of them to the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, NoExpert, agree, linear_product, match_expert, over_rows
from megacpp_compile.matchers.moe.gate_matrix import is_filled, match_chosen_gate
from megacpp_compile.matchers.moe.routing import (
    Mask,
    added_rows,
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
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.passes._moe_rewrite import Routed, match
from megacpp_compile.passes._rule import Match

aten = torch.ops.aten
_PICKED = (aten.index_add.default, aten.scatter_add.default)
_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)


@dataclasses.dataclass(frozen=True)
class Link:
    """One expert's turn: `node = previous` plus `added` in the rows of `token`, a mask over tokens. `once`: rows are
    written, so that one that came twice would count once. `instead`: what was there before is not in what is
    written."""

    node: Node
    previous: Node
    token: Mask
    added: Node
    once: bool = False
    instead: bool = False


@dataclasses.dataclass(frozen=True)
class Turn:
    link: Link
    expert: Expert
    x: Node
    gates: list[tuple[Node, bool]]  # and whether they are a matrix [T, E]; what is written may be read in either way
    scaled: bool = False  # the gate multiplies what the expert reads


def _link(node: Node) -> Link | None:
    args = node.args
    if (sum_ := added_rows(node)) is not None:
        rows = picked([sum_[1]])
        return Link(node, _unviewed(sum_[0]), rows, sum_[2]) if rows else None
    if node.target is aten.index_put.default:
        previous, positions, added, *more = args
        rows = picked(positions)  # type: ignore[arg-type]
        if rows is None or not isinstance(added, Node):
            return None
        previous = _unviewed(previous)  # type: ignore[arg-type]
        if more and more[0]:
            return Link(node, previous, rows, added)  # type: ignore[arg-type]
        if added.target is aten.add.Tensor and not added.kwargs:
            for old, new in (added.args, added.args[::-1]):
                read = indexed(old) if isinstance(old, Node) else None
                if read and _unviewed(read[0]) is previous and picked(read[1]) == rows and isinstance(new, Node):
                    return Link(node, previous, rows, new, once=True)  # type: ignore[arg-type]
        if rows.dims == ("t",) and not rows.any:
            return Link(node, previous, rows, added, instead=True)  # type: ignore[arg-type]
    return None


def _unviewed(node: Node) -> Node:
    """`node` before it was seen in another shape and in its own again, as what is added to in place is."""
    inner, shape = node, value(node).shape
    while inner.target in RESHAPES:
        inner = inner.args[0]  # type: ignore[assignment]
        own = value(inner).shape
        if len(own) == len(shape) and all(map(same_size, own, shape)) or is_filled(inner, 0.0):
            node = inner
    return node


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    links = {node: link for node in view.graph.nodes if (link := _link(node)) is not None}
    for chain in _chains(links):
        found = _check(view, chain)
        if isinstance(found, Match) or not _unweighted(chain):
            yield found
    yield from _changed(view, links)


def unweighted(view: GraphView) -> Iterator[MatchFailure]:
    """What is written without a gate; it may be weighted later (see `written`), and is no miss then."""
    links = {node: link for node in view.graph.nodes if (link := _link(node)) is not None}
    for chain in filter(_unweighted, _chains(links)):
        if isinstance(found := _check(view, chain), MatchFailure):
            yield dataclasses.replace(found, node=chain[-1].node)


def _unweighted(chain: list[Link]) -> bool:
    return all(link.instead and over_rows(link.added).target is not aten.mul.Tensor for link in chain)


def _chains(links: dict[Node, Link]) -> Iterator[list[Link]]:
    """The turns that add to one another's sums, first turn first."""
    inside = {link.previous for link in links.values() if link.previous in links}
    for node, last in links.items():
        if node not in inside:
            chain = [last]
            while chain[0].previous in links:
                chain.insert(0, links[chain[0].previous])
            yield chain


def _changed(view: GraphView, links: dict[Node, Link]) -> Iterator[MatchFailure]:
    """Sums over what is nearly the rows of an expert, said once for all of a loop."""
    said = set[Node]()
    for node in view.graph.nodes:
        if node in links or node.target not in (*_PICKED, aten.index_put.default):
            continue
        index = node.args[2] if node.target in _PICKED else node.args[1][0]
        for _ in range(6):
            rows = match_rows(index) if isinstance(index, Node) else None
            if rows is not None or not isinstance(index, Node) or not index.all_input_nodes:
                break
            index = index.all_input_nodes[0]
        mask = rows.mask if rows is not None else match_mask(index) if isinstance(index, Node) else None
        if mask is not None and mask.indices not in said:
            said.add(mask.indices)
            yield MatchFailure(node, "no-rows", "an expert adds to other rows than all those that chose it")


def _check(view: GraphView, chain: list[Link]) -> Match | MatchFailure:
    found = _turns(chain)
    if isinstance(found, MatchFailure):
        return found
    first, turns = found[0], found
    mask = first.link.token
    gates = [g for g in first.gates if all(g in t.gates for t in turns)]
    if not gates or any(t.scaled != first.scaled for t in turns):
        return MatchFailure(turns[-1].link.node, "gates", "experts are weighted by different gates")
    column = None
    if mask.choice is not None:
        by_choice: dict[int | None, list[Turn]] = {}
        for turn in turns:
            by_choice.setdefault(turn.link.token.choice, []).append(turn)
        every = by_choice.keys() == set(range(value(mask.indices).shape[-1]))
        if not every and len(by_choice) > 1:
            return MatchFailure(first.link.node, "choices", "only some of a token's choices are served")
        column = None if every else mask.choice
        groups = [_in_order(group) for group in by_choice.values()]
        for group in groups:
            if isinstance(group, MatchFailure):
                return group
            if _weights(group) != _weights(groups[0]):
                return MatchFailure(first.link.node, "experts-differ", "other experts serve a token's other choices")
        turns = by_choice[mask.choice]
    ordered = _in_order(turns)
    if isinstance(ordered, MatchFailure):
        return ordered
    start = chain[0].previous
    empty = is_filled(start, 0.0)
    if any(link.instead for link in chain):
        one = len({t.link.token.choice for t in found}) == 1
        if not (one and all(link.instead for link in chain) and _blank(start)):
            return MatchFailure(chain[-1].node, "twice", "rows are written over what was there before")
        empty = True
    (weights, matrix), number = gates[0], ordered[0].link.token.expert
    assert number is not None
    experts = [t.expert for t in ordered]
    base = None if empty else start
    routed = Routed(
        chain[-1].node, first.x, mask.indices, weights, experts, number, base, matrix=matrix, column=column,
        scaled=first.scaled, choices=None if _choices(mask) or value(mask.indices).dim() == 1 else 1,
    )  # fmt: skip
    return match(view, routed)


def _choices(mask: Mask) -> bool:
    """Whether `mask.indices` have a dimension of a token's choices."""
    return mask.any or mask.choice is not None or "s" in mask.dims


def _blank(node: Node) -> bool:
    return is_filled(node, 0.0) or node.target in _EMPTY


def _weights(turns: list[Turn] | MatchFailure) -> list[Any]:
    return [] if isinstance(turns, MatchFailure) else [p.weight for t in turns for p in (*t.expert.ups, t.expert.down)]


def _turns(chain: list[Link], gated: bool = True) -> list[Turn] | MatchFailure:
    """Every expert's turn; all go by the same choices and read the same rows."""
    turns: list[Turn] = []
    for link in chain:
        found = _turn(link, gated)
        if isinstance(found, MatchFailure):
            return found
        turns.append(found)
    first = turns[0]
    mask = first.link.token
    for turn in turns:
        link, other = turn.link, turn.link.token
        alike = (other.choice is None, other.any) == (mask.choice is None, mask.any)
        if other.indices is not mask.indices or not alike:
            return MatchFailure(link.node, "indices", "experts take their rows by different choices")
        if turn.x is not first.x:
            return MatchFailure(link.node, "inputs", "experts read different inputs")
        if link.once and "s" in other.dims and not distinct_choices(mask.indices):
            return MatchFailure(link.node, "twice", "a token's rows are written, not added to, and may come twice")
    return turns


def _in_order(turns: list[Turn]) -> list[Turn] | MatchFailure:
    """One turn for each of a range of experts, in the order of their numbers."""
    by_number = {turn.link.token.expert: turn for turn in turns}
    if len(by_number) != len(turns):
        repeated = next(t for t in turns if by_number[t.link.token.expert] is not t)
        return MatchFailure(repeated.link.node, "twice", f"choice {repeated.link.token.expert} is served twice")
    numbers = sorted(n for n in by_number if n is not None)
    if numbers != list(range(numbers[0], numbers[0] + len(turns))):
        return MatchFailure(turns[0].link.node, "gaps", "the experts' numbers are no range")
    ordered = [by_number[n] for n in numbers]
    if (other := agree([t.expert for t in ordered])) is not None:
        return MatchFailure(other, "experts-differ", "the experts are not built alike")
    return ordered


def written(node: Node) -> tuple[Node, Node, list[Expert], int] | MatchFailure | None:
    """(choices, the rows experts read, the experts, the first one's number) where `node` holds, in the place of every
    choice, what its expert makes of the row there; None where it is no such thing."""
    chain: list[Link] = []
    while (link := _link(node)) is not None and link.instead:
        chain.insert(0, link)
        node = link.previous
    if not chain or not _blank(node) or value(chain[0].token.indices).dim() != 1:
        return None
    turns = _turns(chain, gated=False)
    ordered = turns if isinstance(turns, MatchFailure) else _in_order(turns)
    if isinstance(ordered, MatchFailure):
        return ordered
    mask = ordered[0].link.token
    assert mask.expert is not None
    return mask.indices, ordered[0].x, [t.expert for t in ordered], mask.expert


def _turn(link: Link, gated: bool = True) -> Turn | MatchFailure:
    """What one expert adds: its output for its tokens, times, if `gated`, the gate of the choice."""
    weighted = over_rows(link.added)
    if not gated:
        return _read(link, weighted, [], gated=False)
    split = _weighted(weighted, link)
    if split is None:
        return MatchFailure(weighted, "gates", "what an expert's output is multiplied by is not the gate of its choice")
    return _read(link, *split)


def _weighted(node: Node, link: Link) -> tuple[Node, list[tuple[Node, bool]]] | None:
    """(what is weighted, by which gates) of a product of rows and their gates; (node, none) where it is no product,
    None where it is one of something else."""
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return node, []
    for a, b in (node.args, node.args[::-1]):
        if found := _gates(a, link):  # type: ignore[arg-type]
            return b, found  # type: ignore[return-value]
    return None


def _read(link: Link, out: Node, gates: list[tuple[Node, bool]], gated: bool = True) -> Turn | MatchFailure:
    expert = match_expert(out, linear_product)
    if expert is None:
        return MatchFailure(out, "no-expert", "what is weighted is no expert's output")
    if isinstance(expert, NoExpert):
        return MatchFailure(expert.node, expert.tag, expert.reason)
    rows, scaled = over_rows(expert.x), gated and not gates
    if scaled:
        split = _weighted(rows, link)
        if split is None:
            return MatchFailure(rows, "gates", "what an expert's input is multiplied by is not the gate of its choice")
        rows, gates = over_rows(split[0]), split[1]
        if not gates:
            return MatchFailure(out, "no-gate", "neither what an expert reads nor what it adds is multiplied by a gate")
    read = indexed(rows)
    if read is None or picked(read[1]) != link.token:
        return MatchFailure(rows, "rows", "an expert reads other rows than it adds to")
    if not read_over(read[0], read[1], link.token.indices, _choices(link.token)):
        return MatchFailure(expert.x, "rows", "there are not as many rows as choices")
    return Turn(link, expert, read[0], gates, scaled)


def _gates(node: Node, link: Link) -> list[tuple[Node, bool]]:
    """The gates [.., k] of which `node` is `gates[token, choice]`, one per row, or a matrix [.., E] of which it is the
    expert's column."""
    if value(node).dim() != 2 or value(node).shape[-1] != 1:
        return []
    while node.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten._to_copy.default,
                          aten.to.dtype, aten.clone.default):  # fmt: skip
        node = node.args[0]  # type: ignore[assignment]
    mask, column = link.token, None
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
