"""Matches which rows go to which expert: `nonzero` of a mask over (token, choice), and reads by its result.

A mask is `indices == e`, or one entry of a one-hot of the indices, with its dimensions in any order.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import EXPANSIONS, PERMUTATIONS, REPETITIONS, UNIT_DIMS
from megacpp_compile.matchers.views import RESHAPES, is_cast

aten = torch.ops.aten
_COPIES = (aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default)
_SOME_OR_ALL = {
    *_COPIES, *RESHAPES, *UNIT_DIMS, *PERMUTATIONS, *EXPANSIONS, *REPETITIONS, aten.select.int, aten.slice.Tensor,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mask:
    """Where `indices` [T, k] (or [T]) is `expert`.

    Attributes:
        dims: what each dimension runs over: "t" tokens, "s" a token's choices, "e" all experts (then `expert` is None).
            Where tokens have several dimensions, they are "t", "u" and "v" until a reshape makes them one.
        choice: the one of a token's choices that is looked at, in a mask without "s".
        any: whether, in a mask without "s", any of a token's choices counts.
    """

    indices: Node
    dims: tuple[str, ...]
    expert: int | None = None
    choice: int | None = None
    any: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(d for d in self.dims if d in _TOKENS)

    @property
    def by_token(self) -> bool:
        """Whether the tokens' dimensions come first, all of them and in their order."""
        return bool(self.tokens) and self.dims[: len(self.tokens)] == tuple(_TOKENS[: len(self.tokens)])

    def flat(self) -> Mask:
        """The mask with one dimension for all tokens, in their order."""
        at = self.dims.index("t")
        rest = tuple(d for d in self.dims if d not in _TOKENS)
        return dataclasses.replace(self, dims=(*rest[:at], "t", *rest[at:]))


@dataclasses.dataclass(frozen=True)
class Rows:
    """One of the index tensors by which `nonzero` gives the rows of an expert: the one at `column`."""

    mask: Mask
    column: int

    @property
    def dim(self) -> str:
        return self.mask.dims[self.column]


def match_mask(node: Node) -> Mask | None:
    """The mask that `node` is."""
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None
    target, args = node.target, node.args
    if target is aten.eq.Scalar and isinstance(args[1], int):
        inner = match_mask(args[0])  # type: ignore[arg-type]
        if inner is not None:  # one-hot == 1
            return inner if args[1] == 1 else None
        dims = _dims(args[0])  # type: ignore[arg-type]
        if dims is None or not _integer(args[0]):
            return None
        indices, choice = one_choice(_plain(args[0]))  # type: ignore[arg-type]
        return Mask(indices, dims, args[1], choice)
    if target is aten.any.dim and len(args) == 2:
        inner = match_mask(args[0])  # type: ignore[arg-type]
        if inner is None or not inner.by_token or inner.dims[-1] != "s" or inner.expert is None:
            return None
        last = len(inner.dims) - 1
        return dataclasses.replace(inner, dims=inner.dims[:-1], any=True) if args[1] in (last, -1) else None
    if target is aten.one_hot.default:
        dims = _dims(args[0])  # type: ignore[arg-type]
        return Mask(_plain(args[0]), (*dims, "e")) if dims else None  # type: ignore[arg-type]
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
    new, old = value(node).shape, value(args[0]).shape
    if target in UNIT_DIMS and len(new) == len(old):  # a squeeze that finds nothing to drop
        return inner
    if target in RESHAPES:
        kept = inner.dims[len(inner.tokens) :]
        alike = len(new) == 1 + len(kept) and all(map(same_size, new[1:], old[len(inner.tokens) :]))
        return inner.flat() if inner.by_token and alike else None
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


_TOKENS = "tuv"


def _dims(indices: Node) -> tuple[str, ...] | None:
    """What the dimensions of `indices` run over: tokens, and a token's choices if there are several."""
    n = value(indices).dim()
    if not 0 < n <= len(_TOKENS) + 1:
        return None
    indices, choice = one_choice(_plain(indices))
    scores = None if choice is not None or n == 1 else scores_of(indices)
    only = indices.target is aten.squeeze.dim and indices.args[1] in (n, -1)
    if n == 1 or only or choice is not None or scores is not None and value(scores).dim() == n + 1:
        return tuple(_TOKENS[:n]) if n <= len(_TOKENS) else None
    return (*_TOKENS[: n - 1], "s")


