"""`down_norm_up` on CUDA: plain GEMMs, and one kernel for all that lies between those of backward.

Forward is the reference's algebra: Inductor makes one pass of the norm, a hundredth of the GEMMs beside it; GEMMs that
contract over the latent go through `_gemm.autotune`. Folding the norm into a GEMM's epilogue would need a Triton GEMM,
which costs more than the pass saves (docs/kernels.md). Backward goes over the latents once. `down_norm_up_rows` reads a
row of the recomputed latent and of the gradient of the normed latent and writes the normed latent (operand of the
up-projection's weight gradient), the down-projection's gradient (with the gradient of the channels that were not normed
in its place), and partial sums of the gain's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._gemm import autotune
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, is_wide, power_of_2
from megacpp_compile.lowerings.down_norm_up import reference
from megacpp_compile.lowerings.down_norm_up.reference import recompute_latent, side_gradients

__all__ = ["MIN_BYTES", "down_norm_up", "down_norm_up_backward", "supports"]

# Bytes of the largest operand from which this gains on what Inductor makes of the reference (H200).
MIN_BYTES = 32 << 20
# Latent widths one program holds in registers.
MAX_SIZE = 8192
# Programs a launch has at most, each going over many rows; also the rows of the gain's partial sums.
PROGRAMS = 1024


@triton.jit
def down_norm_up_rows(grad, latent, rrms, gain, grad_rest, normed_out, d_down, d_gain, tokens, lt, gain_d, rest_t,
                      SIZE: tl.constexpr, LANES: tl.constexpr, START: tl.constexpr, REST: tl.constexpr,
                      REST_LANES: tl.constexpr, GAIN: tl.constexpr, WIDE: tl.constexpr,
                      BT: tl.constexpr):  # fmt: skip
    """Row t: g' = grad * gain; d_latent = rrms * (g' - normed * mean(g' * normed)); normed_out = normed * gain."""
    d = tl.arange(0, LANES)[None, :]
    r = tl.arange(0, REST_LANES)[None, :]
    inside = d < SIZE
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    if GAIN:
        w = tl.load(gain + d * gain_d, mask=inside, other=0).to(dtype)
    total = tl.zeros([1, LANES], dtype)
    for first in range(tl.program_id(0) * BT, tokens, tl.num_programs(0) * BT):
        t = (first + tl.arange(0, BT)).to(tl.int64)[:, None]
        exists = t < tokens
        mask = exists & inside
        scale = tl.load(rrms + t, mask=exists, other=0).to(dtype)
        normed = tl.load(latent + t * lt + d, mask=mask, other=0).to(dtype) * scale
        g = tl.load(grad + t * SIZE + d, mask=mask, other=0).to(dtype)
        out = t * (SIZE + REST)
        if GAIN:
            total += tl.sum(g * normed, 0)[None, :]
            g = g * w
            tl.store(normed_out + t * SIZE + d, as_stored(normed * w, normed_out), mask=mask)
        else:
            tl.store(normed_out + t * SIZE + d, as_stored(normed, normed_out), mask=mask)
        mean = tl.sum(g * normed, 1)[:, None] / SIZE
        d_latent = scale * (g - normed * mean)
        tl.store(d_down + out + START + d, as_stored(d_latent, d_down), mask=mask)
        if REST > 0:
            keep = exists & (r < REST)
            rest = tl.load(grad_rest + t * rest_t + r, mask=keep, other=0)
            if START > 0:
                tl.store(d_down + out + r, as_stored(rest, d_down), mask=keep)
            else:
                tl.store(d_down + out + SIZE + r, as_stored(rest, d_down), mask=keep)
    if GAIN:
        tl.store(d_gain + tl.program_id(0) * SIZE + d, total, mask=inside)


_rows = Kernel(
    down_norm_up_rows,
    [{"BT": bt, "num_warps": warps} for bt in (1, 2, 4) for warps in (2, 4, 8)],
    key=("tokens", "SIZE"),
)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if name == "down_norm_up":
        return None
    grads, grad_rest, size = args[0], args[1], args[9]
    if len(grads) != 1:
        return "several up-projections read one latent"
    if any(grad is not None for grad in args[13:15]):
        return "more than the up-projection reads the latent"
    if size > MAX_SIZE:
        return f"the latent is wider than {MAX_SIZE}"
    outer = grad_rest.dim() - 1
    return None if outer >= 1 else "there is no token dimension"


def _flat(t: Tensor) -> Tensor:
    return t.flatten(0, -2)


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
    def project(scaled: Tensor, w: Tensor) -> Tensor:
        return autotune.mm(_flat(scaled), w.t()).view((*scaled.shape[:-1], w.shape[0]))

    return reference.down_norm_up(
        x, w_down, b_down, w_norm, w_up, eps, start, size, keep_latent, x_side, w_side, normed, group, sum_dtype,
        project,
    )  # fmt: skip


def down_norm_up_backward(
    grad_up: list[Tensor],
    grad_rest: Tensor,
    x: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    w_norm: Tensor | None,
    w_up: list[Tensor],
    rrms: Tensor,
    start: int,
    size: int,
    latent: Tensor | None = None,
    x_side: Tensor | None = None,
    w_side: Tensor | None = None,
    grad_normed: None = None,
    grad_latent: None = None,
    grad_whole: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], Tensor, Tensor]:
    if latent is None:
        latent = recompute_latent(x, w_down, b_down, start, size, x_side, w_side, sum_dtype)
    latent = _flat(latent)
    grad, flat_x, (w,) = _flat(grad_up[0]), _flat(x), w_up
    grad_latents = grad @ w if grad_whole is None else _flat(grad_whole).contiguous()
    tokens, rest = grad.shape[0], grad_rest.shape[-1]
    normed = torch.empty((tokens, size), dtype=w.dtype, device=x.device)
    d_down = torch.empty((tokens, size + rest), dtype=x.dtype, device=x.device)
    programs = PROGRAMS if not isinstance(tokens, int) else max(min(PROGRAMS, tokens), 1)
    sums = torch.zeros((programs, size if w_norm is not None else 0), dtype=rrms.dtype, device=x.device)
    padded = power_of_2(size)
    static = {"BT": 4 if padded <= 1024 else 1, "num_warps": 2 if padded <= 2048 else 8}
    grad_rest = _flat(grad_rest.to(x.dtype))
    if grad_rest.stride(-1) != 1:  # a sum's gradient is one number, expanded
        grad_rest = grad_rest.contiguous()
    if not (isinstance(tokens, int) and tokens == 0):
        _rows(
            lambda meta: (programs,), static, grad=grad_latents, latent=latent, rrms=rrms.reshape(-1),
            gain=rrms if w_norm is None else w_norm, grad_rest=grad_rest, normed_out=normed, d_down=d_down,
            d_gain=sums, tokens=tokens, lt=latent.stride(0),
            gain_d=0 if w_norm is None else w_norm.stride(0), rest_t=grad_rest.stride(0), SIZE=size, LANES=padded,
            START=start, REST=rest, REST_LANES=power_of_2(rest), GAIN=int(w_norm is not None),
            WIDE=int(is_wide(rrms.dtype)),
        )  # fmt: skip
    d_norm = rrms.new_empty(0) if w_norm is None else sums.sum(0).to(w_norm.dtype)
    d_bias = rrms.new_empty(0) if b_down is None else d_down.to(rrms.dtype).sum(0).to(b_down.dtype)
    d_x = autotune.mm(d_down, w_down).view(x.shape)
    d_x_side, d_w_side = side_gradients(d_down, x_side, w_side, rrms)
    if x_side is not None:
        d_x_side = d_x_side.view(x_side.shape)
    return d_x, d_down.t() @ flat_x, d_bias, d_norm, [grad.t() @ normed], d_x_side, d_w_side
