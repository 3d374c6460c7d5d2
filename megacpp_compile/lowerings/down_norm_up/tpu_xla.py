"""`down_norm_up` on XLA: rows are scaled behind the up-projection, `W (rrms * h) = rrms * (W h)`.

What is multiplied is then the latent times its gain, without waiting for a sum over the row; the scale is part of the
epilogue of the GEMM, or of what reads it. Only that order differs from the reference: in half precision the GEMM
is rounded once before the scale and once behind it. The backward is the reference's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings.down_norm_up.reference import down_norm_up_backward, down_projection, rest_slice

__all__ = ["down_norm_up", "down_norm_up_backward"]


def down_norm_up(
    x: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    w_norm: Tensor | None,
    w_up: list[Tensor],
    eps: float,
    start: int,
    size: int,
    keep_latent: bool = False,
    x_side: Tensor | None = None,
    w_side: Tensor | None = None,
    normed: torch.dtype | None = None,
    group: str | None = None,
    sum_dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    down, raw, latent, rrms = down_projection(x, w_down, b_down, eps, start, size, x_side, w_side, sum_dtype)
    gained = latent if w_norm is None else latent * w_norm.to(latent.dtype)
    up = [(F.linear(gained.to(w.dtype), w).to(rrms.dtype) * rrms).to(w.dtype) for w in w_up]
    up += [] if normed is None else [(gained * rrms).to(normed)]
    return up, down[..., rest_slice(start, size, down.shape[-1])], rrms, raw if keep_latent else rrms.new_empty(0)
