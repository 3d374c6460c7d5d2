"""Matches the GEMMs of an expert, rows times its own weight and its bias, as linears and products with a part of a
stack, or as parts of contractions with the weights of all experts, or with each row's own copy; and what leaves such
rows as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.size_checks import same_value
from megacpp_compile.fx.views import COPIES
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.low_rank import match_adapted
from megacpp_compile.matchers.moe.gate_matrix import RouteAxes
from megacpp_compile.matchers.views import is_cast, is_outer_view
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.factors import (
    Axis,
    Dims,
    Factor,
    beneath,
    broadcast,
    factors,
    factors_of,
    is_one,
    longer_dims,
    seen_as,
    step_into,
)
from megacpp_compile.reader.index_reads import row_read
from megacpp_compile.reader.links import chain, through
from megacpp_compile.reader.parts import part_of
from megacpp_compile.reader.products import contraction

_READS = (aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.select.int,
          aten.repeat_interleave.self_Tensor)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight [out, in], or [in, out] if `transposed`.

    Attributes:
        tensor: the weight itself, or with `index` or `every` a tensor that holds one for each expert.
        index: this expert's place in `tensor`.
        every: whether this stands for the weights of all experts, of which each row takes one.
    """

    tensor: Node
    transposed: bool = False
    index: int | None = None
    every: bool = False


@dataclasses.dataclass(frozen=True)
class Gemm:
    """`node = x @ weight.T + bias` over rows; the bias, if there is one, is a vector for each expert.

    rounded: the dtype of the product, where a wide bias makes `node` wider.
    """

    node: Node
    x: Node
    weight: Weight
    bias: Weight | None = None
    rounded: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the product is rounded to."""
        return self.rounded or value(self.node).dtype

    @property
    def parameters(self) -> tuple[Weight, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


_LOW_RANK = (
    "an expert's projection has a low-rank path beside it (LoRA), which the op does not compute: add the weights, "
    "`w + s * (b @ a)`, or leave experts without adapters"
)
MatchGemm = Callable[[Node], Gemm | MatchFailure | None]


def match_linear_gemm(node: Node) -> Gemm | MatchFailure | None:
    """The GEMM of rows with one expert's own weight that `node` computes."""
    return with_bias(node, _linear_gemm, _own_bias)


@or_failure
def with_bias(
    node: Node, match_gemm: MatchGemm, match_bias: Callable[[Node, Node], Weight | None]
) -> Gemm | MatchFailure | None:
    """The GEMM that `match_gemm` finds at `node`, or the sum of one and of biases, which `match_bias` finds in an
    operand of that sum."""
    found = match_gemm(node)
    if found is None and (adapted := match_adapted(node, vectors=True)) is not None and adapted.paths:
        return MatchFailure(node, "low-rank", _LOW_RANK)
    if found is not None or node.target is not aten.add.Tensor or node.kwargs or not of_tensors(node):
        return found
    for rows, other in (node.args, node.args[::-1]):
        gemm = match_gemm(strip_row_views(rows))  # type: ignore[arg-type]
        if not isinstance(gemm, Gemm) or gemm.bias is not None:
            continue
        refuse_if(not adds_up(gemm.node, node), node, "bias", "an expert's bias is wider than what it is added to")
        bias = match_bias(other, node)  # type: ignore[arg-type]
        if bias is not None:
            return dataclasses.replace(gemm, node=node, bias=bias, rounded=gemm.dtype)
        outer = value(other).shape[:-1]
        repeated = len(outer) < len(value(node).shape) - 1 or any(isinstance(n, int) and n == 1 for n in outer)
        repeated = repeated or strip_row_views(other).target in _READS  # type: ignore[arg-type]
        refuse_if(repeated, node, "bias", "what is added to an expert's projection is no bias of its own")
    return None


def adds_up(product: Node, summed: Node) -> bool:
    """Whether an op of experts has sums such as `summed` of a GEMM `product` and a bias: in the dtype of the product,
    or of a product in 16 bits in float32, as autocast leaves biases."""
    return value(summed).dtype in (value(product).dtype, compute_dtype(value(product)))


