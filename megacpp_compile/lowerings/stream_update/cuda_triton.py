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
# Products of a token's streams and gradients that a program of the backward sums at a time: numbers in registers.
HELD = 8192


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
def _vectors(pointer, step, inside, N: tl.constexpr):
    """N vectors, `step` apart."""
    found = ()
    for i in tl.static_range(N):
        found = found + (tl.load(pointer + i * step, mask=inside, other=0),)  # type: ignore[assignment]
    return found


@triton.jit
def update_streams_backward(grad, streams, block, post, mix, d_streams, d_block, d_post, d_mix, channels, g_t, g_i,
                            x_t, x_i, y_t, p_t, p_i, m_t, m_i, m_j, N: tl.constexpr, WIDE: tl.constexpr,
                            BC: tl.constexpr):  # fmt: skip
    """Vectors of channels and a number for each pair of streams: with the streams as dimensions of one tensor, Triton
    spreads these over warps, and each sum over streams goes through shared memory."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BC)
    at_g, at_x, at_y = grad + t * g_t + lane, streams + t * x_t + lane, block + t * y_t + lane
    to_x, to_y = d_streams + t * N * channels + lane, d_block + t * channels + lane
    p, m, of_post, of_mix = (), (), (), ()
    for i in tl.static_range(N):
        p = p + (tl.load(post + t * p_t + i * p_i).to(dtype),)  # type: ignore[assignment]
        of_post = of_post + (tl.zeros([BC], dtype),)  # type: ignore[assignment]
        for j in tl.static_range(N):
            m = m + (tl.load(mix + t * m_t + i * m_i + j * m_j).to(dtype),)  # type: ignore[assignment]
            of_mix = of_mix + (tl.zeros([BC], dtype),)  # type: ignore[assignment]
    # Channels are loaded ahead of the arithmetic on those before them.
    next_g, next_x = _vectors(at_g, g_i, lane < channels, N), _vectors(at_x, x_i, lane < channels, N)
    next_y = tl.load(at_y, mask=lane < channels, other=0)
    for first in range(0, channels, BC):
        g, x, y = next_g, next_x, next_y.to(dtype)
        inside, ahead = first + lane < channels, first + BC
        next_g = _vectors(at_g + ahead, g_i, ahead + lane < channels, N)
        next_x = _vectors(at_x + ahead, x_i, ahead + lane < channels, N)
        next_y = tl.load(at_y + ahead, mask=ahead + lane < channels, other=0)
        dy = tl.zeros([BC], dtype)
        sums, pairs = (), ()
        for i in tl.static_range(N):
            one = g[i].to(dtype)
            dy += p[i] * one
            sums = sums + (of_post[i] + one * y,)  # type: ignore[assignment]
            for j in tl.static_range(N):
                pairs = pairs + (of_mix[i * N + j] + one * x[j].to(dtype),)  # type: ignore[assignment]
        of_post, of_mix = sums, pairs
        tl.store(to_y + first, as_stored(dy, d_block), mask=inside)
        for j in tl.static_range(N):
            dx = tl.zeros([BC], dtype)
            for i in tl.static_range(N):
                dx += m[i * N + j] * g[i].to(dtype)
            tl.store(to_x + j * channels + first, as_stored(dx, d_streams), mask=inside)
    for i in tl.static_range(N):
        tl.store(d_post + t * N + i, as_stored(tl.sum(of_post[i], 0), d_post))
        for j in tl.static_range(N):
            tl.store(d_mix + (t * N + i) * N + j, as_stored(tl.sum(of_mix[i * N + j], 0), d_mix))


_update = Kernel(update_streams, [{"BC": bc, "num_warps": w} for bc in (512, 1024, 2048) for w in (4, 8)], key=("N",))
_backward = Kernel(update_streams_backward, [{"BC": bc, "num_warps": w} for bc, w in
                    ((256, 1), (256, 2), (512, 2), (1024, 2), (256, 4), (512, 4), (1024, 4))],
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
    pairs = args.pop("NP") ** 2
    # Of four streams one warp holds the sums, which then need no shared memory: 0.274 ms where two take 0.297.
    held, warps = (256, 1) if pairs == 16 else (max(128, min(1024, HELD // pairs)), 2)
    static = {"BC": min(held, power_of_2(args["channels"])), "num_warps": warps}
    tokens = args["streams"].shape[0]
    names = ("d_streams", "d_block", "d_post", "d_mix")
    _backward(lambda meta: (tokens,), static, grad=g, g_t=g.stride(0), g_i=g.stride(1),
              **dict(zip(names, made, strict=True)), **args)  # fmt: skip
    d_streams, d_block, d_post, d_mix = made
    return d_streams, d_block, d_post, d_mix
