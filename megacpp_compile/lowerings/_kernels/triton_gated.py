"""The first grouped GEMMs of a gated MLP on CUDA: gate, up and activation in one kernel. `triton_grouped` says how
groups and weights are found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation
from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.triton_activations import product
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_grouped import (
    arguments_of,
    block_sizes,
    gemm_of_group,
    programs,
    tile_of,
)


@triton.jit
def grouped_gated(x, gates, ups, table, ends, take, x_scale, w_scale, b_gate, b_up, h_gate, h_up, out, rows, xs, ws_e,
                  wn, wk, hs, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TABLE: tl.constexpr,
                  NAME: tl.constexpr, CURVE: tl.constexpr, BS: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr,
                  PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """h_gate = x @ gate.T, h_up = x @ up.T, out = f(h_gate) * h_up, of rows take[r] or r, with their group's weights.
    x_scale [rows of x] and w_scale [E, 2N], the gate's first, or None: factors of the GEMMs. b_gate and b_up [E, N],
    BS from one expert to the next, or None."""
    across: tl.constexpr = (N + BN - 1) // BN
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    group, first, stop = tile_of(ends, rows, tl.program_id(0) // across, E, EP, BM)
    if group > E:
        return
    m = first + tl.arange(0, BM)
    acc_gate = tl.zeros([BM, BN], ACC)
    acc_up = tl.zeros([BM, BN], ACC)
    if group < E:
        at_row = tl.minimum(m, rows - 1)
        row = (at_row if take is None else tl.load(take + at_row)).to(tl.int64)[:, None]
        k = tl.arange(0, BK)
        if TABLE:
            w_gate = tl.multiple_of(tl.load(table + group).to(tl.pointer_type(TYPE)), 16)
            w_up = tl.multiple_of(tl.load(table + E + group).to(tl.pointer_type(TYPE)), 16)
        else:
            w_gate = gates + group.to(tl.int64) * ws_e
            w_up = ups + group.to(tl.int64) * ws_e
        a = x + row * xs + k[None, :]
        b = n[None, :] * wn + k[:, None] * wk
        for at in range(0, K, BK):
            if N % BN == 0 and K % BK == 0:
                left = tl.load(a)
                gate = tl.load(w_gate + b)
                up = tl.load(w_up + b)
            else:
                mask = (n < N)[None, :] & (k[:, None] < K - at)
                left = tl.load(a, mask=k[None, :] < K - at, other=0.0)
                gate = tl.load(w_gate + b, mask=mask, other=0.0)
                up = tl.load(w_up + b, mask=mask, other=0.0)
            if INTERPRETED:
                left, gate, up = left.to(ACC), gate.to(ACC), up.to(ACC)
            acc_gate = tl.dot(left, gate, acc_gate, input_precision=PRECISION, out_dtype=ACC)
            acc_up = tl.dot(left, up, acc_up, input_precision=PRECISION, out_dtype=ACC)
            a += BK
            b += BK * wk
        if x_scale is not None:
            of_row = tl.load(x_scale + (at_row if take is None else tl.load(take + at_row)))[:, None]
            of_gate = w_scale + group * 2 * N + n
            acc_gate *= of_row * tl.load(of_gate, mask=n < N, other=0)[None, :]
            acc_up *= of_row * tl.load(of_gate + N, mask=n < N, other=0)[None, :]
        if b_gate is not None:
            acc_gate += tl.load(b_gate + group * BS + n, mask=n < N, other=0).to(ACC)[None, :]
        if b_up is not None:
            acc_up += tl.load(b_up + group * BS + n, mask=n < N, other=0).to(ACC)[None, :]
    mask = (m < stop)[:, None] & (n < N)[None, :]
    wide = m.to(tl.int64)[:, None]
    gate, up = as_stored(acc_gate, h_gate), as_stored(acc_up, h_up)
    tl.store(h_gate + wide * hs + n[None, :], gate, mask=mask)
    tl.store(h_up + wide * hs + n[None, :], up, mask=mask)
    made = product(gate.to(ACC), up.to(ACC), NAME, CURVE)
    tl.store(out + wide * N + n[None, :], as_stored(made, out), mask=mask)


@triton.jit
def grouped_interleaved(x, weights, table, ends, take, bias, hidden, out, rows, xs, ws_e, wn, wk, N: tl.constexpr,
                        K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TABLE: tl.constexpr, NAME: tl.constexpr,
                        CURVE: tl.constexpr, TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
                        INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """hidden = x @ weights.T (+ bias), of rows take[r] or r, with their group's weights, and out = f(gate) * up of
    hidden's channels in turn. A tile is one of a plain GEMM, however the weights lie; its accumulator is split in
    registers."""
    across: tl.constexpr = (N + BN - 1) // BN
    part = tl.program_id(0) % across
    n = part * BN + tl.arange(0, BN)
    group, first, stop = tile_of(ends, rows, tl.program_id(0) // across, E, EP, BM)
    if group > E:
        return
    m = first + tl.arange(0, BM)
    acc = gemm_of_group(x, weights, table, take, None, m, n, group, rows, xs, ws_e, wn, wk, N, K, E, TABLE, TYPE,
                        ACC, PRECISION, INTERPRETED, BM, BN, BK)  # fmt: skip
    if group < E and bias is not None:
        acc += tl.load(bias + group * N + n, mask=n < N, other=0).to(ACC)[None, :]
    inside = (m < stop)[:, None]
    wide = m.to(tl.int64)[:, None]
    both = as_stored(acc, hidden)
    tl.store(hidden + wide * N + n[None, :], both, mask=inside & (n < N)[None, :])
    gate, up = both.to(ACC).reshape(BM, BN // 2, 2).split()
    lanes = part * (BN // 2) + tl.arange(0, BN // 2)
    made = product(gate, up, NAME, CURVE)
    tl.store(out + wide * (N // 2) + lanes[None, :], as_stored(made, out), mask=inside & (lanes < N // 2)[None, :])


def gated(
    x: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    offsets: Tensor,
    take: Tensor | None,
    activation: str,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    dtype: torch.dtype | None = None,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(h_gate, h_up, f(h_gate) * h_up); with w_up empty w_gate holds both, [2n, d] of an expert, as h_gate does.
    scales: of the rows of x, and of those of the weights [E, 2n]. dtype: of the results, by default x's. b_gate, b_up:
    biases as the weights, all experts' in one, whose dtypes h_gate and h_up have."""
    fused, curve = not w_up, Activation.parse(activation)
    if fused:
        w_gate, w_up = ([w.chunk(2, -2)[i] for w in w_gate] for i in range(2))
        b_gate, b_up = (None, None) if b_gate is None else b_gate.contiguous().chunk(2, 1)
    else:
        b_gate, b_up = (None if b is None else b.contiguous() for b in (b_gate, b_up))
    if x.stride(-1) != 1:
        x = x.contiguous()
    n, total, dtype = w_gate[0].shape[-2], (x if take is None else take).shape[0], dtype or x.dtype
    wide = [dtype if b is None else b.dtype for b in (b_gate, b_up)][: 2 - fused]
    hidden = [torch.empty((total, n * 2 if fused else n), dtype=of, device=x.device) for of in wide]
    gate, up = hidden[0].chunk(2, 1) if fused else hidden
    out = torch.empty((total, n), dtype=dtype, device=x.device)
    narrow = x.dtype.itemsize <= 2
    blocks = {**block_sizes(x.dtype, n), **({"BN": 128, "num_stages": 3} if narrow else {}), **sizes}
    if total:
        operands, arguments = arguments_of([*w_gate, *w_up], x, offsets)
        launch(
            grouped_gated, programs(total, offsets.shape[0], n, blocks), x=x, gates=operands[0], ups=operands[-1],
            take=take, x_scale=scales[0], w_scale=scales[1], b_gate=b_gate, b_up=b_up, h_gate=gate, h_up=up, out=out,
            rows=total, xs=x.stride(0), hs=gate.stride(0), NAME=curve.name, CURVE=curve.constants,
            BS=2 * n if fused else n, **arguments, **blocks,
        )  # fmt: skip
    return hidden[0], hidden[-1] if not fused else hidden[0].new_empty(0), out


def interleaved(
    x: Tensor, weights: list[Tensor], offsets: Tensor, take: Tensor | None, activation: str, bias: Tensor | None,
    **sizes: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(hidden [S, 2n], f(gate) * up), of weights [2n, d] whose rows are gate's and up's in turn."""
    x, curve = x if x.stride(-1) == 1 else x.contiguous(), Activation.parse(activation)
    n, total = weights[0].shape[-2], (x if take is None else take).shape[0]
    hidden = x.new_empty((total, n), dtype=x.dtype if bias is None else bias.dtype)
    out = x.new_empty((total, n // 2))
    blocks = {**block_sizes(x.dtype, n), **sizes}
    if total:
        operands, arguments = arguments_of(weights, x, offsets)
        launch(
            grouped_interleaved, programs(total, offsets.shape[0], n, blocks), x=x, weights=operands[0], take=take,
            bias=None if bias is None else bias.contiguous(), hidden=hidden, out=out, rows=total, xs=x.stride(0),
            NAME=curve.name, CURVE=curve.constants, **arguments, **blocks,
        )  # fmt: skip
    return hidden, out
