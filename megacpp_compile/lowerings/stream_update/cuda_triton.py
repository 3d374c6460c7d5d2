"""`stream_update` on CUDA: each stream is read once for all new streams, in backward for all four gradients.

A program of the forward has some channels of a token, one of the backward all of them: the gradients of weights and
matrix are sums over channels, which it keeps in registers until the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, is_wide, last_dim_contiguous, power_of_2

__all__ = ["MIN_BYTES", "stream_update", "stream_update_backward", "supports"]

# Bytes of the streams from which this gains.
MIN_BYTES = 8 << 20
MOST_STREAMS = 8
# Products of a token's streams and gradients that a program of the backward sums at a time.
HELD = 4096


@triton.jit
def update_streams(streams, block, post, mix, new, channels, x_t, x_i, y_t, p_t, p_i, m_t, m_i, m_j,
                   N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NP)[:, None, None]
    j = tl.arange(0, NP)[None, :, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, None, :]
    x = tl.load(streams + t * x_t + j * x_i + c, mask=(j < N) & (c < channels), other=0).to(dtype)
    m = tl.load(mix + t * m_t + i * m_i + j * m_j, mask=(i < N) & (j < N), other=0).to(dtype)
    total = tl.sum(m * x, 1)
    i = tl.arange(0, NP)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    y = tl.load(block + t * y_t + c, mask=c < channels, other=0).to(dtype)
    total += tl.load(post + t * p_t + i * p_i, mask=i < N, other=0).to(dtype) * y
    tl.store(new + (t * N + i) * channels + c, as_stored(total, new), mask=(i < N) & (c < channels))


@triton.jit
def update_streams_backward(grad, streams, block, post, mix, d_streams, d_block, d_post, d_mix, channels, g_t, g_i,
                            x_t, x_i, y_t, p_t, p_i, m_t, m_i, m_j, N: tl.constexpr, NP: tl.constexpr,
                            WIDE: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NP)[:, None, None]
    j = tl.arange(0, NP)[None, :, None]
    lane = tl.arange(0, BC)[None, None, :]
    m = tl.load(mix + t * m_t + i * m_i + j * m_j, mask=(i < N) & (j < N), other=0).to(dtype)
    p = tl.load(post + t * p_t + i * p_i, mask=i < N, other=0).to(dtype)
    of_mix = tl.zeros([NP, NP, BC], dtype)
    of_post = tl.zeros([NP, 1, BC], dtype)
    own = tl.arange(0, NP)[:, None]
    # Channels are loaded ahead of the arithmetic on those before them.
    at_g, at_x, at_y = grad + t * g_t + i * g_i, streams + t * x_t + j * x_i, block + t * y_t
    next_g = tl.load(at_g + lane, mask=(i < N) & (lane < channels), other=0)
    next_x = tl.load(at_x + lane, mask=(j < N) & (lane < channels), other=0)
    next_y = tl.load(at_y + lane, mask=lane < channels, other=0)
    for first in range(0, channels, BC):
        g, x, y = next_g.to(dtype), next_x.to(dtype), next_y.to(dtype)
        ahead = first + BC + lane
        next_g = tl.load(at_g + ahead, mask=(i < N) & (ahead < channels), other=0)
        next_x = tl.load(at_x + ahead, mask=(j < N) & (ahead < channels), other=0)
        next_y = tl.load(at_y + ahead, mask=ahead < channels, other=0)
        of_mix += g * x
        of_post += g * y
        dx = tl.sum(m * g, 0)
        dy = tl.sum(p * g, 0)
        c = first + tl.arange(0, BC)[None, :]
        at = d_streams + (t * N + own) * channels + c
        tl.store(at, as_stored(dx, d_streams), mask=(own < N) & (c < channels))
        tl.store(d_block + t * channels + c, as_stored(dy, d_block), mask=c < channels)
    other = tl.arange(0, NP)[None, :]
    at = d_mix + (t * N + own) * N + other
    tl.store(at, as_stored(tl.sum(of_mix, 2), d_mix), mask=(own < N) & (other < N))
    tl.store(d_post + t * N + own, as_stored(tl.sum(of_post, 2), d_post), mask=own < N)


_update = Kernel(update_streams, [{"BC": bc, "num_warps": w} for bc in (512, 1024, 2048) for w in (4, 8)], key=("N",))
_backward = Kernel(update_streams_backward, [{"BC": bc, "num_warps": w} for bc in (256, 512, 1024) for w in (4, 8)],
                   key=("N",))  # fmt: skip


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    streams = args[0 if name == "stream_update" else 1]
    n, d = streams.shape[-2:]
    if not isinstance(n, int) or not isinstance(d, int):
        return "the number of streams or of channels is not known"
    if n > MOST_STREAMS:
        return f"more than {MOST_STREAMS} streams"
    if any(isinstance(size, int) and size == 0 for size in streams.shape):
        return "there are no streams to update"
    return None


def by_token(t: Tensor, dims: int) -> Tensor:
    """`t` as [tokens, ...] with its last `dims` dimensions, of which the very last has its elements in line."""
    tokens = math.prod(t.shape[: t.dim() - dims])
    return t.reshape(tokens, *t.shape[t.dim() - dims :])


def _operands(streams: Tensor, block: Tensor, post: Tensor, mix: Tensor) -> dict[str, Any]:
    x, y = (last_dim_contiguous(by_token(t, dims)) for t, dims in ((streams, 2), (block, 1)))
    p, m = by_token(post, 1), by_token(mix, 2)
    n, d = streams.shape[-2:]
    return {
        "streams": x, "block": y, "post": p, "mix": m, "channels": d, "x_t": x.stride(0), "x_i": x.stride(1),
        "y_t": y.stride(0), "p_t": p.stride(0), "p_i": p.stride(1), "m_t": m.stride(0), "m_i": m.stride(1),
        "m_j": m.stride(2), "N": n, "NP": power_of_2(n),
        "WIDE": is_wide(streams.dtype, block.dtype, post.dtype, mix.dtype),
    }  # fmt: skip


def stream_update(streams: Tensor, block: Tensor, post: Tensor, mix: Tensor, out_dtype: torch.dtype) -> Tensor:
    args = _operands(streams, block, post, mix)
    new = torch.empty(streams.shape, dtype=out_dtype, device=streams.device)
    static = {"BC": min(1024, power_of_2(args["channels"])), "num_warps": 4}
    tokens = args["streams"].shape[0]
    _update(lambda meta: (tokens, triton.cdiv(args["channels"], meta["BC"])), static, new=new, **args)
    return new


def stream_update_backward(
    grad: Tensor, streams: Tensor, block: Tensor, post: Tensor, mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = _operands(streams, block, post, mix)
    g = last_dim_contiguous(by_token(grad, 2))
    made = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (streams, block, post, mix)]
    held = max(64, min(1024, HELD // args["NP"] ** 2))
    static = {"BC": min(held, power_of_2(args["channels"])), "num_warps": 4}
    tokens = args["streams"].shape[0]
    names = ("d_streams", "d_block", "d_post", "d_mix")
    _backward(lambda meta: (tokens,), static, grad=g, g_t=g.stride(0), g_i=g.stride(1),
              **dict(zip(names, made, strict=True)), **args)  # fmt: skip
    d_streams, d_block, d_post, d_mix = made
    return d_streams, d_block, d_post, d_mix
