"""`index_scores` on CUDA: a tile of scores stays in registers while the heads' products are added up.

Backward computes the products again, in a pass for queries and weights and one for keys; of the latter, parts of the
queries are summed apart, and the parts in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single, to_bfloat16
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, in_sixteens, multiply, power_of_2, strides
from megacpp_compile.lowerings._kernels.triton_math import dot

__all__ = ["index_scores", "index_scores_backward", "supports"]

MAX_CHANNELS = 256
# Programs that keys' gradients are spread over at least, by parts of the queries.
PROGRAMS = 264


@triton.jit
def _times(d, by, to, INTERPRETED: tl.constexpr):
    """`to + d @ by`, with gradients in the range of float32, which float16 has not."""
    if by.dtype == tl.float16:
        return dot(d, by.to(tl.float32), to, "tf32", INTERPRETED)
    else:
        return dot(to_bfloat16(d), by, to, "ieee", INTERPRETED)


@triton.jit
def index_scores_tiles(q, k, weights, out, scale, queries, keys, heads, q_b, q_t, q_h, k_b, k_s, w_b, w_t, w_h,
                       SIZE: tl.constexpr, LANES: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
                       PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    s = (tl.program_id(0) * BS + tl.arange(0, BS)).to(tl.int64)
    c = tl.arange(0, LANES)
    scale = single(scale)
    key = tl.load(k + b * k_b + s[:, None] * k_s + c[None, :], mask=(s[:, None] < keys) & (c[None, :] < SIZE), other=0)
    total = tl.zeros([BT, BS], tl.float32)
    for h in range(heads):
        rows = q + b * q_b + t[:, None] * q_t + h * q_h + c[None, :]
        query = tl.load(rows, mask=(t[:, None] < queries) & (c[None, :] < SIZE), other=0)
        weight = tl.load(weights + b * w_b + t * w_t + h * w_h, mask=t < queries, other=0).to(tl.float32)
        x = dot(query, key.T, tl.zeros([BT, BS], tl.float32), PRECISION, INTERPRETED) * scale
        total += weight[:, None] * tl.where(x <= 0, 0.0, x)
    place = out + (b * queries + t[:, None]) * keys + s[None, :]
    tl.store(place, as_stored(total, out), mask=(t[:, None] < queries) & (s[None, :] < keys))


@triton.jit
def index_scores_of_queries(grad, q, k, weights, dq, dw, scale, queries, keys, heads, g_b, g_t, q_b, q_t, q_h, k_b, k_s,
                            w_b, w_t, w_h, SIZE: tl.constexpr, LANES: tl.constexpr, BT: tl.constexpr,
                            BS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    c = tl.arange(0, LANES)
    scale = single(scale)
    inside = (t[:, None] < queries) & (c[None, :] < SIZE)
    query = tl.load(q + b * q_b + t[:, None] * q_t + h * q_h + c[None, :], mask=inside, other=0)
    weight = tl.load(weights + b * w_b + t * w_t + h * w_h, mask=t < queries, other=0).to(tl.float32)
    d_query, d_weight = tl.zeros([BT, LANES], tl.float32), tl.zeros([BT], tl.float32)
    for first in range(0, keys, BS):
        s = first + tl.arange(0, BS).to(tl.int64)
        own = (s[:, None] < keys) & (c[None, :] < SIZE)
        key = tl.load(k + b * k_b + s[:, None] * k_s + c[None, :], mask=own, other=0)
        seen = (t[:, None] < queries) & (s[None, :] < keys)
        g = tl.load(grad + b * g_b + t[:, None] * g_t + s[None, :], mask=seen, other=0).to(tl.float32)
        x = dot(query, key.T, tl.zeros([BT, BS], tl.float32), PRECISION, INTERPRETED) * scale
        left = (x <= 0) | (s[None, :] >= keys)
        d_weight += tl.sum(tl.where(left, g * 0, g * x), 1)
        d = tl.where(left, 0.0, g * weight[:, None] * scale)
        d_query = _times(d, key, d_query, INTERPRETED)
    place = dq + ((b * queries + t[:, None]) * heads + h) * SIZE + c[None, :]
    tl.store(place, as_stored(d_query, dq), mask=inside)
    tl.store(dw + (b * queries + t) * heads + h, as_stored(d_weight, dw), mask=t < queries)


@triton.jit
def index_scores_of_keys(grad, q, k, weights, partial, scale, queries, keys, heads, g_b, g_t, q_b, q_t, q_h, k_b, k_s,
                         w_b, w_t, w_h, PARTS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
                         BT: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
                         INTERPRETED: tl.constexpr):  # fmt: skip
    b, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    s = (tl.program_id(0) * BS + tl.arange(0, BS)).to(tl.int64)
    c = tl.arange(0, LANES)
    scale = single(scale)
    own = (s[:, None] < keys) & (c[None, :] < SIZE)
    key = tl.load(k + b * k_b + s[:, None] * k_s + c[None, :], mask=own, other=0)
    d_key = tl.zeros([BS, LANES], tl.float32)
    for first in range(part * BT, queries, PARTS * BT):
        t = first + tl.arange(0, BT).to(tl.int64)
        seen = (t[:, None] < queries) & (s[None, :] < keys)
        g = tl.load(grad + b * g_b + t[:, None] * g_t + s[None, :], mask=seen, other=0).to(tl.float32)
        for h in range(heads):
            inside = (t[:, None] < queries) & (c[None, :] < SIZE)
            query = tl.load(q + b * q_b + t[:, None] * q_t + h * q_h + c[None, :], mask=inside, other=0)
            weight = tl.load(weights + b * w_b + t * w_t + h * w_h, mask=t < queries, other=0).to(tl.float32)
            x = dot(query, key.T, tl.zeros([BT, BS], tl.float32), PRECISION, INTERPRETED) * scale
            d = tl.where((x <= 0) | (t[:, None] >= queries), 0.0, g * weight[:, None] * scale)
            d_key = _times(d.T, query, d_key, INTERPRETED)
    tl.store(partial + ((part * tl.num_programs(2) + b) * keys + s[:, None]) * SIZE + c[None, :], d_key, mask=own)


_CHOICES = [{"BT": t, "BS": s, "num_warps": w, "num_stages": n}
            for t, s, w in ((64, 128, 4), (128, 128, 8), (128, 64, 4), (64, 256, 8)) for n in (2, 3)]  # fmt: skip
_tiles = Kernel(index_scores_tiles, _CHOICES, key=("SIZE", "heads"))
_of_queries = Kernel(index_scores_of_queries, _CHOICES, key=("SIZE", "heads"))
_of_keys = Kernel(index_scores_of_keys, _CHOICES, key=("SIZE", "heads"))


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    q, k = args[:2] if name == "index_scores" else args[1:3]
    if q.dtype != k.dtype or q.dtype not in (torch.float16, torch.bfloat16):
        return f"queries in {q.dtype}, keys in {k.dtype}: the kernels multiply one half precision"
    if not isinstance(q.shape[-1], int) or q.shape[-1] > MAX_CHANNELS or q.shape[-1] < 16:
        return f"{q.shape[-1]} channels, the kernels take 16 to {MAX_CHANNELS}"
    if any(isinstance(n, int) and n == 0 for n in (*q.shape, *k.shape)):
        return "there is nothing to score"
    return None


def _operands(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> dict[str, Any]:
    q, k = in_sixteens(q), in_sixteens(k)
    return {
        "q": q, "k": k, "weights": weights, "scale": scale, "queries": q.shape[1], "keys": k.shape[1],
        "heads": q.shape[2], "SIZE": q.shape[3], "LANES": power_of_2(q.shape[3]), **strides("q", q, "bth"),
        **strides("k", k, "bs"), **strides("w", weights, "bth"), **multiply(q.dtype),
    }  # fmt: skip


def _blocks(channels: int, wide: bool) -> dict[str, int]:
    """Tiles that leave room for their operands: `wide` ones where one result is in registers."""
    block = 128 if wide and channels <= 128 else 64
    return {"BT": block, "BS": 128 if channels <= 128 else 64, "num_warps": 8 if block == 128 else 4, "num_stages": 2}


def index_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    args = _operands(q, k, weights, scale)
    out = torch.empty((*q.shape[:2], k.shape[1]), dtype=out_dtype, device=q.device)
    _tiles(
        lambda meta: (triton.cdiv(args["keys"], meta["BS"]), triton.cdiv(args["queries"], meta["BT"]), q.shape[0]),
        _blocks(q.shape[3], True), out=out, **args,
    )  # fmt: skip
    return out


def index_scores_backward(
    grad: Tensor, q: Tensor, k: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    args = {**_operands(q, k, weights, scale), "grad": (g := grad.contiguous()), **strides("g", g, "bt")}
    batch, queries, heads, channels = q.shape
    blocks = _blocks(channels, False)
    d_q, d_w = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, weights))
    _of_queries(
        lambda meta: (heads, triton.cdiv(queries, meta["BT"]), batch), blocks, dq=d_q, dw=d_w, **args
    )  # fmt: skip
    tiles = batch * triton.cdiv(k.shape[1], blocks["BS"])
    parts = power_of_2(max(1, PROGRAMS // tiles)) if isinstance(tiles, int) else 4
    partial = torch.empty((parts, *k.shape), dtype=torch.float32, device=k.device)
    _of_keys(
        lambda meta: (triton.cdiv(k.shape[1], meta["BS"]), parts, batch), blocks, partial=partial, PARTS=parts, **args
    )  # fmt: skip
    return d_q, partial.sum(0).to(k.dtype), d_w
