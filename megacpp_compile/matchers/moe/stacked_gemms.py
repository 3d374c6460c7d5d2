"""Matches an expert's GEMMs as parts of contractions: with the weights of all experts, or with each row's own copy."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.size_checks import same_value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.factors import (
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
from megacpp_compile.matchers.moe.gemms import Gemm, Weight, with_bias
from megacpp_compile.matchers.moe.index_reads import indexed
from megacpp_compile.matchers.moe.route_axes import RouteAxes
from megacpp_compile.reader.products import contraction

aten = torch.ops.aten


def copies_of(factor: Factor) -> tuple[Node, Node, Dims] | None:
    """(all weights, which one each row takes, dimensions) where `factor` holds one weight for every row."""
    for node, dims in beneath(factor):
        read = indexed(node)
        if read is not None and len(read[1]) == 1 and isinstance(read[1][0], Node) and value(read[0]).dim() == 3:
            return read[0], read[1][0], dims
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
            read = indexed(node)
            if read is not None and len(read[1]) == 1 and value(read[0]).dim() == 2:
                if longer_dims(dims) in map(longer_dims, self.axes.slots((channels,))):
                    self._goes_by(node, read[1][0])
                    return Weight(read[0], every=True)
        if not self.axes.routes or factor.axes != {*self.axes.routes, channels} or self.ids is not None:
            return None
        seen = seen_as(factor, (self.axes.routes, (channels,)))
        return None if seen is None else Weight(seen[0], every=True)

    def _gemm(self, node: Node) -> Gemm | None:
        channels = Axis(value(node).shape[-1])
        dims = self._dims(node, channels)
        if dims is None:
            return None
        mixed = {*self.axes.both, channels}
        parts = product_of(node, dims) or factors(node, dims, lambda axes: axes >= mixed)
        weights = [p for p in parts if channels in p.axes]
        if len(parts) != 2 or len(weights) != 1:
            return None
        (x,) = (p for p in parts if p is not weights[0])
        inner = x.axes - self.axes.both
        if len(inner) != 1:
            return None
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
