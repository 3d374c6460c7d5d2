"""Tensors `[..., channels]` as tokens x heads: the strides a RoPE kernel walks, worked out on the host.

The head dimension is the one the tables do not depend on; the others are the tokens, folded into at most two
coordinates `(t // n1, t % n1)`. Nothing here reads data, so it works on fake tensors and on symbolic sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Sizes of the walk; `strides[i]` are tensor i's (first token coordinate, second, head), 0 where it is shared.

    `head` is the dimension of the heads, None where there is but one.
    """

    tokens: Any
    n1: Any
    heads: Any
    strides: tuple[tuple[Any, Any, Any], ...]
    head: int | None = None

    @property
    def empty(self) -> bool:
        return statically_known_true(self.tokens == 0) or statically_known_true(self.heads == 0)

    @property
    def heads_inside(self) -> bool:
        """Whether a token's heads lie closer together in the first tensor than neighbouring tokens do."""
        return self._heads_inside(0)

    @property
    def reorders(self) -> bool:
        """Whether the first tensor has the heads inside of the tokens and the second one has them outside."""
        return self._heads_inside(0) and not self._heads_inside(1)

    def _heads_inside(self, tensor: int) -> bool:
        _, token, head = self.strides[tensor]
        return guard_or_false(head <= token) or isinstance(self.tokens, int) and self.tokens == 1


def rows_of(
    full: Sequence[Tensor], shared: Sequence[Tensor], packed: bool = False, head: int | None = None
) -> RowLayout | str:
    """The walk over `full` tensors (one outer shape) beside `shared` ones (broadcast over heads at least), or why not.

    `packed`: the tables, last in `shared`, are `[positions, 1, channels]` and indexed by position, not by token.
    `head`: the dimension of the heads, where it is known; `full` tensors may then differ in it.
    """
    outer = full[0].shape[:-1]
    dims = [i for i, n in enumerate(outer) if not _one(n)]
    by_token = shared[:-2] if packed else shared
    for t in (*full, *shared):
        if t.dim() != full[0].dim():
            return "operands differ in rank"
    if any(not _one(t.shape[-1]) and not statically_known_true(t.stride(-1) == 1) for t in (*full, *shared[:-2])):
        return "channels are not contiguous"

    # A packed token's position in the tables is computed from its number, so dimension 0 is never the heads'.
    free = [i for i in dims if all(_one(t.shape[i]) for t in by_token) and not (packed and i == 0)]
    if head is None:
        head = min(free, key=lambda i: _size_hint(full[0].stride(i)), default=None)
    token_dims = [i for i in dims if i != head]
    if packed:
        token_dims = [i for i in token_dims if i != 0]
        if token_dims:
            return "packed sequences have one token dimension"
        token_dims = [0] if not _one(outer[0]) else []

    tensors = (*full, *by_token)
    groups: list[list[int]] = []
    for i in token_dims:
        if groups and all(_folds(t, groups[-1][-1], i, outer[i]) for t in tensors):
            groups[-1].append(i)
        else:
            groups.append([i])
    if len(groups) > 2:
        return f"{len(groups)} separate token dimensions; kernels walk two"
    while len(groups) < 2:
        groups.insert(0, [])

    def numel(dims: Sequence[int]) -> Any:
        n: Any = 1
        for i in dims:
            n = n * outer[i]
        return n

    def strides(t: Tensor) -> tuple[Any, Any, Any]:
        first, second = (_step(t, g[-1]) if g else 0 for g in groups)
        return first, second, 0 if head is None else _step(t, head)

    tables = [(0, t.stride(0), 0) for t in shared[-2:]] if packed else []
    n1 = numel(groups[1])
    heads = 1 if head is None else outer[head]
    return RowLayout(numel(groups[0]) * n1, n1, heads, (*map(strides, tensors), *tables), head)


def overlaps(t: Tensor) -> bool:
    """Whether two elements of `t` may share memory, so that it must not be written to."""
    pairs = [(n, stride) for n, stride in zip(t.shape, t.stride(), strict=True) if not _one(n)]
    reach: Any = 1
    for n, stride in sorted(pairs, key=lambda p: _size_hint(p[1])):
        if not statically_known_true(stride >= reach):
            return True
        reach = stride * n
    return False


def _one(n: Any) -> bool:
    return isinstance(n, int) and n == 1


def _size_hint(stride: Any) -> int:
    return stride if isinstance(stride, int) else stride.node.hint if stride.node.hint is not None else 1 << 62


def _step(t: Tensor, dim: int) -> Any:
    return 0 if _one(t.shape[dim]) else t.stride(dim)


def _folds(t: Tensor, outer: int, inner: int, size: Any) -> bool:
    return statically_known_true(_step(t, outer) == _step(t, inner) * size)