def one_choice(node: Node) -> tuple[Node, int | None]:
    """(choices [.., k], column) where `node` is one column of them; (node, None) for anything else."""
    while is_cast(node):
        node = node.args[0]  # type: ignore[assignment]
    last = value(node.args[0]).dim() - 1 if node.target is aten.select.int else 0
    if last > 0 and node.args[1] in (last, -1):
        width = value(node.args[0]).shape[-1]
        if isinstance(node.args[2], int) and isinstance(width, int):
            return _plain(node.args[0]), node.args[2] % width  # type: ignore[arg-type]
    return node, None


def _compared(node: Node) -> Mask | None:
    """The mask `indices[..., None] == arange(E)`, or `indices[None] == arange(E)[:, None]`."""
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    for ix, numbers in ((a, b), (b, a)):
        if ix.target is not aten.unsqueeze.default:
            continue
        source = ix.args[0]
        n, dims = value(source).dim(), _dims(source)  # type: ignore[arg-type]
        if dims is None or not _integer(source):
            continue
        at = ix.args[1] % (n + 1)  # type: ignore[operator]
        if at == n and _all_numbers(numbers):
            return Mask(_plain(source), (*dims, "e"))  # type: ignore[arg-type]
        column = numbers.target is aten.unsqueeze.default and numbers.args[1] in (1, -1)
        if at == 0 and n == 1 and column and _all_numbers(numbers.args[0]):
            return Mask(_plain(source), ("e", *dims))  # type: ignore[arg-type]
    return None


def _all_numbers(node: Any) -> bool:
    """Whether `node` is [E], the numbers from 0 on."""
    return node.target is aten.arange.default and len(node.args) == 1  # type: ignore[no-any-return]


