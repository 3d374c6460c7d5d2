"""From what an activation is of back to the linear layer that makes it: `scale * rows of the linear + base`.

On the way there are factors and terms that are the same for all tokens, numbers, casts, reshapes of what a token has,
slices of it, and perhaps the reciprocal root mean square of the streams, which a norm has in front of the linear.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import ADDITIONS, DIVISIONS, SCALINGS, SUBTRACTIONS
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.views import COPIES, FOLDS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.rms_norm import match_inverse_rms
from megacpp_compile.matchers.views import lane_slice

VIEWS = RESHAPES | FOLDS | UNIT_DIMS | COPIES


@dataclasses.dataclass(frozen=True)
class Constant:
    """A tensor or number that all tokens share: elements `start` to `start + size` of it, expanded to `shape`."""

    of: Node | float
    shape: tuple[int, ...]
    start: int
    size: int
    inverse: bool = False

    def vector(self, build: Builder, device: torch.device) -> Node:
        if not isinstance(self.of, Node):
            number = 1 / self.of if self.inverse else self.of
            return build(aten.full.default, [self.size], number, dtype=torch.float32, device=device)
        node = build.cast(self.of, torch.promote_types(value(self.of).dtype, torch.float32))
        drop = value(node).dim() - len(self.shape)
        if drop > 0:
            node = build(aten.reshape.default, node, [*value(node).shape[drop:]])
        if tuple(value(node).shape) != self.shape:
            node = build(aten.expand.default, node, [*self.shape])
        if len(self.shape) != 1:
            node = build(aten.reshape.default, node, [math.prod(self.shape)])
        if self.size != value(node).shape[0]:
            node = build(aten.slice.Tensor, node, 0, self.start, self.start + self.size)
        return build(aten.reciprocal.default, node) if self.inverse else node


@dataclasses.dataclass
class Affine:
    """`node = scale * rows of linear + base`: rows `start` to `start + size`.

    terms: a constant, and how many of `scales` multiply it. rms: (streams, eps) of a factor behind the linear, where
    that is the reciprocal root mean square.
    """

    linear: Linear
    start: int
    size: int
    scales: list[Constant]
    terms: list[tuple[Constant, int, float]]
    rms: tuple[Node, Any] | None

    def scale(self, build: Builder, device: torch.device, upto: int | None = None) -> Node:
        vectors = (constant.vector(build, device) for constant in self.scales[:upto])
        product = build.folded(aten.mul.Tensor, vectors)
        return product or build(aten.full.default, [self.size], 1.0, dtype=torch.float32, device=device)

    def base(self, build: Builder, device: torch.device) -> Node:
        def term(constant: Constant, scaled: int, sign: float) -> Node:
            vector = constant.vector(build, device)
            if scaled:
                vector = build(aten.mul.Tensor, vector, self.scale(build, device, scaled))
            return vector if sign == 1 else build(aten.mul.Scalar, vector, sign)

        total = build.folded(aten.add.Tensor, itertools.starmap(term, self.terms))
        return total or build(aten.full.default, [self.size], 0.0, dtype=torch.float32, device=device)

    @property
    def nodes(self) -> list[Node]:
        """What the constants are read from."""
        return [c.of for c in (*self.scales, *(c for c, _, _ in self.terms)) if isinstance(c.of, Node)]


class _Reader:
    """Follows one value down. tokens: how many leading dimensions are those of tokens."""

    def __init__(self, node: Node, tokens: int) -> None:
        self.tokens, self.lead = tokens, value(node).shape[:tokens]
        self.start, self.size = 0, math.prod(self._tail(node))
        self.scales: list[Constant] = []
        self.terms: list[tuple[Constant, int, float]] = []
        self.rms: tuple[Node, Any] | None = None

    def _tail(self, node: Node) -> tuple[int, ...]:
        return tuple(value(node).shape[self.tokens :])

    def regular(self, node: Any) -> bool:
        """Whether `node` has the tokens in front, and a known number of elements for each."""
        if not isinstance(node, Node) or not isinstance(value(node), torch.Tensor):
            return False
        shape = value(node).shape
        leads = len(shape) >= self.tokens and all(map(same_size, shape[: self.tokens], self.lead))
        return leads and all(isinstance(n, int) for n in shape[self.tokens :])

    @or_none
    def constant(self, given: Any, node: Node, inverse: bool = False) -> Constant | None:
        """What `given` is to the elements of a token in `node`; None where it is not the same for all tokens."""
        tail = self._tail(node)
        if not isinstance(given, Node) or not isinstance(value(given), torch.Tensor):
            number = number_of(given)
            return None if number is None or inverse and not number else Constant(
                number, tail, self.start, self.size, inverse)  # fmt: skip
        shape = value(given).shape
        extra = len(shape) - len(tail)
        NoMatch.when(not all(same_size(n, 1) for n in shape[: max(extra, 0)]))
        NoMatch.when(not all(n in (1, m) for n, m in zip(reversed(shape), reversed(tail), strict=False)))
        return Constant(given, tail, self.start, self.size, inverse)

    def step(self, node: Node) -> Node | None:
        """The value below `node`, or None."""
        t = node.target
        if is_cast(node) or t in VIEWS:
            return node.args[0]  # type: ignore[return-value]
        if (lanes := lane_slice(node)) is not None:
            base, start, _ = lanes
            if len(self._tail(node)) != 1:
                return None
            self.start += start
            return base
        if t in SCALINGS and not node.kwargs:
            return self._factor(node)
        if t in ADDITIONS | SUBTRACTIONS and not node.kwargs:
            return self._term(node)
        if t is aten.addcmul.default:
            return self._addcmul(node)
        return None

    def _factor(self, node: Node) -> Node | None:
        a, b = node.args[:2]
        for x, other in ((a, b), (b, a)):
            if other is a and node.target in DIVISIONS or not self.regular(x) or self._tail(x) != self._tail(node):  # type: ignore[arg-type]
                continue
            constant = self.constant(other, node, node.target in DIVISIONS)
            if constant is not None:
                self.scales.append(constant)
                return x  # type: ignore[return-value]
            if self._is_rms(other, node):
                return x  # type: ignore[return-value]
        return None

    def _is_rms(self, other: Any, node: Node) -> bool:
        if node.target is not aten.mul.Tensor or self.rms is not None or not self.regular(other):
            return False
        found = match_inverse_rms(other) if math.prod(self._tail(other)) == 1 else None
        if found is None:
            return False
        self.rms = found[:2]
        return True

    def _term(self, node: Node) -> Node | None:
        a, b = node.args[:2]
        sign = -1.0 if node.target in SUBTRACTIONS else 1.0
        for x, other in ((a, b), (b, a)):
            if other is a and sign < 0 or not self.regular(x) or self._tail(x) != self._tail(node):  # type: ignore[arg-type]
                continue
            constant = self.constant(other, node)
            if constant is not None and self.rms is None:
                self.terms.append((constant, len(self.scales), sign))
                return x  # type: ignore[return-value]
        return None

    def _addcmul(self, node: Node) -> Node | None:
        term, a, b = node.args[:3]
        constant = None if node.kwargs or self.rms is not None else self.constant(term, node)
        for x, other in ((a, b), (b, a)):
            scale = self.constant(other, node)
            if constant is not None and scale is not None and self.regular(x) and self._tail(x) == self._tail(node):  # type: ignore[arg-type]
                self.terms.append((constant, len(self.scales), 1.0))
                self.scales.append(scale)
                return x  # type: ignore[return-value]
        return None


def match_affine(node: Node, tokens: int) -> Affine | None:
    """What `node`, whose first `tokens` dimensions are those of tokens, is of a linear; None where it is not."""
    reader = _Reader(node, tokens)
    at: Node | None = node
    while at is not None and at.op == "call_function" and reader.regular(at):
        linear = match_linear(at)
        if linear is not None:
            if linear.b is not None:
                constant = reader.constant(linear.b, at)
                if constant is None or reader.rms is not None:
                    return None
                reader.terms.append((constant, len(reader.scales), 1.0))
            return Affine(linear, reader.start, reader.size, reader.scales, reader.terms, reader.rms)
        at = reader.step(at)
    return None