@or_none
def _own_bias(node: Node, rows: Node) -> Weight | None:
    """The bias [n] of one expert that `node`, [n] or [1, n], is, where it is added to `rows`."""
    NoMatch.when(value(node).dim() == 0)
    *outer, width = value(node).shape
    NoMatch.when(not same_size(width, value(rows).shape[-1]) or not all(isinstance(n, int) and n == 1 for n in outer))
    node = through(node, is_cast, COPIES, lambda n: is_outer_view(n) and n.target is not aten.slice.Tensor)
    part = _part_of_stack(node, 2)
    return part or (Weight(node) if value(node).dim() == 1 else None)


def _part_of_stack(node: Node, dims: int) -> Weight | None:
    """One entry of a tensor with `dims` dimensions, the first of which the experts are."""
    part = part_of(node)
    if part is None or part.kept or part.dim != 0 or value(part.source).dim() != dims:
        return None
    known = isinstance(part.start, int) and isinstance(part.whole, int)
    return Weight(part.source, index=part.start) if known else None


@or_none
def _linear_gemm(node: Node) -> Gemm | None:
    found = NoMatch.unless(match_linear(node))
    *views, w = chain(found.w, is_cast, COPIES, _transposes)
    transposed = found.transposed != (sum(map(_transposes, views)) % 2 == 1)
    part = _part_of_stack(w, 3)
    weight = Weight(w, transposed) if part is None else dataclasses.replace(part, transposed=transposed)
    if found.b is None:
        return Gemm(node, found.x, weight)
    bias = _own_bias(found.b, node)
    return None if bias is None else Gemm(node, found.x, weight, bias)


def _transposes(w: Node) -> bool:
    return permutation(w) == [1, 0]


def strip_row_views(node: Node) -> Node:
    """What `node` is a cast of, or a view that leaves rows and channels as they are."""
    return through(node, is_cast, lambda n: is_outer_view(n) and _rows_kept(n), _unsqueezed_again)


def _unsqueezed_again(node: Node) -> Node | None:
    """What `node` is with a dimension more and less, as what is written in place to a view of a product goes."""
    if node.target is not aten.squeeze.dim or node.args[0].target is not aten.unsqueeze.default:  # type: ignore[union-attr]
        return None
    source, added = node.args[0].args  # type: ignore[union-attr]
    dims = value(source).dim() + 1
    return source if added % dims == node.args[1] % dims else None  # type: ignore[operator, return-value]


def _rows_kept(view: Node) -> bool:
    """Whether `view` reads rows [.., R, d] with at most one dimension larger than 1: it cannot reorder them."""
    return sum(not (isinstance(n, int) and n == 1) for n in value(view.args[0]).shape[:-1]) <= 1


def copies_of(factor: Factor) -> tuple[Node, Node, Dims] | None:
    """(all weights, which one each row takes, dimensions) where `factor` holds one weight for every row."""
    for node, dims in beneath(factor):
        read = row_read(node)
        if read is not None and value(read[0]).dim() == 3:
            return *read, dims
    return None


def is_biased_product(node: Node) -> bool:
    """Whether `node` is a batched product that something is added to in one op."""
    return node.target is aten.baddbmm.default and len(node.args) == 3 and not node.kwargs


def product_of(node: Node, dims: Dims) -> list[Factor]:
    """The two that `is_biased_product` multiplies, with a new axis for what they are summed over; none of another."""
    product = contraction(node) if is_biased_product(node) else None
    return [Factor(n, d, node) for n, d in factors_of(product, dims)] if product is not None else []