def _plain(node: Node) -> Node:
    """`node` before copies and conversions between integers."""
    while node.target in _COPIES or (
        node.target in (aten._to_copy.default, aten.to.dtype) and _integer(node) and _integer(node.args[0])
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _integer(node: Any) -> bool:
    return value(node).dtype in (torch.int64, torch.int32)


def picked(positions: list[Any], slots: bool = False) -> Mask | None:
    """The mask over tokens, or if `slots` over their choices, with one dimension for all tokens, of whose true entries
    `positions` are all the index tensors of `nonzero`, in order, or the mask itself."""
    rows = [match_rows(p) if isinstance(p, Node) else None for p in positions]
    if not rows or any(r is None or r.mask != rows[0].mask for r in rows):  # type: ignore[union-attr]
        return None
    mask = rows[0].mask  # type: ignore[union-attr]
    wanted = [*sorted(mask.tokens), *(["s"] if slots else [])]
    columns = [r.column for r in rows]  # type: ignore[union-attr]
    if columns != [-1] and (-1 in columns or [mask.dims[c] for c in columns] != wanted):
        return None
    return mask.flat() if "".join(sorted(mask.tokens)) in "".join(mask.dims) else None


def read_by(positions: list[Any]) -> int:
    """The number of dimensions that `positions` index."""
    return sum(value(p).dim() if value(p).dtype is torch.bool else 1 for p in positions)


def read_over(tensor: Node, positions: list[Any], indices: Node, choices: bool) -> bool:
    """Whether the dimensions of `tensor` that `positions` index are the tokens of `indices`, as they are or in one.

    choices: the last dimension of `indices` is a token's choices.
    """
    outer, tokens = value(tensor).shape[: read_by(positions)], value(indices).shape
    tokens = tokens[:-1] if choices else tokens
    if len(outer) == 1 < len(tokens):
        return same_size(outer[0], math.prod(tokens))
    return len(outer) == len(tokens) and all(map(same_size, outer, tokens))


def match_rows(node: Node) -> Rows | None:
    """The index tensor of a mask's true entries that `node` is; with column -1, the mask itself over tokens."""
    if node.op == "call_function" and isinstance(value(node), torch.Tensor) and value(node).dtype is torch.bool:
        mask = match_mask(node)
        return Rows(mask, -1) if mask is not None and mask.expert is not None and "s" not in mask.dims else None
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


def indexed(node: Node) -> tuple[Node, list[Any]] | None:
    """(tensor, its leading indices) of a read by index tensors: `t[i, j]`, `t[None, i]`, `t[i, j, None]`,
    `index_select`, `embedding`. A new dimension in the read is left out."""
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[0], [node.args[2]]  # type: ignore[return-value]
    if node.target is aten.embedding.default and len(node.args) == 2:
        return node.args[0], [node.args[1]]  # type: ignore[return-value]
    if node.target is aten.gather.default and node.args[1] == 0:
        token = repeated_over_channels(node.args[2])  # type: ignore[arg-type]
        return None if token is None else (node.args[0], [token])  # type: ignore[return-value]
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
    return tensor, positions  # type: ignore[return-value]


def repeated_over_channels(index: Node) -> Node | None:
    """The numbers [R] of which `index` [R, d] repeats each over all channels."""
    if index.target is not aten.expand.default:
        return None
    index = index.args[0]  # type: ignore[assignment]
    while index.target is aten.unsqueeze.default or index.target in RESHAPES:
        if value(index).dim() != 2 or value(index).shape[1] != 1:
            break
        index = index.args[0]  # type: ignore[assignment]
    return index if value(index).dim() == 1 else None


def added_rows(node: Node) -> tuple[Node, Node, Node] | None:
    """(base, rows' numbers [R], what is added to each [R, d]) of an `index_add` or `scatter_add` of whole rows, which
    counts a row as often as it comes."""
    args = node.args
    if node.target is aten.index_add.default and args[1] == 0 and node.kwargs.get("alpha", 1) == 1 and len(args) == 4:
        return args[0], args[2], args[3]  # type: ignore[return-value]
    if node.target is not aten.scatter_add.default or args[1] != 0:
        return None
    base, _, index, rows = args
    if value(base).dim() != 2:
        return None
    token = repeated_over_channels(index)  # type: ignore[arg-type]
    # scatter_add takes the rows that the index has, of as many as there may be
    alike = same_size(value(base).shape[1], value(rows).shape[1])
    alike = alike and all(map(same_size, value(index).shape, value(rows).shape))
    return (base, token, rows) if token is not None and alike else None  # type: ignore[return-value]


def scores_of(indices: Node) -> Node | None:
    """The scores [.., E] of which `indices` [.., k] are the places of the k largest, so that none comes twice."""
    node = indices
    while is_cast(node) or node.target in _COPIES or node.target in (aten._to_copy.default, aten.to.dtype):
        node = node.args[0]  # type: ignore[assignment]
    outer = (*RESHAPES, aten.expand.default, aten.unsqueeze.default)
    while node.target in outer and same_size([1, *value(node.args[0]).shape][-1], value(node).shape[-1]):
        node = node.args[0]  # type: ignore[assignment]
    top = node
    if node.target is operator.getitem and node.args[1] == 1:
        top = node.args[0]  # type: ignore[assignment]
        places = {aten.topk.default: 2, aten.max.dim: 1}
    else:
        places = {aten.argmax.default: 1}
    if top.target not in places:
        return None
    scores = top.args[0]
    last = value(scores).dim() - 1
    dim = top.args[places[top.target]] if len(top.args) > places[top.target] else -1
    if top.target is aten.argmax.default and len(top.args) == 1:
        return None  # the largest of all
    return scores if dim in (-1, last) else None  # type: ignore[return-value]


def number_of_scores(node: Node) -> int | None:
    """The number of scores among which `node` chooses the largest."""
    if node.target not in (aten.topk.default, aten.max.dim, aten.argmax.default, aten.sort.default):
        return None
    last = value(node.args[0]).shape[-1:]
    return last[0] if last and isinstance(last[0], int) else None


def distinct_choices(indices: Node) -> bool:
    """Whether no token can choose an expert twice: its choices are places that `topk` found, or there is one alone."""
    return value(indices).dim() == 1 or scores_of(indices) is not None


def is_nonnegative(ids: Node) -> bool:
    """Whether `ids` cannot be negative: clamped, or places that `topk`, `argmax` or `sort` found."""
    while True:
        if ids.target in (aten.clamp.default, aten.clamp_min.default):
            return isinstance(ids.args[1], int) and ids.args[1] >= 0
        if ids.target in _SOME_OR_ALL or ids.target in (aten._to_copy.default, aten.to.dtype):
            ids = ids.args[0]  # type: ignore[assignment]
        elif ids.target is operator.getitem and ids.args[1] == 1:
            return ids.args[0].target in (aten.topk.default, aten.sort.default, aten.max.dim)  # type: ignore[union-attr]
        else:
            return ids.target in (aten.argmax.default, aten.argsort.default)
