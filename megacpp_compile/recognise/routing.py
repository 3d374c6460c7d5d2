"""Which rows go to which expert: `nonzero` of a mask over (token, choice), and reads by what it found.

A mask is `indices == e`, or one entry of a one-hot of the indices, with its dimensions in any order.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.graph_edit import same_size, value
from megacpp_compile.recognise.views import RESHAPES, is_cast

aten = torch.ops.aten
_COPIES = (aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default)


@dataclasses.dataclass(frozen=True)
class Mask:
    """Where `indices` [T, k] (or [T]) is `expert`. `dims`: what each dimension runs over: "t" tokens, "s" a token's
    choices, "e" all experts (then `expert` is None)."""

    indices: Node
    dims: tuple[str, ...]
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one expert, as the tuple of index tensors `nonzero` gives; `column`: which of them a node is."""

    mask: Mask
    column: int

    @property
    def dim(self) -> str:
        return self.mask.dims[self.column]


def match_mask(node: Node) -> Mask | None:
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None
    target, args = node.target, node.args
    if target is aten.eq.Scalar and isinstance(args[1], int):
        inner = match_mask(args[0])  # type: ignore[arg-type]
        if inner is not None:  # one-hot == 1
            return inner if args[1] == 1 else None
        dims = {1: ("t",), 2: ("t", "s")}.get(value(args[0]).dim())
        return Mask(_plain(args[0]), dims, args[1]) if dims and _integer(args[0]) else None  # type: ignore[arg-type]
    if target is aten.one_hot.default:
        dims = {1: ("t", "e"), 2: ("t", "s", "e")}.get(value(args[0]).dim())
        return Mask(_plain(args[0]), dims) if dims else None  # type: ignore[arg-type]
    if target is aten.eq.Tensor:
        return _compared(node)
    inner = match_mask(args[0]) if args and isinstance(args[0], Node) else None
    if inner is None:
        return None
    n = len(inner.dims)
    if target in _COPIES or target in (aten._to_copy.default, aten.to.dtype):
        return inner
    if target in (aten.ne.Scalar, aten.gt.Scalar) and args[1] == 0 and args[1] is not False:
        return inner
    if target is aten.permute.default:
        return dataclasses.replace(inner, dims=tuple(inner.dims[d] for d in args[1]))  # type: ignore[union-attr, misc]
    if target in (aten.transpose.int, aten.t.default, aten.numpy_T.default):
        dims_list = list(inner.dims)
        a, b = args[1:3] if target is aten.transpose.int else (0, n - 1)
        dims_list[a], dims_list[b] = dims_list[b], dims_list[a]  # type: ignore[index]
        return dataclasses.replace(inner, dims=tuple(dims_list))
    if target is aten.select.int and inner.expert is None:
        dim, index = args[1] % n, args[2]  # type: ignore[operator]
        total = value(args[0]).shape[dim]
        if inner.dims[dim] == "e" and isinstance(index, int) and isinstance(total, int):
            rest = inner.dims[:dim] + inner.dims[dim + 1 :]
            return Mask(inner.indices, rest, index % total)
    return None


def _compared(node: Node) -> Mask | None:
    """`indices[..., None] == arange(E)`."""
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    for ix, numbers in ((a, b), (b, a)):
        if numbers.target is aten.arange.default and len(numbers.args) == 1 and ix.target is aten.unsqueeze.default:
            source = ix.args[0]
            n = value(source).dim()
            if n in (1, 2) and ix.args[1] % (n + 1) == n and _integer(source):  # type: ignore[operator]
                return Mask(_plain(source), ("t", "s", "e") if n == 2 else ("t", "e"))  # type: ignore[arg-type]
    return None


