"""Heads, or groups of heads, that a loop computes one after another, as one attention.

What they read is passed as a whole where it is all its pieces, in order, and stacked where not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers.softmax_attention.conditions import Hidden
from megacpp_compile.matchers.softmax_attention.parts import Groups, grouped
from megacpp_compile.matchers.softmax_attention.pieces import pieces_of
from megacpp_compile.matchers.softmax_attention.whole import Site, Whole
from megacpp_compile.matchers.ssd.atoms import fresh, length
from megacpp_compile.matchers.ssd.packed import alike


class Heads(Whole):
    """Parts that are heads, or groups of heads. Keys that serve several parts in a row are passed once."""

    def __init__(self, join: Node, sites: Sequence[Site], ends: Sequence[Groups]) -> None:
        super().__init__(join, sites, ends)
        self.require(all(end == self.ends[0] for end in self.ends))
        n, own = len(sites), [[uncast(f.values.node) for f in self.founds]]
        own += [[uncast(f.scores.products[i][1].node) for f in self.founds]
                for i in range(len(self.founds[0].scores.products))]  # fmt: skip
        self.run = next(r for r in range(n, 0, -1) if n % r == 0 and all(_in_runs(nodes, r) for nodes in own))
        self.groups, self.each = (tuple(fresh(m)) for m in (n // self.run, self.run))

    def slot(self, nodes: Sequence[Node], dims: Sequence[Groups], shared: bool = False) -> tuple[Node, Groups]:
        own = [self.translated(n, d) for n, d in enumerate(dims)]
        self.require(all(d == own[0] for d in own) and all(same_shape(n, nodes[0]) for n in nodes))
        if _in_runs(nodes, len(nodes)):
            return nodes[0], own[0]
        atoms = (*self.groups, *self.each)
        if shared and self.groups and _in_runs(nodes, self.run):
            nodes, atoms = nodes[:: self.run], self.groups
        for piece in pieces_of(nodes[0], own[0]):
            if (dim := _counted(piece.node, [pieces_of(n, own[0]) for n in nodes])) is not None:
                rest = piece.dims[dim]
                return piece.node, (*piece.dims[:dim], (*atoms, *rest), *piece.dims[dim + 1 :])
        nodes, of_each = _bases(nodes, own[0])
        return self.made_of(lambda call, parts: call(aten.stack.default, parts), nodes), (atoms, *of_each)

    def documents(self) -> tuple[Hidden, ...]:
        found = super().documents()
        self.require(not set(self.groups + self.each) & {a for h in found for d in h.term.dims for a in d})
        return found

    def roles(self) -> dict[str, Any]:
        first, new, dims = self.founds[0], (*self.groups, *self.each), self.ends[0]
        dim: Any = self.join.args[1] if len(self.join.args) > 1 else 0
        dim %= value(self.join).dim()
        stacked = self.join.target is aten.stack.default
        result = (*dims[:dim], new, *dims[dim:]) if stacked else (*dims[:dim], new + dims[dim], *dims[dim + 1 :])
        groups = (*self.groups, *first.groups)
        heads = (*groups, *self.each, *first.heads[len(first.groups) :])
        return {"result_dims": grouped(result), "groups": groups, "heads": heads}


def _in_runs(nodes: Sequence[Node], length: int) -> bool:
    """Whether each so many `nodes` are one value."""
    return all(alike(n, nodes[i // length * length]) for i, n in enumerate(nodes))


def _bases(nodes: Sequence[Node], dims: Groups) -> tuple[Sequence[Node], Groups]:
    """What `nodes` are views of, and their dimensions, so that those of the last are the inner ones in memory."""
    for level in zip(*(reversed(pieces_of(n, dims)) for n in nodes), strict=False):
        if all(p.dims == level[0].dims and not any(s is not None for s in p.starts) for p in level):
            return [p.node for p in level], level[0].dims
    return nodes, dims


def _counted(base: Node, parts: Sequence[Any]) -> int | None:
    """The dimension of `base` of which each part in turn is the next piece, all of the same size."""
    found = [next((p for p in pieces if alike(p.node, base)), None) for pieces in parts]
    if any(p is None for p in found):
        return None
    cut = [[d for d, start in enumerate(p.starts) if start is not None] for p in found]  # type: ignore[union-attr]
    if any(len(c) != 1 or c != cut[0] for c in cut) or any(p.dims != found[0].dims for p in found):  # type: ignore[union-attr]
        return None
    dim, size = cut[0][0], value(base).shape[cut[0][0]]
    one = length([*found[0].dims[dim]])  # type: ignore[union-attr]
    in_order = all(p.starts[dim] == n * one for n, p in enumerate(found))  # type: ignore[union-attr]
    return dim if in_order and same_size(size, one * len(parts)) else None
