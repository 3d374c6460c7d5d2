"""The grouped GEMMs of a gated MLP and what lies between them, on CUDA: gate, up and activation in one kernel, and
backward's first GEMM with all that follows it up to the next ones. `triton_grouped` says how groups and weights are
found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_grouped import (
    add_gemm,
    arguments_of,
    block_sizes,
    programs,
    tile_of,
)


@triton.jit
def _with_slope(gate, NAME: tl.constexpr):
    """(an activation, its derivative); Triton drops the one that a kernel does not use."""
    if NAME == "silu":
        s = tl.sigmoid(gate)
        return gate * s, s * (1 + gate * (1 - s))
    elif NAME == "gelu":
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        return gate * below, below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    elif NAME == "gelu_tanh":
        s = tl.sigmoid(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        return gate * s, s + 2 * gate * s * (1 - s) * inner
    elif NAME == "relu":
        return tl.maximum(gate, 0), tl.where(gate > 0, 1.0, 0.0).to(gate.dtype)
    else:
        tl.static_assert(NAME == "relu2")
        positive = tl.maximum(gate, 0)
        return positive * positive, 2 * positive


@triton.jit
def _bounded(h, LOW: tl.constexpr, HIGH: tl.constexpr, AT_AN_END: tl.constexpr):
    """(h between LOW and HIGH, its derivative). NaN stays NaN."""
    slope = tl.full(h.shape, 1.0, h.dtype)
    if HIGH is not None:
        slope = tl.where(h > HIGH, 0.0, slope if AT_AN_END == 1 else tl.where(h == HIGH, AT_AN_END, slope))
        h = tl.where(h > HIGH, HIGH, h)
    if LOW is not None:
        slope = tl.where(h < LOW, 0.0, slope if AT_AN_END == 1 else tl.where(h == LOW, AT_AN_END, slope))
        h = tl.where(h < LOW, LOW, h)
    return h, slope.to(h.dtype)


@triton.jit
def _factors(gate, up, NAME: tl.constexpr, CURVE: tl.constexpr):
    """(the factor that gate makes, its derivative, the factor that up makes, its derivative), see `Activation`."""
    gate, before = _bounded(gate, CURVE[2], CURVE[3], CURVE[4])
    if CURVE[0] != 1:
        s = tl.sigmoid(gate * CURVE[0])
        f = gate * s
        slope = s * (1 + gate * CURVE[0] * (1 - s))
    else:
        f, slope = _with_slope(gate, NAME)
    f, behind = _bounded(f, CURVE[5], CURVE[6], CURVE[7])
    up, up_slope = _bounded(up, CURVE[8], CURVE[9], CURVE[10])
    return f, slope * before * behind, up + CURVE[1], up_slope


@triton.jit
def _product(gate, up, NAME: tl.constexpr, CURVE: tl.constexpr):
    if CURVE is None:
        return _with_slope(gate, NAME)[0] * up
    else:
        f, _, factor, _ = _factors(gate, up, NAME, CURVE)
        return f * factor


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
    made = _product(gate.to(ACC), up.to(ACC), NAME, CURVE)
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
        acc = add_gemm(acc, a, b, n, wk, N, K, ACC, PRECISION, INTERPRETED, BN, BK)
        if bias is not None:
            acc += tl.load(bias + group * N + n, mask=n < N, other=0).to(ACC)[None, :]
    inside = (m < stop)[:, None]
    wide = m.to(tl.int64)[:, None]
    both = as_stored(acc, hidden)
    tl.store(hidden + wide * N + n[None, :], both, mask=inside & (n < N)[None, :])
    gate, up = both.to(ACC).reshape(BM, BN // 2, 2).split()
    lanes = part * (BN // 2) + tl.arange(0, BN // 2)
    made = _product(gate, up, NAME, CURVE)
    tl.store(out + wide * (N // 2) + lanes[None, :], as_stored(made, out), mask=inside & (lanes < N // 2)[None, :])


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
    if CURVE is None:
        f, slope = _with_slope(gate, NAME)
    else:
        f, slope, up, up_slope = _factors(gate, up, NAME, CURVE)
    a = f * up
    dot = tl.sum(d_a * a, 1)
    tl.store(out + row * N + n[None, :], as_stored(a * scale, out), mask=inside)
    d_a *= scale
    d = d_hidden + row * (2 * N) + n[None, :]
    tl.store(d, as_stored(d_a * slope * up, d_hidden), mask=inside)
    tl.store(d + N, as_stored(d_a * f if CURVE is None else d_a * f * up_slope, d_hidden), mask=inside)
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
        acc = add_gemm(acc, a, b, n, wk, N, K, ACC, PRECISION, INTERPRETED, BN, BK)
        if x_scale is not None:
            acc *= tl.load(x_scale + (at_row if take is None else tl.load(take + at_row)))[:, None]
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
        grouped_gated[programs(total, offsets.shape[0], n, blocks)](
            x=x, gates=operands[0], ups=operands[-1], take=take, x_scale=scales[0], w_scale=scales[1], b_gate=b_gate,
            b_up=b_up, h_gate=gate, h_up=up, out=out, rows=total, xs=x.stride(0), hs=gate.stride(0), NAME=curve.name,
            CURVE=curve.constants, BS=2 * n if fused else n, **arguments, **blocks,
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
        grouped_interleaved[programs(total, offsets.shape[0], n, blocks)](
            x=x, weights=operands[0], take=take, bias=None if bias is None else bias.contiguous(), hidden=hidden,
            out=out, rows=total, xs=x.stride(0), NAME=curve.name, CURVE=curve.constants, **arguments, **blocks,
        )  # fmt: skip
    return hidden, out


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
        gated_gradients[programs(rows, offsets.shape[0], n, blocks)](
            x=grad, weights=operands[0], take=take, x_scale=scale, h_gate=gate, h_up=up,
            gates=gates.contiguous(), d_hidden=d_hidden, out=out, dots=dots, rows=rows, xs=grad.stride(0),
            hs=gate.stride(0), NAME=curve.name, CURVE=curve.constants, **arguments, **blocks,
        )  # fmt: skip
    return d_hidden, out, dots.sum(0)