def _plain(node: Node) -> Node:
    while node.target in _COPIES or (
        node.target in (aten._to_copy.default, aten.to.dtype) and _integer(node) and _integer(node.args[0])
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _integer(node: Any) -> bool:
    return value(node).dtype in (torch.int64, torch.int32)


def match_rows(node: Node) -> Rows | None:
    """One of the index tensors that say where a mask is true."""
    if node.target in (aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.reshape.default):
        inner = node.args[0]
        if isinstance(inner, Node) and inner.target is aten.nonzero.default and value(inner).dim() == 2:
            mask = match_mask(inner.args[0])  # type: ignore[arg-type]
            if mask is not None and len(mask.dims) == 1 and value(node).dim() == 1:
                return Rows(mask, 0)
        return None
    if node.target is aten.select.int and node.args[1] in (1, -1):
        found, column = node.args[0], node.args[2]
        targets: tuple[Any, ...] = (aten.nonzero.default,)
    elif node.target is operator.getitem:
        found, column = node.args
        targets = (aten.where.default, aten.nonzero_numpy.default)
        if isinstance(found, Node) and found.target is aten.unbind.int and [*found.args, 0][1] in (1, -1):
            found, targets = found.args[0], (aten.nonzero.default,)
    else:
        return None
    if not isinstance(found, Node) or found.target not in targets or not isinstance(column, int):
        return None
    mask = match_mask(found.args[0])  # type: ignore[arg-type]
    if mask is None or mask.expert is None:
        return None
    return Rows(mask, column % len(mask.dims))


def indexed(node: Node) -> tuple[Node, list[Any], Any] | None:
    """(tensor, its leading indices, what is left to say) of a read by index tensors: `t[i, j]`, `t[None, i]`,
    `t[i, j, None]`, `index_select`, `embedding`. A new dimension in the read is left out of it."""
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[0], [node.args[2]], None  # type: ignore[return-value]
    if node.target is aten.embedding.default and len(node.args) == 2:
        return node.args[0], [node.args[1]], None  # type: ignore[return-value]
    if node.target is not aten.index.Tensor:
        return None
    tensor, indices = node.args
    positions = list(indices)  # type: ignore[arg-type]
    if tensor.target is aten.unsqueeze.default:  # type: ignore[union-attr]
        source = tensor.args[0]  # type: ignore[union-attr]
        at = tensor.args[1] % (value(source).dim() + 1)  # type: ignore[union-attr, operator]
        if at < len(positions):
            if positions[at] is not None:
                return None
            del positions[at]
        tensor = source
    if not positions or any(p is None for p in positions):
        return None
    return tensor, positions, None  # type: ignore[return-value]


def distinct_choices(indices: Node) -> bool:
    """Whether no token can have one expert twice: its choices are the places of `topk`."""
    node = indices
    while is_cast(node) or node.target in _COPIES or node.target in (aten._to_copy.default, aten.to.dtype):
        node = node.args[0]  # type: ignore[assignment]
    while node.target in RESHAPES and same_size(value(node).shape[-1], value(node.args[0]).shape[-1]):
        node = node.args[0]  # type: ignore[assignment]
    if value(indices).dim() == 1:
        return True
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    top = node.args[0]
    last = value(top.args[0]).dim() - 1  # type: ignore[union-attr]
    dim = [*top.args, -1][2] if len(top.args) > 2 else -1  # type: ignore[union-attr]
    return top.target is aten.topk.default and dim in (-1, last)  # type: ignore[union-attr]


def chosen(ids: Node) -> bool:
    """Whether `ids` are surely no less than 0: clamped, or places that `topk`, `argmax` or `sort` found."""
    while True:
        if ids.target in (aten.clamp.default, aten.clamp_min.default):
            return isinstance(ids.args[1], int) and ids.args[1] >= 0
        if ids.target in _COPIES or ids.target in RESHAPES or ids.target in (aten._to_copy.default, aten.to.dtype):
            ids = ids.args[0]  # type: ignore[assignment]
        elif ids.target is operator.getitem and ids.args[1] == 1:
            return ids.args[0].target in (aten.topk.default, aten.sort.default, aten.max.dim)  # type: ignore[union-attr]
        else:
            return ids.target in (aten.argmax.default, aten.argsort.default)
