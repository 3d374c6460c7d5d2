"""The GEMMs of `grouped` on CUDA: the kernels read on the device how many rows a group has and where its weight lies.

`grouped_rows` gives each program one tile of one group. A program finds its group by counting tiles over all groups'
ends, so the launch is as large as the rows could need, and programs without a tile return at once. Separate weights
are found through a table of their addresses; it is made once for a set of weights and kept while they stay in place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.gluon_launch import addresses, launch
from megacpp_compile.lowerings._kernels.kept_tensors import table
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import accumulator, multiply, power_of_2
from megacpp_compile.lowerings._op import compute_dtype

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64,
         torch.float8_e4m3fn: tl.float8e4nv}  # fmt: skip


@triton.jit
def tile_of(ends, rows, tile, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """(group, first row, end of its group) of a tile of BM rows; group E holds the rows of no group."""
    e = tl.arange(0, EP)
    end = tl.load(ends + e, mask=e < E, other=0)
    last = tl.max(end, 0)
    end = tl.where(e < E, end, tl.where(e == E, rows, 0))
    start = tl.where(e == E, last, tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0))
    tiles = tl.where(e <= E, (end - start + BM - 1) // BM, 0)
    behind = tl.cumsum(tiles, 0)
    group = tl.sum(tl.where((e <= E) & (behind <= tile), 1, 0), 0)
    mine = e == group
    first = tl.sum(tl.where(mine, start, 0), 0) + (tile - tl.sum(tl.where(mine, behind - tiles, 0), 0)) * BM
    return group, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def add_gemm(acc, a, b, n, wk, depth, N: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
             INTERPRETED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """`acc` plus the GEMM of a tile's rows at `a` and channels `n` of a weight at `b`, over all of K; depth is K.

    A GPU's assembler unrolls a loop whose rounds it knows to be some 20, which takes it 4 to 6 seconds. A GEMM over
    1408 channels is 6 % faster for it, two in one loop are not: their `depth` is a number it does not know.
    """
    k = tl.arange(0, BK)
    for at in range(0, depth, BK):
        if K % BK == 0:
            left = tl.load(a)
        else:
            left = tl.load(a, mask=k[None, :] < K - at, other=0.0)
        if N % BN == 0 and K % BK == 0:
            right = tl.load(b)
        elif K % BK == 0:
            right = tl.load(b, mask=(n < N)[None, :], other=0.0)
        else:
            right = tl.load(b, mask=(n < N)[None, :] & (k[:, None] < K - at), other=0.0)
        if INTERPRETED:
            left, right = left.to(ACC), right.to(ACC)
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=ACC)
        a += BK
        b += BK * wk
    return acc


@triton.jit
def gemm_of_group(x, weights, table, take, x_scale, m, n, group, rows, xs, ws_e, wn, wk, N: tl.constexpr,
                  K: tl.constexpr, E: tl.constexpr, TABLE: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr,
                  PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """[BM, BN]: the GEMM of rows `m` of a group, or rows take[m], with channels `n` of its weight; zeros for group E.
    x_scale [rows of x] or None: a factor of each row."""
    acc = tl.zeros([BM, BN], ACC)
    if group < E:
        at_row = tl.minimum(m, rows - 1)
        row = (at_row if take is None else tl.load(take + at_row)).to(tl.int64)[:, None]
        k = tl.arange(0, BK)
        if TABLE:
            w = tl.multiple_of(tl.load(table + group).to(tl.pointer_type(TYPE)), 16)
        else:
            w = weights + group.to(tl.int64) * ws_e
        a = x + row * xs + k[None, :]
        b = w + n[None, :] * wn + k[:, None] * wk
        acc = add_gemm(acc, a, b, n, wk, K, N, K, ACC, PRECISION, INTERPRETED, BN, BK)
        if x_scale is not None:
            acc *= tl.load(x_scale + (at_row if take is None else tl.load(take + at_row)))[:, None]
    return acc


@triton.jit
def grouped_rows(x, x2, weights, weights2, table, ends, take, x_scale, w_scale, bias, out, rows, xs, xs2, ws_e, wn, wk,
                 depth, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TABLE: tl.constexpr,
                 SECOND: tl.constexpr, TAKE: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr,
                 PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out[r] = x[r] @ weights[group of r].T (+ x2[r] @ weights2[group of r].T), or of rows take[r]; a row behind all
    groups is zero. x_scale [rows of x] and w_scale [E, N] or None: factors of the GEMMs; bias [E, N] or None."""
    across: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0) // across
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    group, first, stop = tile_of(ends, rows, tile, E, EP, BM)
    if group > E:
        return
    m = first + tl.arange(0, BM)
    acc = tl.zeros([BM, BN], ACC)
    if group < E:
        # Rows of the next group, or the last one again, rather than a mask; they are not stored.
        at_row = tl.minimum(m, rows - 1)
        row = (tl.load(take + at_row) if TAKE else at_row).to(tl.int64)[:, None]
        k = tl.arange(0, BK)
        for part in range(2 if SECOND else 1):  # unrolled, it takes a GPU's assembler half a minute
            source = x if part == 0 else x2
            stride = xs if part == 0 else xs2
            if TABLE:
                w = tl.multiple_of(tl.load(table + part * E + group).to(tl.pointer_type(TYPE)), 16)
            else:
                w = (weights if part == 0 else weights2) + group.to(tl.int64) * ws_e
            a = source + row * stride + k[None, :]
            b = w + n[None, :] * wn + k[:, None] * wk
            acc = add_gemm(acc, a, b, n, wk, depth if SECOND else K, N, K, ACC, PRECISION, INTERPRETED, BN, BK)
        if x_scale is not None:
            acc *= tl.load(x_scale + (tl.load(take + at_row) if TAKE else at_row))[:, None]
        if w_scale is not None:
            acc *= tl.load(w_scale + group * N + n, mask=n < N, other=0)[None, :]
        if bias is not None:
            acc += tl.load(bias + group * N + n, mask=n < N, other=0).to(ACC)[None, :]
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, as_stored(acc, out), mask=(m < stop)[:, None] & (n < N)[None, :])


