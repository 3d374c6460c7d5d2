"""The loop of `linear_cross_entropy` over chunks of tokens on CUDA, as an op of its own: a graph can't hold it, as it
has any number of turns. What stands before and behind it is in the graph, where Inductor fuses it.

Registered with the op itself, as a graph from a cache on disk names it where nothing has been lowered. What it does is
in `cuda_triton`, which needs Triton.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import kernel_op


@kernel_op("megacpp_head::walk")
def walk(
    x: Tensor,
    w: Tensor,
    b: Optional[Tensor],  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
    target: Tensor,
    are_words: Optional[Tensor],  # noqa: UP045
    count: Tensor,
    dlse: Optional[Tensor],  # noqa: UP045
    lse: Optional[Tensor],  # noqa: UP045
    settings: list[float],
    grads: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(lse, the target's logit, the sum of logits) of each row, empty where `lse` is given; dx, dw in `dtype` and db in
    the compute dtype, empty where `grads` does not name them.

    are_words: [], whether every target is a word or ignored, without which the device fails. count: what the gradient
    of each row's loss is; dlse: that of its lse. settings: label_smoothing, scale, softcap (0 for none) and z_loss.
    """
    from megacpp_compile.lowerings.linear_cross_entropy import cuda_triton

    return cuda_triton.walk(x, w, b, target, are_words, count, dlse, lse, settings, grads, dtype)


@torch.library.register_fake("megacpp_head::walk")
def _(x, w, b, target, are_words, count, dlse, lse, settings, grads, dtype):  # type: ignore[no-untyped-def]
    statistics = (torch.empty_like(count) if lse is None else count.new_empty(0) for _ in range(3))
    return *statistics, *gradients_like(x, w, grads, dtype, count.dtype)


def gradients_like(
    x: Tensor, w: Tensor, grads: str, dtype: torch.dtype, of_b: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What those that `grads` names are like: w's in `dtype`, b's in `of_b`."""
    shapes = (("x", x.shape, x.dtype), ("w", w.shape, dtype), ("b", w.shape[:1], of_b))
    dx, dw, db = (x.new_empty(shape if name in grads else 0, dtype=own) for name, shape, own in shapes)
    return dx, dw, db
