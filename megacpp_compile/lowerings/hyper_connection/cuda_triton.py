"""`hyper_connection` on CUDA: logits by tensor cores, maps of a token in registers, and sums over streams left to
Inductor, which fuses them with what reads them.

Weights, and gradients of logits, are float32, streams mostly bfloat16. A float32 number is a sum of three bfloat16
ones; products of streams with each of the three are exact, and are summed in float32: as good as a product in float32,
on tensor cores, while streams are read as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels import triton_stream_maps
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, interpreted, last_dim_contiguous, power_of_2
from megacpp_compile.lowerings._kernels.triton_math import dot
from megacpp_compile.lowerings.hyper_connection.reference import sizes
from megacpp_compile.lowerings.stream_update.cuda_triton import by_token

__all__ = ["MIN_BYTES", "hyper_connection", "hyper_connection_backward", "supports"]

# Bytes of the streams from which this gains.
MIN_BYTES = 8 << 20
MOST_STREAMS = 8
# Programs that a launch should have, to keep every multiprocessor at work; the most parts that sums come in.
PROGRAMS, MOST_PARTS = 528, 16


@triton.jit
def logits_of_streams(streams, weight, sums, squares, tokens, width, x_t, part, M: tl.constexpr, MP: tl.constexpr,
                      PARTS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, BT: tl.constexpr,
                      BK: tl.constexpr):  # fmt: skip
    """Products of a part of each token's channels with that of the weight, and the sum of their squares."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    m = tl.arange(0, MP)
    total = tl.zeros([BT, MP], tl.float32)
    square = tl.zeros([BT], tl.float32)
    begin = tl.program_id(1) * part
    for first in range(begin, min(begin + part, width), BK):
        k = first + tl.arange(0, BK)
        inside = k < width
        x = tl.load(streams + t[:, None] * x_t + k[None, :], mask=(t < tokens)[:, None] & inside[None, :], other=0)
        for p in tl.static_range(PARTS):
            at = weight + (p * M + m[None, :]) * width + k[:, None]
            w = tl.load(at, mask=(m < M)[None, :] & inside[:, None], other=0)
            total = dot(x.to(w.dtype), w, total, PRECISION, INTERPRETED)
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
    row = tl.program_id(1).to(tl.int64) * tokens + t
    tl.store(sums + row[:, None] * MP + m[None, :], total, mask=(t < tokens)[:, None])
    tl.store(squares + row, square, mask=t < tokens)


@triton.jit
def gradients_of_streams(grad, streams, weight, g, pre, inward, d_streams, d_weight, tokens, channels, part, g_t, x_t,
                         N: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, WEIGHTS: tl.constexpr,
                         GRADS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, BT: tl.constexpr,
                         BC: tl.constexpr):  # fmt: skip
    """Some channels of one stream, of a part of all tokens: their gradient, and their part of the weight's."""
    i = tl.program_id(0) % N
    c = tl.program_id(0) // N * BC + tl.arange(0, BC)
    own, width = c < channels, channels * N
    m = tl.arange(0, MP)
    of_weight = tl.zeros([BC, MP], tl.float32)
    at = weight + m[:, None] * width + i * channels + c[None, :]
    w = tl.load(at, mask=(m < M)[:, None] & own[None, :], other=0)
    if WEIGHTS > 1:
        rest = tl.load(at + M * width, mask=(m < M)[:, None] & own[None, :], other=0)
    begin = tl.program_id(1) * part
    for first in range(begin, min(begin + part, tokens), BT):
        t = (first + tl.arange(0, BT)).to(tl.int64)
        there = t < tokens
        inside = there[:, None] & own[None, :]
        x = tl.load(streams + t[:, None] * x_t + i * channels + c[None, :], mask=inside, other=0)
        dh = tl.load(grad + t[:, None] * g_t + c[None, :], mask=inside, other=0).to(tl.float32)
        dx = tl.load(pre + t * N + i, mask=there, other=0)[:, None] * dh
        dx -= tl.load(inward + t, mask=there, other=0)[:, None] * x.to(tl.float32)
        for p in tl.static_range(GRADS):
            made = g + (p * tl.cast(tokens, tl.int64) + t[:, None]) * M + m[None, :]
            dl = tl.load(made, mask=there[:, None] & (m < M)[None, :], other=0)
            of_weight = dot(tl.trans(x.to(dl.dtype)), dl, of_weight, PRECISION, INTERPRETED)
            if p < 2:  # what is left of a product is below the rounding of the streams
                dx = dot(dl.to(w.dtype), w, dx, PRECISION, INTERPRETED)
            if p == 0 and WEIGHTS > 1:
                dx = dot(dl.to(w.dtype), rest, dx, PRECISION, INTERPRETED)
        to = d_streams + (t[:, None] * N + i) * channels + c[None, :]
        tl.store(to, as_stored(dx, d_streams), mask=inside)
    row = tl.program_id(1).to(tl.int64) * width + i * channels + c
    tl.store(d_weight + row[:, None] * MP + m[None, :], of_weight, mask=own[:, None])