@triton.jit
def grouped_weights(grad, x, ends, take_grad, take_x, out, gs, xs, N: tl.constexpr, K: tl.constexpr,
                    TAKE_GRAD: tl.constexpr, TAKE_X: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
                    INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out[e] = grad[rows of e].T @ x[rows of e]"""
    e = tl.program_id(1)
    across: tl.constexpr = (K + BK - 1) // BK
    n = (tl.program_id(0) // across) * BN + tl.arange(0, BN)
    k = (tl.program_id(0) % across) * BK + tl.arange(0, BK)
    start = tl.load(ends + e - 1, mask=e > 0, other=0)
    stop = tl.load(ends + e)
    acc = tl.zeros([BN, BK], ACC)
    for at in range(start, stop, BM):
        m = at + tl.arange(0, BM)
        inside = (m < stop)[:, None]
        row_g = (tl.load(take_grad + m, mask=m < stop, other=0) if TAKE_GRAD else m).to(tl.int64)[:, None]
        row_x = (tl.load(take_x + m, mask=m < stop, other=0) if TAKE_X else m).to(tl.int64)[:, None]
        left = tl.load(grad + row_g * gs + n[None, :], mask=inside & (n < N)[None, :], other=0)
        right = tl.load(x + row_x * xs + k[None, :], mask=inside & (k < K)[None, :], other=0)
        if INTERPRETED:
            left, right = left.to(ACC), right.to(ACC)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION, out_dtype=ACC)
    place = (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(out + place, as_stored(acc, out), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def grouped_sums(rows, ends, take, factors, out, rs, N: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    """out[e] = the sum of the rows of e, or of rows take[r], times factors[r] where there are such"""
    e = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    start = tl.load(ends + e - 1, mask=e > 0, other=0)
    stop = tl.load(ends + e)
    acc = tl.zeros([BM, BN], ACC)
    for at in range(start, stop, BM):
        m = at + tl.arange(0, BM)
        row = (m if take is None else tl.load(take + m, mask=m < stop, other=0)).to(tl.int64)[:, None]
        own = tl.load(rows + row * rs + n[None, :], mask=(m < stop)[:, None] & (n < N)[None, :], other=0).to(ACC)
        acc += own if factors is None else own * tl.load(factors + m, mask=m < stop, other=0).to(ACC)[:, None]
    tl.store(out + e.to(tl.int64) * N + n, tl.sum(acc, 0), mask=n < N)


def block_sizes(dtype: torch.dtype, n: int, roomy: bool = False) -> dict[str, int]:
    """Block sizes measured on an H200; those of wide dtypes only have to fit. roomy: a fourth stage, of 48 KiB."""
    if dtype.itemsize == 2:
        return {"BM": 128, "BN": 256 if n >= 256 else 128, "BK": 64, "num_warps": 8, "num_stages": 4 if roomy else 3}
    if dtype.itemsize == 1:
        return {"BM": 128, "BN": 256 if n >= 256 else 128, "BK": 128, "num_warps": 8, "num_stages": 3}
    return {"BM": 32, "BN": 32, "BK": 16, "num_warps": 4, "num_stages": 2}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes a program may have at most."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def equal_strides(weights: Sequence[Tensor]) -> bool:
    return len(set(map(Tensor.stride, weights))) == 1


def table_of(weights: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where each weight begins, as a tensor on the device."""
    return table(tuple(addresses(weights)), torch.int64, device)


def arguments_of(operands: list[Tensor], x: Tensor, offsets: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """(weights [n, k] of every expert, or [E, n, k] of all, with equal strides; the kernel arguments that describe them
    and the dtype of the rows `x`)."""
    if not equal_strides(operands):
        operands = [w.contiguous() for w in operands]
    first, experts, separate = operands[0], offsets.shape[0], operands[0].dim() == 2
    wn, wk = first.stride()[-2:]
    table = table_of(operands, x.device) if separate else offsets
    return operands, {
        "table": table, "ends": offsets, "ws_e": 0 if separate else first.stride(0), "wn": wn, "wk": wk,
        "N": first.shape[-2], "K": first.shape[-1], "E": experts, "EP": power_of_2(experts + 1), "TABLE": separate,
        "TYPE": TYPES[x.dtype], **multiply(x.dtype), "ACC": accumulator(x.dtype),
    }  # fmt: skip


def programs(rows: int, experts: int, n: int, blocks: dict[str, int]) -> tuple[int]:
    """A grid with a program for every tile that `rows` rows in groups can need, and the rows behind them."""
    return ((-(-rows // blocks["BM"]) + experts + 1) * -(-n // blocks["BN"]),)


def rows(
    xs: list[Tensor],
    weights: list[Tensor],
    offsets: Tensor,
    transposed: bool,
    take: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    **sizes: int,
) -> Tensor:
    """[S, n]: as `grouped.rows`. scales: of the rows of x, and of those of the weights [E, n]. dtype: of the result, by
    default the bias's, or else x's."""
    assert len(xs) <= 2
    operands = [w.transpose(-1, -2) if transposed else w for w in weights]
    n = operands[0].shape[-2]
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x in xs]
    x, total = xs[0], (xs[0] if take is None else take).shape[0]
    own = x.dtype if bias is None else bias.dtype
    out = torch.empty((total, n), dtype=dtype or own, device=x.device)
    if not total:
        return out
    operands, arguments = arguments_of(operands, x, offsets)
    # Worth 5 % where weights are read across (1.17 to 1.10 and 2.06 to 1.98 ms on an H200), and nothing elsewhere.
    blocks = {**block_sizes(x.dtype, n, roomy=transposed and _shared_memory(x.device) >= 4 * 48 << 10), **sizes}
    launch(
        grouped_rows, programs(total, offsets.shape[0], n, blocks), x=x, x2=xs[-1], weights=operands[0],
        weights2=operands[-1], take=offsets if take is None else take, x_scale=scales[0], w_scale=scales[1],
        bias=None if bias is None else bias.contiguous(), out=out, rows=total, xs=x.stride(0), xs2=xs[-1].stride(0),
        depth=operands[0].shape[-1], SECOND=len(xs) == 2, TAKE=take is not None, **arguments, **blocks,
    )  # fmt: skip
    return out


def sums(rows: Tensor, offsets: Tensor, take: Tensor | None, factors: Tensor | None) -> Tensor:
    """[E, n]: as `grouped.sums`."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    n, blocks = rows.shape[1], {"BM": 32, "BN": 64, "num_warps": 4}
    out = torch.empty((offsets.shape[0], n), dtype=compute_dtype(rows), device=rows.device)
    launch(
        grouped_sums, (-(-n // blocks["BN"]), offsets.shape[0]), rows=rows, ends=offsets, take=take,
        factors=None if factors is None else factors.contiguous(), out=out, rs=rows.stride(0), N=n,
        ACC=accumulator(rows.dtype), **blocks,
    )  # fmt: skip
    return out


def weights(
    grad: Tensor, x: Tensor, offsets: Tensor, take_grad: Tensor | None, take_x: Tensor | None, **sizes: int
) -> Tensor:
    grad, x = (t if t.stride(-1) == 1 else t.contiguous() for t in (grad, x))
    experts, n, k = offsets.shape[0], grad.shape[1], x.shape[1]
    out = torch.empty((experts, n, k), dtype=x.dtype, device=x.device)
    narrow = x.dtype.itemsize == 2
    blocks = {"BM": 64, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 4} if narrow else (
        {"BM": 16, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 2})  # fmt: skip
    blocks.update(sizes)
    across = -(-n // blocks["BN"]) * -(-k // blocks["BK"])
    launch(
        grouped_weights, (across, experts), grad=grad, x=x, ends=offsets,
        take_grad=offsets if take_grad is None else take_grad, take_x=offsets if take_x is None else take_x, out=out,
        gs=grad.stride(0), xs=x.stride(0), N=n, K=k, TAKE_GRAD=take_grad is not None, TAKE_X=take_x is not None,
        **multiply(x.dtype), ACC=accumulator(x.dtype), **blocks,
    )  # fmt: skip
    return out
