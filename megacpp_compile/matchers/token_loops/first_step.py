"""A first step that no state enters, as where states begin as the number 0 or as `None`: what is left of a step where
the state that enters it is 0.

Of 0, products, sums, views and contractions are 0, and a sum with 0 is its other operand. A first step is general if it
is the second one with what is 0 left out, and but for casts: the sum with a state of float32 may be what makes a first
product float32. (A decay of infinity times 0, which eager makes NaN, is 0 here.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_shape, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import EXPANSIONS, REPETITIONS, SAME_VALUES, is_cast
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, VIEWS
from megacpp_compile.reader.links import through

_PRODUCTS = CONTRACTIONS | {aten.mul.Tensor, aten.mul.Scalar}
_OF_THE_FIRST = (
    VIEWS | SAME_VALUES | EXPANSIONS | REPETITIONS
    | {aten.neg.default, aten.sum.dim_IntList, aten.sum.default, aten.div.Tensor, aten.div.Scalar}
)  # fmt: skip
_SUMS = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar}


class Zeros:
    """Which values of one step are 0 where `seeds` are, and what sums with them are.

    step: the nodes that are made of a token, and which; any other is followed through views alone.
    """

    def __init__(self, step: Mapping[Node, int], reads: Iterable[Node], seeds: Iterable[Node] = ()) -> None:
        self.step, self.stops = step, set(reads)
        self.known: dict[Node, bool] = dict.fromkeys(seeds, True)

    def zero(self, n: Any) -> bool:
        """Whether `n`, a tensor or a number, is 0."""
        if not isinstance(n, Node):
            return isinstance(n, int | float) and n == 0
        if n not in self.known:
            self.known[n] = False if n in self.stops or n.op != "call_function" else self._made_zero(n)
        return self.known[n]

    def _made_zero(self, n: Node) -> bool:
        if is_filled(n, 0.0):
            return True
        if n.target in _OF_THE_FIRST:
            return self.zero(n.args[0])
        if n not in self.step:
            return n.target in _PRODUCTS and not isinstance(n.args[1], Node) and self.zero(n.args[1])
        if n.target in _PRODUCTS:
            operands = [b for a in n.args for b in (a if isinstance(a, list | tuple) else [a])]
            return any(map(self.zero, operands))
        return n.target in _SUMS and all(map(self.zero, n.args[:2]))

    def left(self, n: Node) -> Node:
        """`n` without what is 0 in sums, and without casts: a value of the same elements."""
        return through(n, self._kept)  # type: ignore[no-any-return]

    def _kept(self, n: Node) -> Node | None:
        if n not in self.step or n in self.stops or not (n.target in _SUMS or is_cast(n)):
            return None
        one, other = [*n.args, None][:2]
        kept, factor = None, 1
        if is_cast(n) or self.zero(other):
            kept = one
        elif self.zero(one) and n.target in (aten.add.Tensor, aten.add.Scalar):
            kept, factor = other, n.kwargs.get("alpha", 1)
        return kept if isinstance(kept, Node) and factor == 1 and same_sizes(kept, n) else None


def same_sizes(a: Node, b: Node) -> bool:
    """Whether both are floating-point tensors of the same sizes."""
    both = all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (value(a), value(b)))
    return both and same_shape(a, b)
