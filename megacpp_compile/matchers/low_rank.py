"""A linear with low-rank paths beside it: `W x + s * B (A x)`, as LoRA trains it (arXiv:2106.09685, 4.1).

The matcher flattens the sum, through casts and numbers. One term is the linear; every other one is a product of two
linears whose rank is smaller than what goes in and what comes out. What `A` reads may be anything, such as x behind
dropout.

VeRA (arXiv:2310.11454) scales a path's channels, too, between its weights and behind them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import SUMS_OF_TENSORS
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.views import is_cast, uncast
from megacpp_compile.matchers.linear import Linear, match_linear


@dataclasses.dataclass(frozen=True)
class LowRank:
    """One path beside the linear: `scale * up(down(x))`. numbers: further factors, known at run time only."""

    down: Linear
    up: Linear
    scale: float
    numbers: tuple[Node, ...]

    @property
    def inputs(self) -> list[Node]:
        of = (self.down.x, self.down.w, self.down.b, self.up.w, self.up.b)
        return [*(n for n in of if n is not None), *self.numbers]

    def scaled(self, build: Builder, node: Node) -> Node:
        """`node` times all that this path is multiplied by."""
        for number in (*([self.scale] if self.scale != 1.0 else []), *self.numbers):
            node = build(aten.mul.Tensor, node, number)
        return node


@dataclasses.dataclass(frozen=True)
class Adapted:
    """`node = linear + sum(paths)`, in the dtype of the linear or a wider one; `internal`: the sum in front of it."""

    node: Node
    linear: Linear
    paths: tuple[LowRank, ...]
    internal: frozenset[Node]


@or_none
def match_adapted(node: Node, vectors: bool = False) -> Adapted | None:
    """The linear that `node` computes, alone or with low-rank paths beside it, or None. vectors: paths may be
    multiplied by a number for each channel as well, which are among their `numbers`."""
    linear = match_linear(node)
    if linear is not None:
        return Adapted(node, linear, (), frozenset())
    internal: set[Node] = set()
    terms: list[Linear | LowRank] = []
    NoMatch.when(uncast(node).target not in SUMS_OF_TENSORS or not _flatten(node, terms, internal, node, vectors))
    bases = [t for t in terms if isinstance(t, Linear)]
    paths = tuple(t for t in terms if isinstance(t, LowRank))
    NoMatch.when(len(bases) != 1 or len(paths) + 1 != len(terms))
    own, dtype = value(bases[0].node).dtype, value(node).dtype
    # a sum in the linear's dtype that is cast behind it is a latent in front of that cast
    NoMatch.when(dtype != own and (is_cast(node) or torch.promote_types(own, dtype) != dtype))
    width, rank = bases[0].out_features, max(p.down.out_features for p in paths)
    NoMatch.when(rank >= min(width, value(bases[0].x).shape[-1]))
    NoMatch.when(any(value(p.up.node).shape != value(node).shape for p in paths))
    return Adapted(node, bases[0], paths, frozenset(internal - {node}))


def _flatten(
    node: object, terms: list[Linear | LowRank], internal: set[Node], top: Node, vectors: bool
) -> bool:
    """Collect the terms of a sum; False where one of them is no linear, or is read by something else."""
    if not isinstance(node, Node) or node is not top and len(node.users) != 1:
        return False
    internal.add(node)
    if is_cast(node):
        return _flatten(node.args[0], terms, internal, top, vectors)
    if node.target in SUMS_OF_TENSORS:
        alpha = node.kwargs.get("alpha", 1)
        if node.target is aten.sub.Tensor:
            if isinstance(alpha, Node):
                return False
            alpha = -alpha  # type: ignore[operator]
        if not _flatten(node.args[0], terms, internal, top, vectors):
            return False
        before = len(terms)
        if not _flatten(node.args[1], terms, internal, top, vectors):
            return False
        return alpha == 1 or _scale(terms, before, alpha)
    if (product := _factor(node, vectors)) is not None:
        before = len(terms)
        return _flatten(product[0], terms, internal, top, vectors) and _scale(terms, before, product[1])
    up = match_linear(node)
    if up is None:
        return False
    rows: set[Node] = set()
    step, factors = up.x, list[object]()
    while (below := _beneath(step, vectors)) is not None:
        rows.add(step)
        step, factor = below
        factors += [] if factor is None else [factor]
    down = match_linear(step)
    if down is None or not _narrow(down, up):
        terms.append(up)
        return True
    rows.add(step)
    internal |= rows
    terms.append(LowRank(down, up, 1.0, ()))
    once = all(len(row.users) == 1 for row in rows)  # else they are kept for something else, too
    return once and all(_scale(terms, len(terms) - 1, factor) for factor in factors)




def _beneath(node: Node, vectors: bool) -> tuple[Node, object] | None:
    """What `node` multiplies and by what, see `_factor`, or what it is a cast of and None."""
    return (node.args[0], None) if is_cast(node) else _factor(node, vectors)  # type: ignore[return-value]


def _factor(node: Node, vectors: bool) -> tuple[Node, object] | None:
    """(what `node` multiplies, the number or vector that it multiplies by), or None. A number that it divides by has to
    be written in the graph."""
    args: Any = node.args
    if node.target is aten.neg.default:
        return args[0], -1.0
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        if not isinstance(value(args[1]), torch.Tensor):
            return args[0], args[1]
        pairs = (args, args[::-1]) if vectors else ()
        return next(((a, b) for a, b in pairs if value(b).dim() == 1 < value(a).dim()), None)
    by = args[1] if node.target in (aten.div.Tensor, aten.div.Scalar) and not node.kwargs else None
    return (args[0], 1.0 / by) if isinstance(by, (int, float)) and by else None


def _narrow(down: Linear, up: Linear) -> bool:
    rank = down.out_features
    return isinstance(rank, int) and rank < min(up.out_features, value(down.x).shape[-1])


def _scale(terms: list[Linear | LowRank], first: int, by: object) -> bool:
    """Multiply the terms from `first` on by a number; False where one of them is not a low-rank path."""
    for i in range(first, len(terms)):
        path = terms[i]
        if not isinstance(path, LowRank):
            return False
        if isinstance(by, Node):
            terms[i] = dataclasses.replace(path, numbers=(*path.numbers, by))
        else:
            terms[i] = dataclasses.replace(path, scale=path.scale * float(by))  # type: ignore[arg-type]
    return True
