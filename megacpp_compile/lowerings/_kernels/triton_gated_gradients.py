"""Backward of the grouped GEMMs of a gated MLP on CUDA: its first GEMM, with all that follows it up to the next ones,
in one kernel; or what follows it alone. `triton_grouped` says how groups and weights are found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation
from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.triton_activations import factors, passed_on
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_grouped import (
    arguments_of,
    block_sizes,
    gemm_of_group,
    programs,
    tile_of,
)

# Rows and channels of a program that multiplies nothing.
BY_LANES = {"BM": 4, "BN": 512, "num_warps": 4}


@triton.jit
def _gradients_of(d_a, m, n, h_gate, h_up, scale, d_hidden, out, hs, stop, until, N: tl.constexpr, NAME: tl.constexpr,
                  CURVE: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """What channels `n` of rows `m` add to `d_a . a`; stores these channels of the results of `gated_gradients`, of
    rows before `stop`. Rows from `until` on belong to no expert."""
    inside = (m < stop)[:, None] & (n < N)[None, :]
    live = inside & (m < until)[:, None]
    row = m.to(tl.int64)[:, None]
    at = row * hs + n[None, :]
    gate = tl.load(h_gate + at, mask=live, other=0).to(ACC)
    up = tl.load(h_up + at, mask=live, other=0).to(ACC)
    f, slope, up, up_slope = factors(gate, up, NAME, CURVE)
    a = f * up
    dot = tl.sum(d_a * a, 1)
    tl.store(out + row * N + n[None, :], as_stored(a * scale, out), mask=inside)
    d_a *= scale
    d = d_hidden + row * (2 * N) + n[None, :]
    tl.store(d, as_stored(passed_on(d_a * slope * up, slope, NAME, CURVE), d_hidden), mask=inside)
    tl.store(d + N, as_stored(passed_on(d_a * f * up_slope, up_slope, NAME, CURVE), d_hidden), mask=inside)
    return dot


@triton.jit
def gated_gradients(x, weights, table, ends, take, x_scale, h_gate, h_up, gates, d_hidden, out, dots, rows, xs, ws_e,
                    wn, wk, hs, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
                    TABLE: tl.constexpr, NAME: tl.constexpr, CURVE: tl.constexpr,
                    TYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """With a = f(h_gate) * h_up, and `x[take[r]] @ weights[group of r].T * gates[r]` the gradient of a's row r: the
    gradients of h_gate and h_up, side by side; `a * gates`; and, in a row of `dots` for each BN channels, what
    these add to the gradient of the row's gate. Rows behind all groups are zero. Without `take`, x has their order;
    x_scale [rows of x] or None: factors of the GEMM.

    Two programs share an SM, so that one multiplies while the other is at its last lines. They are taken in quarters:
    whole, an SM's registers are too few."""
    across: tl.constexpr = (N + BN - 1) // BN
    part = tl.program_id(0) % across
    n = part * BN + tl.arange(0, BN)
    group, first, stop = tile_of(ends, rows, tl.program_id(0) // across, E, EP, BM)
    if group > E:
        return
    m = first + tl.arange(0, BM)
    acc = gemm_of_group(x, weights, table, take, x_scale, m, n, group, rows, xs, ws_e, wn, wk, N, K, E, TABLE, TYPE,
                        ACC, PRECISION, INTERPRETED, BM, BN, BK)  # fmt: skip
    until = tl.where(group < E, stop, 0)
    scale = tl.load(gates + m, mask=m < until, other=0).to(ACC)[:, None]
    dot = tl.zeros([BM], ACC)
    first_half, last_half = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
    for half in tl.static_range(2):
        one, two = (first_half if half == 0 else last_half).reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
        for quarter in tl.static_range(2):
            lanes = part * BN + (2 * half + quarter) * (BN // 4) + tl.arange(0, BN // 4)
            d_a = one if quarter == 0 else two
            dot += _gradients_of(d_a, m, lanes, h_gate, h_up, scale, d_hidden, out, hs, stop, until, N, NAME, CURVE,
                                 ACC)  # fmt: skip
    tl.store(dots + part.to(tl.int64) * rows + m, dot, mask=m < stop)


@triton.jit
def gated_gradients_of_rows(ends, h_gate, h_up, gates, d_hidden, out, dots, rows, hs, N: tl.constexpr,
                            E: tl.constexpr, NAME: tl.constexpr, CURVE: tl.constexpr, ACC: tl.constexpr,
                            BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """What `gated_gradients` does behind its GEMM, whose result is in `out`, which is overwritten."""
    part = tl.program_id(1)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), part * BN + tl.arange(0, BN)
    until = tl.load(ends + (E - 1))
    live = (m < until)[:, None] & (n < N)[None, :]
    d_a = tl.load(out + m.to(tl.int64)[:, None] * N + n[None, :], mask=live, other=0).to(ACC)
    scale = tl.load(gates + m, mask=m < until, other=0).to(ACC)[:, None]
    dot = _gradients_of(d_a, m, n, h_gate, h_up, scale, d_hidden, out, hs, rows, until, N, NAME, CURVE, ACC)
    tl.store(dots + part.to(tl.int64) * rows + m, dot, mask=m < rows)


def gradients_of_rows(
    d_a: Tensor, gate: Tensor, up: Tensor, gates: Tensor, offsets: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `gradients`, from those of its GEMM, `d_a` [S, n], which the second is written over. gate and up
    lie alike, with channels side by side."""
    curve, (rows, n) = Activation.parse(activation), d_a.shape
    d_hidden, dots = d_a.new_empty((rows, 2 * n)), gates.new_empty((triton.cdiv(n, BY_LANES["BN"]), rows))
    launch(
        gated_gradients_of_rows, (triton.cdiv(rows, BY_LANES["BM"]), dots.shape[0]), ends=offsets, h_gate=gate,
        h_up=up, gates=gates.contiguous(), d_hidden=d_hidden, out=d_a, dots=dots, rows=rows, hs=gate.stride(0), N=n,
        E=offsets.shape[0], NAME=curve.name, CURVE=curve.constants, ACC=tl.float32, **BY_LANES,
    )  # fmt: skip
    return d_hidden, d_a, dots.sum(0)


def _two_programs(narrow: bool) -> dict[str, int]:
    """The launch option that leaves room for two programs of 8 warps on an SM; NVIDIA's compiler alone takes it."""
    return {"maxnreg": 128} if narrow and torch.version.cuda is not None else {}


def gradients(
    grad: Tensor,
    weights: list[Tensor],
    hidden: list[Tensor],
    gates: Tensor,
    offsets: Tensor,
    take: Tensor | None,
    activation: str,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradients of gate and up, side by side; the down-projection's input times the gates; gradients of the gates),
    see `gated_gradients`.

    weights: of the down-projection; hidden: gate and up, or one tensor of both; scale: of the rows of `grad`; dtype: of
    the results, by default that of `grad`.
    """
    hidden = [h if h.stride(-1) == 1 else h.contiguous() for h in hidden]
    curve = Activation.parse(activation)
    gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)
    if gate.stride() != up.stride():
        gate, up = gate.contiguous(), up.contiguous()
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    rows, n = gate.shape
    narrow = grad.dtype.itemsize <= 2
    blocks = {**block_sizes(grad.dtype, n), **({"BN": 128} if narrow else {}), **_two_programs(narrow), **sizes}
    d_hidden, out = (grad.new_empty((rows, width), dtype=dtype or grad.dtype) for width in (2 * n, n))
    dots = gates.new_empty((-(-n // blocks["BN"]), rows))
    if rows:
        operands, arguments = arguments_of([w.transpose(-1, -2) for w in weights], grad, offsets)
        launch(
            gated_gradients, programs(rows, offsets.shape[0], n, blocks), x=grad, weights=operands[0], take=take,
            x_scale=scale, h_gate=gate, h_up=up, gates=gates.contiguous(), d_hidden=d_hidden, out=out, dots=dots,
            rows=rows, xs=grad.stride(0), hs=gate.stride(0), NAME=curve.name, CURVE=curve.constants, **arguments,
            **blocks,
        )  # fmt: skip
    return d_hidden, out, dots.sum(0)
