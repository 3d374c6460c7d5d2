"""The loop over all experts: each takes its rows, and adds what it makes of them to the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.graph_edit import same_size, value
from megacpp_compile.passes._moe_rewrite import Routed, match
from megacpp_compile.passes._rule import GraphView, Match, Refusal
from megacpp_compile.recognise.experts import Expert, NoExpert, agree, linear_product, match_expert, over_rows
from megacpp_compile.recognise.routing import Rows, distinct_choices, indexed, match_mask, match_rows

aten = torch.ops.aten
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


@dataclasses.dataclass(frozen=True)
class Link:
    """One expert's turn: `node = previous` plus `added` in the rows of `token`. `once`: rows are written, so that one
    that came twice would count once."""

    node: Node
    previous: Node
    token: Rows
    added: Node
    once: bool


@dataclasses.dataclass(frozen=True)
class Turn:
    link: Link
    expert: Expert
    x: Node
    gates: Node


def _link(node: Node) -> Link | None:
    args = node.args
    if node.target is aten.index_add.default and args[1] == 0 and node.kwargs.get("alpha", 1) == 1:
        rows = match_rows(args[2])  # type: ignore[arg-type]
        return Link(node, args[0], rows, args[3], False) if rows and len(args) == 4 else None  # type: ignore[arg-type]
    if node.target is aten.index_put.default and len(args[1]) == 1 and isinstance(args[1][0], Node):  # type: ignore[arg-type, index]
        previous, (index,), added, *more = args  # type: ignore[misc]
        rows = match_rows(index)
        if rows is None:
            return None
        if more and more[0]:
            return Link(node, previous, rows, added, False)  # type: ignore[arg-type]
        if isinstance(added, Node) and added.target is aten.add.Tensor and not added.kwargs:
            for old, new in (added.args, added.args[::-1]):
                read = indexed(old) if isinstance(old, Node) else None
                if read and read[0] is previous and _same(read[1], [rows]) and isinstance(new, Node):
                    return Link(node, previous, rows, new, True)  # type: ignore[arg-type]
    return None


def _same(indices: list[Any], wanted: list[Rows]) -> bool:
    return len(indices) == len(wanted) and all(
        isinstance(i, Node) and match_rows(i) == w for i, w in zip(indices, wanted, strict=True)
    )


def find(view: GraphView) -> Iterator[Match | Refusal]:
    links = {node: link for node in view.graph.nodes if (link := _link(node)) is not None}
    inside = {link.previous for link in links.values() if link.previous in links}
    for node, last in links.items():
        if node in inside:
            continue
        chain = [last]
        while chain[0].previous in links:
            chain.insert(0, links[chain[0].previous])
        yield _check(view, chain)
    yield from _changed(view, links)


def _changed(view: GraphView, links: dict[Node, Link]) -> Iterator[Refusal]:
    """Sums over what is nearly the rows of an expert, said once for all of a loop."""
    said = set[Node]()
    for node in view.graph.nodes:
        if node in links or node.target not in (aten.index_add.default, aten.index_put.default):
            continue
        index = node.args[2] if node.target is aten.index_add.default else node.args[1][0]
        for _ in range(4):
            rows = match_rows(index) if isinstance(index, Node) else None
            if rows is not None or not isinstance(index, Node) or not index.all_input_nodes:
                break
            index = index.all_input_nodes[0]
        mask = rows.mask if rows is not None else match_mask(index) if isinstance(index, Node) else None
        if mask is not None and mask.indices not in said:
            said.add(mask.indices)
            yield Refusal(node, "no-rows", "an expert adds to other rows than all those that chose it")


def _check(view: GraphView, chain: list[Link]) -> Match | Refusal:
    turns = []
    for link in chain:
        if link.token.dim != "t":
            return Refusal(link.node, "rows", "the rows that are added to are not those of tokens")
        found = _turn(link)
        if isinstance(found, Refusal):
            return found
        turns.append(found)
    first = turns[0]
    indices = first.link.token.mask.indices
    for turn in turns:
        if turn.link.token.mask.indices is not indices:
            return Refusal(turn.link.node, "indices", "experts take their rows by different choices")
        if turn.x is not first.x:
            return Refusal(turn.link.node, "inputs", "experts read different inputs")
        if turn.gates is not first.gates:
            return Refusal(turn.link.node, "gates", "experts are weighted by different gates")
        if turn.link.once and not distinct_choices(indices):
            return Refusal(turn.link.node, "twice", "a token's rows are written, not added to, and may come twice")
    by_number = {turn.link.token.mask.expert: turn for turn in turns}
    if len(by_number) != len(turns):
        repeated = next(t for t in turns if by_number[t.link.token.mask.expert] is not t)
        return Refusal(repeated.link.node, "twice", f"choice {repeated.link.token.mask.expert} is served twice")
    numbers = sorted(n for n in by_number if n is not None)
    if numbers != list(range(numbers[0], numbers[0] + len(turns))):
        return Refusal(first.link.node, "gaps", "the experts' numbers are no range")
    experts = [by_number[n].expert for n in numbers]
    if (other := agree(experts)) is not None:
        return Refusal(other, "experts-differ", "the experts are not built alike")
    start = chain[0].previous
    base = None if _zeros(start) else start
    routed = Routed(chain[-1].node, first.x, indices, first.gates, experts, numbers[0], base)
    return match(view, routed)


def _zeros(node: Node) -> bool:
    full = node.target in (aten.full.default, aten.full_like.default, aten.new_full.default)
    fill = node.args[-1] if len(node.args) > 1 else None
    return node.target in _ZEROS or (full and isinstance(fill, (int, float)) and fill == 0)


def _turn(link: Link) -> Turn | Refusal:
    """What one expert adds: its output for its tokens, times the gate of the choice."""
    weighted = over_rows(link.added)
    if weighted.target is not aten.mul.Tensor or not all(isinstance(a, Node) for a in weighted.args):
        return Refusal(weighted, "no-gate", "what an expert adds is not its output times a gate")
    gate, out, gates = None, None, None
    for a, b in (weighted.args, weighted.args[::-1]):
        found = _gates(a, link)  # type: ignore[arg-type]
        if found is not None:
            gate, out, gates = a, b, found
    if gate is None or gates is None:
        return Refusal(weighted, "gates", "what an expert's output is multiplied by is not the gate of its choice")
    expert = match_expert(out, linear_product)  # type: ignore[arg-type]
    if expert is None:
        return Refusal(out, "no-expert", "what is weighted is no expert's output")  # type: ignore[arg-type]
    if isinstance(expert, NoExpert):
        return Refusal(expert.node, expert.tag, expert.reason)
    read = indexed(over_rows(expert.x))
    if read is None or not _same(read[1], [link.token]) or value(read[0]).dim() != 2:
        return Refusal(over_rows(expert.x), "rows", "an expert reads other rows than it adds to")
    if not same_size(value(read[0]).shape[0], value(link.token.mask.indices).shape[0]):
        return Refusal(expert.x, "rows", "there are not as many rows as choices")
    return Turn(link, expert, read[0], gates)


def _gates(node: Node, link: Link) -> Node | None:
    """The gates [T, k] of which `node` is `gates[token, choice]`, one per row."""
    if value(node).dim() != 2 or value(node).shape[-1] != 1:
        return None
    while node.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten._to_copy.default,
                          aten.to.dtype, aten.clone.default):  # fmt: skip
        node = node.args[0]  # type: ignore[assignment]
    read = indexed(node)
    if read is None:
        return None
    mask = link.token.mask
    places = {dim: Rows(mask, i) for i, dim in enumerate(mask.dims)}
    gates, indices = read[0], value(mask.indices)
    if not all(map(same_size, value(gates).shape, indices.shape)) or value(gates).dim() != indices.dim():
        return None
    return gates if _same(read[1], [places[d] for d in ("t", "s") if d in places]) else None