_logits = Kernel(
    logits_of_streams,
    [{"BT": bt, "BK": bk, "num_warps": w, "num_stages": s}
     for bt, bk, w in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8)) for s in (3, 4)],
    key=("M",),
)  # fmt: skip
_gradients = Kernel(
    gradients_of_streams,
    [{"BT": bt, "BC": bc, "num_warps": w, "num_stages": s}
     for bt, bc, w in ((64, 64, 4), (64, 128, 4), (64, 128, 8)) for s in (2, 3)],
    key=("M",),
)  # fmt: skip


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    at = 0 if name == "hyper_connection" else 3
    streams, dtypes = args[at], [t.dtype for t in args[at : at + 4]]
    axes = args[9 if at == 0 else 13]
    n, d = streams.shape[-2:]
    if torch.float64 in dtypes:
        return "float64"
    if not isinstance(n, int) or not isinstance(d, int):
        return "the number of streams or of channels is not known"
    if n > MOST_STREAMS:
        return f"more than {MOST_STREAMS} streams"
    if any(isinstance(size, int) and size == 0 for size in streams.shape):
        return "there are no streams"
    if any(one == other for one, other in zip(axes, axes[1:], strict=False)):
        return "rows and columns are not normalised in turn"
    return None


def _split(t: Tensor, like: Tensor) -> Tensor:
    """[parts, *t.shape]: for bfloat16 streams as many bfloat16 numbers as sum up to `t`; else `t` in float32."""
    if like.dtype != torch.bfloat16:
        return t.float().unsqueeze(0)
    parts = [t.bfloat16()]
    while len(parts) < 3 and t.dtype != torch.bfloat16:
        rest = t.float() - parts[-1].float()
        t = torch.where(parts[-1].isfinite(), rest, torch.zeros_like(rest))
        parts.append(t.bfloat16())
    return torch.stack(parts)


def _precision(streams: Tensor) -> dict[str, Any]:
    exact = streams.dtype != torch.bfloat16 and not torch.backends.cuda.matmul.allow_tf32
    return {"PRECISION": "tf32x3" if exact else "tf32", "INTERPRETED": interpreted()}


def _parts(count: Any, block: int, others: Any) -> int:
    """In how many parts to sum over `count`, so that there are programs enough beside `others`."""
    if not isinstance(count, int) or not isinstance(others, int):
        return 4
    return max(1, min(MOST_PARTS, triton.cdiv(PROGRAMS, max(others, 1)), triton.cdiv(count, block)))


def _constants(n: int, post: Sequence[float], init: str, axes: Sequence[int]) -> dict[str, Any]:
    return {"N": n, "NP": power_of_2(n), "M": sum(sizes(n, post, init)), "POST": int(bool(post)), "INIT": init,
            "STEPS": len(axes), "FIRST": 3 + axes[0] if axes else 1}  # fmt: skip


def _lanes(rows: int) -> int:
    return max(16, power_of_2(rows))


