"""A `while` loop inside an XLA program: the body is compiled once, and takes the memory of one iteration.

The same body written out n times is a program n times as long, and XLA, which sees no order between the copies, holds
what several of them need at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = tuple[Tensor, ...]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]


def loop(body: Body, carried: Tensors, parts: Tensors) -> tuple[Tensors, Tensors]:
    """`(carried, part) -> (carried, result)` for each part, in order: (carried at last, results stacked).

    parts: [n, ...] each, n the same. Whatever `body` reads has to be carried or a part. On an XLA device under
    torch_xla this is one `while`, elsewhere a Python loop. No gradients.
    """
    if parts[0].device.type == "xla" and parts[0].shape[0] > 1:
        # Private, in the last release of torch_xla: the public `scan` differentiates its body as well.
        from torch_xla.experimental.scan import _scan_impl_pytree  # type: ignore[import-not-found]

        return _scan_impl_pytree(body, carried, parts)  # type: ignore[no-any-return]
    results = []
    for i in range(parts[0].shape[0]):
        carried, result = body(carried, tuple(t[i] for t in parts))
        results.append(result)
    return carried, tuple(torch.stack(one) for one in zip(*results, strict=True))


def parted(t: Tensor, parts: int, fill: float = 0) -> Tensor:
    """[b, t, ...] -> [parts, b, ceil(t / parts), ...], padded with `fill` at the end."""
    each = -(-t.shape[1] // parts)
    if over := parts * each - t.shape[1]:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, over), value=fill)
    return t.unflatten(1, (parts, each)).transpose(0, 1)


def rejoined(t: Tensor, length: int) -> Tensor:
    """What `parted` took apart: [parts, b, each, ...] -> [b, length, ...]."""
    return t.transpose(0, 1).flatten(1, 2)[:, :length]


def parts_of(length: int, bytes_each: int, at_once: int) -> int:
    """The least number of parts of `length` elements, `bytes_each` each, that take at most `at_once` bytes."""
    each = max(1, at_once // max(1, bytes_each))
    return max(1, -(-length // each))