class StackedGemms:
    """Matches GEMMs of rows with the weights of all experts, or with those of each row's own expert.

    Attributes:
        ids: the choices that the GEMMs so far go by; None before the first, and where `every` expert works.
        mixed: the first weight that goes by other choices.
        gate: what multiplies what experts read.
        again: whether choices may be computed anew for each GEMM, as `indices[:, 0]` is.
    """

    def __init__(self, axes: RouteAxes, rows: list[tuple[Axis, ...]], again: bool = False) -> None:
        self.axes, self.dims, self.again = axes, rows, again
        self.ids: Node | None = None
        self.every = False
        self.mixed: Node | None = None
        self.gate: Factor | None = None

    def __call__(self, node: Node) -> Gemm | MatchFailure | None:
        if is_biased_product(node):
            gemm, bias = self._gemm(node), self._added(node.args[0], node)  # type: ignore[arg-type]
            return None if gemm is None or bias is None else dataclasses.replace(gemm, bias=bias)
        return with_bias(node, self._gemm, self._added)

    def _dims(self, node: Node, channels: Axis) -> Dims | None:
        """The dimensions of rows `node` with `channels`."""
        rows, outer = iter(self.dims), value(node).shape[:-1]
        if sum(not is_one(n) for n in outer) != len(self.dims):
            return None
        return (*(() if is_one(n) else next(rows) for n in outer), (channels,))

    def _added(self, node: Node, rows: Node) -> Weight | None:
        """The biases that `node`, added to `rows`, is."""
        channels = Axis(value(rows).shape[-1])
        dims = self._dims(rows, channels)
        return None if dims is None else self.bias(Factor(node, broadcast(node, dims), rows), channels)

    def bias(self, factor: Factor, channels: Axis) -> Weight | None:
        """The biases [E, channels] of all experts that `factor`, or of which every slot's own it is."""
        for node, dims in beneath(factor):
            read = row_read(node)
            if read is not None and value(read[0]).dim() == 2:
                if longer_dims(dims) in map(longer_dims, self.axes.slots((channels,))):
                    self._goes_by(node, read[1])
                    return Weight(read[0], every=True)
        if not self.axes.routes or factor.axes != {*self.axes.routes, channels} or self.ids is not None:
            return None
        seen = seen_as(factor, (self.axes.routes, (channels,)))
        return None if seen is None else Weight(seen[0], every=True)

    @or_none
    def _gemm(self, node: Node) -> Gemm | None:
        channels = Axis(value(node).shape[-1])
        dims = NoMatch.unless(self._dims(node, channels))
        mixed = {*self.axes.both, channels}
        parts = product_of(node, dims) or factors(node, dims, lambda axes: axes >= mixed)
        weights = [p for p in parts if channels in p.axes]
        NoMatch.when(len(parts) != 2 or len(weights) != 1)
        (x,) = (p for p in parts if p is not weights[0])
        inner = x.axes - self.axes.both
        NoMatch.when(len(inner) != 1)
        source = seen_as(self._unscaled(x, *inner), *self.axes.rows(tuple(inner)))
        weight = self.weight(weights[0], channels, *inner)
        return Gemm(node, source[0], weight) if source is not None and weight is not None else None

    def _unscaled(self, x: Factor, channels: Axis) -> Factor:
        """`x` before it is multiplied by gates, which become `self.gate`."""
        *_, (node, dims) = beneath(x)
        # The one choice of a token cannot be told from the token: what is multiplied there may be a norm's.
        below = step_into(node, dims) if self.axes.routes and node.target is aten.mul.Tensor else None
        for rows, gate in (below, below[::-1]) if below else ():
            scale = Factor(*gate, node)
            if channels not in scale.axes and scale.axes == self.axes.both:
                if self.gate is None or self.gate.node is scale.node:
                    self.gate = self.gate or scale
                    return Factor(*rows, node)
        return x

    def weight(self, factor: Factor, out: Axis, inner: Axis) -> Weight | None:
        """The weights [.., out, inner] of all experts, or of every slot's own expert, that `factor` is."""
        ends = ((out,), (inner,)), ((inner,), (out,))
        copies = copies_of(factor)
        of_all = self.axes.routes and factor.axes == {*self.axes.routes, out, inner}
        if of_all and (copies is None or self.axes.tokens):
            seen = seen_as(factor, *((self.axes.routes, *end) for end in ends))
            if seen is None or value(seen[0]).dim() != 3:
                return None
            self._goes_by(factor.node, None)
            return Weight(seen[0], bool(seen[1]), every=True)
        if copies is None:
            return None
        tensor, ids, dims = copies
        for transposed, end in enumerate(ends):
            if longer_dims(dims) in map(longer_dims, self.axes.slots(*end)):
                self._goes_by(factor.node, ids)
                return Weight(tensor, bool(transposed), every=True)
        return None

    def _goes_by(self, node: Node, ids: Node | None) -> None:
        if self.ids is None and not self.every:
            self.ids, self.every = ids, ids is None
        elif ids is not self.ids and not (self.again and same_value(ids, self.ids)):
            self.mixed = node