def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    pre: list[float],
    post: list[float],
    init: str,
    eps: list[float],
    axes: list[int],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *outer, n, d = streams.shape
    x = last_dim_contiguous(by_token(streams.flatten(-2), 1))
    tokens, width, rows = x.shape[0], n * d, weight.shape[0]
    new, lanes = x.new_empty, _lanes(rows)
    tiles = triton.cdiv(tokens, 64) if isinstance(tokens, int) else tokens
    splits = _parts(width, 512, tiles)
    part = triton.cdiv(triton.cdiv(width, splits), 128) * 128
    split = _split(weight, streams).contiguous()
    sums, squares = (new(shape, dtype=torch.float32) for shape in ((splits, tokens, lanes), (splits, tokens)))
    _logits(
        lambda meta: (triton.cdiv(tokens, meta["BT"]), splits),
        {"BT": 64, "BK": 64, "num_warps": 4, "num_stages": 4}, streams=x, weight=split, sums=sums, squares=squares,
        tokens=tokens, width=width, x_t=x.stride(0), part=part, M=rows, MP=lanes, PARTS=split.shape[0],
        **_precision(streams),
    )  # fmt: skip
    before, behind, mix, logits, rrms = (
        new(shape, dtype=torch.float32)
        for shape in ((*outer, n), (*outer, n if post else 0), (*outer, *((n, n) if init else (0, 0))),
                      (*outer, rows), tuple(outer))
    )  # fmt: skip
    factor, shift = post or (0.0, 0.0)
    triton_stream_maps.of_logits(
        lambda meta: (triton.cdiv(tokens, meta["BT"]),), {"BT": triton_stream_maps.TOKENS, "num_warps": 4},
        sums=sums, squares=squares, scale=scale.float().contiguous(), base=base.float().contiguous(), pre=before,
        post=behind, mix=mix, logits=logits, rrms=rrms, tokens=tokens, splits=splits, norm_eps=norm_eps, width=width,
        pre_factor=pre[0], pre_shift=pre[1], post_factor=factor, post_shift=shift, eps0=eps[0], eps1=eps[1], MP=lanes,
        **_constants(n, post, init, axes),
    )  # fmt: skip
    block = (before.unsqueeze(-1) * streams.float()).sum(-2).to(out_dtype)
    return block, behind, mix, logits, rrms


def hyper_connection_backward(
    grad: Tensor,
    grad_post: Tensor,
    grad_mix: Tensor,
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    logits: Tensor,
    rrms: Tensor,
    pre: list[float],
    post: list[float],
    init: str,
    eps: list[float],
    axes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, d = streams.shape[-2:]
    x = last_dim_contiguous(by_token(streams.flatten(-2), 1))
    dh, dm = last_dim_contiguous(by_token(grad, 1)), by_token(grad_mix, 2)
    tokens, width, rows = x.shape[0], n * d, weight.shape[0]
    new, lanes = x.new_empty, _lanes(rows)
    wide_scale, wide_base = scale.float().contiguous(), base.float().contiguous()
    made = logits.reshape(tokens, rows)
    d_pre = (dh.unsqueeze(1).float() * x.unflatten(-1, (n, d)).float()).sum(-1)
    affine = new((tokens, rows), dtype=torch.float32)
    triton_stream_maps.backward(
        lambda meta: (triton.cdiv(tokens, meta["BT"]),), {"BT": triton_stream_maps.TOKENS, "num_warps": 4}, d_pre=d_pre,
        d_post=by_token(grad_post, 1).contiguous(), d_mix=dm, logits=made, scale=wide_scale, base=wide_base,
        divisors=new((tokens, len(axes), power_of_2(n)), dtype=torch.float32), d_affine=affine, tokens=tokens,
        x_t=dm.stride(0), x_i=dm.stride(1), x_j=dm.stride(2), pre_factor=pre[0],
        post_factor=post[0] if post else 0.0, eps0=eps[0], eps1=eps[1], **_constants(n, post, init, axes),
    )  # fmt: skip
    root = rrms.reshape(tokens, 1)
    g = affine * wide_scale * root
    inward = root.squeeze(-1) * (g * made).sum(-1) / width
    for_pre = made.narrow(1, 0, n) * wide_scale.narrow(0, 0, n) + wide_base.narrow(0, 0, n)
    before = torch.sigmoid(for_pre) * pre[0] + pre[1]
    weights, grads = _split(weight, streams).contiguous(), _split(g, streams).contiguous()
    parts = max(1, min(_parts(tokens, 64, 1), PROGRAMS // (n * triton.cdiv(d, 64))))
    d_streams = new(streams.shape)
    d_weight = new((parts, width, lanes), dtype=torch.float32)
    _gradients(
        lambda meta: (n * triton.cdiv(d, meta["BC"]), parts),
        {"BT": 64, "BC": min(64, max(16, power_of_2(d))), "num_warps": 4, "num_stages": 2}, grad=dh, streams=x,
        weight=weights, g=grads, pre=before.contiguous(), inward=inward, d_streams=d_streams, d_weight=d_weight,
        tokens=tokens, channels=d, part=triton.cdiv(triton.cdiv(tokens, parts), 64) * 64, g_t=dh.stride(0),
        x_t=x.stride(0), N=n, M=rows, MP=lanes, WEIGHTS=weights.shape[0], GRADS=grads.shape[0], **_precision(streams),
    )  # fmt: skip
    return (
        d_streams,
        d_weight.sum(0).narrow(1, 0, rows).t().to(weight.dtype, memory_format=torch.contiguous_format, copy=True),
        (affine * made).sum(0).to(scale.dtype),
        affine.sum(0).to(base.dtype),
    )
