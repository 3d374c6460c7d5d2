"""An operand's dimensions in the order, and merged as, an op asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.size_nodes import size_node
from megacpp_compile.lowerings._kernels.gated_chunks import CHUNK_SIZES
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.ssd.atoms import length
from megacpp_compile.matchers.ssd.scan import Leaf
from megacpp_compile.passes._rule import Match, in_other_modes

Groups = Sequence[tuple[Any, ...]]


def gated_chunk_size(model: int) -> int:
    """The model's, as one that the ops with gates take; it is free, as it decides only how they are computed."""
    return next((size for size in CHUNK_SIZES if 0 < model <= size), CHUNK_SIZES[-1])


def leading(leaves: Sequence[Leaf], heads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The atoms of `heads` that `leaves` differ in, if those lead: one group for each; else all heads."""
    own = {a for leaf in leaves for d in leaf.dims for a in d}
    first = heads[: sum(a in own for a in heads)]
    return first if set(first) == own & set(heads) else heads


def arrange(build: Builder, leaf: Leaf | tuple[Node, Groups], target: Groups) -> Node:
    """`leaf` with the dimensions of `target`, repeated where it lacks an atom; views wherever they will do."""
    node, given = (leaf.node, leaf.dims) if isinstance(leaf, Leaf) else leaf
    wanted = [tuple(g) for g in target]
    if list(given) == wanted:
        return node
    node = build.squeezed(node, [i for i, d in enumerate(given) if not d])
    dims = [d for d in given if d]
    # Whole dimensions stay whole; the others are taken apart.
    have: list[tuple[Any, ...]] = []
    for d in dims:
        if len(d) == 1 or any(_tokens(g, [d]) for g in wanted):
            have.append(d)
        else:
            node = build(aten.unflatten.int, node, len(have), _sizes(build, d))
            have += [(a,) for a in d]
    parts = [_tokens(g, have) or [(a,) for a in g] for g in wanted]
    order = [part for group in parts for part in group]
    node = build.permuted(node, [have.index(part) for part in order if part in have])
    missing = [i for i, part in enumerate(order) if part not in have]
    if missing:
        node = build.unsqueezed(node, missing)
        sizes = [-1 if part in have else size_node(build, length([*part])) for part in order]
        node = build(aten.expand.default, node, sizes)
    at = 0
    for group in parts:
        if not group:
            node = build(aten.unsqueeze.default, node, at)
        elif len(group) > 1:
            node = build(aten.flatten.using_ints, node, at, at + len(group) - 1)
        at += 1
    return node


@or_failure
def recurrence(
    view: GraphView, operands: Iterable[Leaf | None], inside: Iterable[Node], result: Leaf, states: Sequence[Leaf],
    emit: Callable[[Builder], tuple[Node, Groups, Groups]], note: str = "",
) -> Match | MatchFailure:  # fmt: skip
    """The match of a recurrence that all of `inside` computes under one mode. emit: makes its op; returns that, and the
    dimensions of its first output, which `result` is, and of its second, which `states` are."""
    or_refuse(in_other_modes(view, sorted(inside), result.node))

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        node, dims, of_state = emit(build)
        return node, results(build, node, result, dims, states, of_state)

    inputs = list(dict.fromkeys(leaf.node for leaf in operands if leaf is not None))
    return Match(result.node, inputs, [leaf.node for leaf in (result, *states)], rewrite, note=note)


def results(
    build: Builder, node: Node, result: Leaf, dims: Groups, states: Sequence[Leaf], of_state: Groups
) -> list[Node]:
    """What carries `result` and each of `states`, in dimensions and dtype as plain code has them: `node`'s first output
    has dimensions `dims`, its second, the last state, `of_state`."""
    made = [arrange(build, (build.item(node, 0), dims), result.dims)]
    for final in states:
        state = build.cast(build.item(node, 1), value(final.node).dtype)
        made.append(arrange(build, (state, of_state), final.dims))
    return made


def _tokens(group: tuple[Any, ...], dims: Groups) -> Groups | None:
    """`group` as a sequence of single atoms and of `dims`, at least one of these; None where it is not."""
    out: list[tuple[Any, ...]] = []
    at, whole = 0, False
    while at < len(group):
        dim = next((d for d in dims if d == group[at : at + len(d)]), (group[at],))
        whole |= dim in dims
        out.append(dim)
        at += len(dim)
    return out if whole else None


def _sizes(build: Builder, dim: tuple[Any, ...]) -> list[Any]:
    """Of the atoms of a dimension that is taken apart; -1 for the first symbolic one, which the others leave."""
    sizes = [a.size for a in dim]
    free = next((i for i, n in enumerate(sizes) if not isinstance(n, int)), None)
    return [-1 if i == free else size_node(build, n) for i, n in enumerate(sizes)]
