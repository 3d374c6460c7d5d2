"""Matches the GEMMs of an expert, rows times its own weight and its bias, as linears and products with a part of a
stack; and what leaves such rows as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import COPIES
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.low_rank import match_adapted
from megacpp_compile.matchers.views import is_cast, is_outer_view
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.links import chain, through
from megacpp_compile.reader.parts import part_of

aten = torch.ops.aten
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
        if not adds_up(gemm.node, node):
            return MatchFailure(node, "bias", "an expert's bias is wider than what it is added to")
        bias = match_bias(other, node)  # type: ignore[arg-type]
        if bias is not None:
            return dataclasses.replace(gemm, node=node, bias=bias, rounded=gemm.dtype)
        outer = value(other).shape[:-1]
        repeated = len(outer) < len(value(node).shape) - 1 or any(isinstance(n, int) and n == 1 for n in outer)
        if repeated or strip_row_views(other).target in _READS:  # type: ignore[arg-type]
            return MatchFailure(node, "bias", "what is added to an expert's projection is no bias of its own")
    return None


def adds_up(product: Node, summed: Node) -> bool:
    """Whether an op of experts has sums such as `summed` of a GEMM `product` and a bias: in the dtype of the product,
    or of a product in 16 bits in float32, as autocast leaves biases."""
    return value(summed).dtype in (value(product).dtype, compute_dtype(value(product)))


def _own_bias(node: Node, rows: Node) -> Weight | None:
    """The bias [n] of one expert that `node`, [n] or [1, n], is, where it is added to `rows`."""
    if value(node).dim() == 0:
        return None
    *outer, width = value(node).shape
    if not same_size(width, value(rows).shape[-1]) or not all(isinstance(n, int) and n == 1 for n in outer):
        return None
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


def _linear_gemm(node: Node) -> Gemm | None:
    found = match_linear(node)
    if found is None:
        return None
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
