"""Triton kernels from logits to the weights of streams and their mixing matrix, and back: a token's matrix stays in
registers through all normalisations.

Backward goes through them in reverse: a matrix before a step is the one behind it times what the step divided by, and
that alone, a number a row or column, is written to memory in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel

# Tokens of a program.
TOKENS = 32


@triton.jit
def _began(z, inside, INIT: tl.constexpr):
    """The matrix that normalisation begins with, without its epsilon; 0 outside."""
    if INIT == "softmax" or INIT == "softmax_columns":
        axis: tl.constexpr = 2 if INIT == "softmax" else 1
        z = tl.where(inside, z, float("-inf"))
        top = tl.max(z, axis, keep_dims=True)
        z = tl.exp(z - tl.where(top == float("-inf"), 0, top))
        z = z / tl.sum(z, axis, keep_dims=True)
    elif INIT == "exp":
        z = tl.exp(z)
    elif INIT == "sigmoid":
        z = 1 / (1 + tl.exp(-z))
    elif INIT == "tanh":
        z = 2 / (1 + tl.exp(-2 * z)) - 1
    return tl.where(inside, z, float("-inf") if INIT == "log" else 0)


@triton.jit
def _divisor(mix, inside, eps, AXIS: tl.constexpr, LOG: tl.constexpr):
    """What a normalisation along AXIS divides by, or subtracts; 1 or 0 for rows that there are none of."""
    if LOG:
        top = tl.max(mix, AXIS, keep_dims=True)
        top = tl.where(top == float("-inf"), 0, top)
        s = top + tl.log(tl.sum(tl.exp(mix - top), AXIS, keep_dims=True))
        return tl.where(inside, s, 0)
    return tl.where(inside, tl.sum(mix, AXIS, keep_dims=True) + eps, 1)


@triton.jit
def _step(mix, rows, columns, eps, AXIS: tl.constexpr, LOG: tl.constexpr):
    s = _divisor(mix, rows if AXIS == 2 else columns, eps, AXIS, LOG)
    if LOG:
        mix -= s
    else:
        mix /= s
    return mix, s


@triton.jit
def _affine(sums, at, scale, base, rrms, row, lane, splits, M: tl.constexpr, MP: tl.constexpr, inside):
    """(logits, logits * scale + base) of rows `lane` of the weight: the sum of its products with parts of a token."""
    total = tl.zeros(inside.shape, tl.float32)
    for part in range(splits):
        total += tl.load(sums + part * at + row * MP + lane, mask=inside, other=0)
    total *= rrms
    own = lane < M
    z = total * tl.load(scale + lane, mask=own, other=0).to(tl.float32)
    return total, z + tl.load(base + lane, mask=own, other=0).to(tl.float32)


@triton.jit
def maps_of_logits(sums, squares, scale, base, pre, post, mix, logits, rrms, tokens, splits, norm_eps, width,
                   pre_factor, pre_shift, post_factor, post_shift, eps0, eps1, N: tl.constexpr, NP: tl.constexpr,
                   M: tl.constexpr, MP: tl.constexpr, POST: tl.constexpr, INIT: tl.constexpr, STEPS: tl.constexpr,
                   FIRST: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    there = t < tokens
    total = tl.zeros([BT], tl.float32)
    for part in range(splits):
        total += tl.load(squares + part * tl.cast(tokens, tl.int64) + t, mask=there, other=0)
    r = 1 / tl.sqrt(total / width + single(norm_eps))
    tl.store(rrms + t, r, mask=there)
    at = tl.cast(tokens, tl.int64) * MP
    row, lane = t[:, None], tl.arange(0, NP)[None, :]
    inside = there[:, None] & (lane < N)
    made, z = _affine(sums, at, scale, base, r[:, None], row, lane, splits, M, MP, inside)
    tl.store(logits + row * M + lane, made, mask=inside)
    tl.store(pre + row * N + lane, single(pre_factor) / (1 + tl.exp(-z)) + single(pre_shift), mask=inside)
    if POST:
        made, z = _affine(sums, at, scale, base, r[:, None], row, N + lane, splits, M, MP, inside)
        tl.store(logits + row * M + N + lane, made, mask=inside)
        tl.store(post + row * N + lane, single(post_factor) / (1 + tl.exp(-z)) + single(post_shift), mask=inside)
    if INIT != "":
        row, i, j = t[:, None, None], tl.arange(0, NP)[None, :, None], tl.arange(0, NP)[None, None, :]
        first: tl.constexpr = 2 * N if POST else N
        element = i * N + j
        square = (i < N) & (j < N)
        inside = there[:, None, None] & square
        made, z = _affine(sums, at, scale, base, r[:, None, None], row, first + element, splits, M, MP, inside)
        tl.store(logits + row * M + first + element, made, mask=inside)
        log: tl.constexpr = INIT == "log"
        m = _began(z, square, INIT)
        if not log:
            m = tl.where(square, m + single(eps0), 0)
        for _ in range(STEPS // 2):
            m, _s = _step(m, i < N, j < N, single(eps1), FIRST, log)
            m, _s = _step(m, i < N, j < N, single(eps1), 3 - FIRST, log)
        if STEPS % 2:
            m, _s = _step(m, i < N, j < N, single(eps1), FIRST, log)
        tl.store(mix + row * N * N + element, tl.exp(m) if log else m, mask=inside)


@triton.jit
def _back(grad, mix, divisors, rows, columns, inside, AXIS: tl.constexpr, LOG: tl.constexpr, i, j):
    """(the gradient before a step, the matrix before it), from those behind it."""
    at = divisors + (i if AXIS == 2 else j)
    s = tl.load(at, mask=rows if AXIS == 2 else columns, other=0 if LOG else 1)
    if LOG:
        grad -= tl.where(inside, tl.exp(mix), 0) * tl.sum(grad, AXIS, keep_dims=True)
        mix += s
    else:
        grad = (grad - tl.sum(grad * mix, AXIS, keep_dims=True)) / s
        mix *= s
    return tl.where(inside, grad, 0), mix


@triton.jit
def maps_backward(d_pre, d_post, d_mix, logits, scale, base, divisors, d_affine, tokens, x_t, x_i, x_j, pre_factor,
                  post_factor, eps0, eps1, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, POST: tl.constexpr,
                  INIT: tl.constexpr, STEPS: tl.constexpr, FIRST: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    row, lane = t[:, None], tl.arange(0, NP)[None, :]
    inside = (row < tokens) & (lane < N)
    made = tl.load(logits + row * M + lane, mask=inside, other=0)
    z = made * tl.load(scale + lane, mask=lane < N, other=0) + tl.load(base + lane, mask=lane < N, other=0)
    s = 1 / (1 + tl.exp(-z))
    g = tl.load(d_pre + row * N + lane, mask=inside, other=0) * single(pre_factor)
    tl.store(d_affine + row * M + lane, g * s * (1 - s), mask=inside)
    if POST:
        made = tl.load(logits + row * M + N + lane, mask=inside, other=0)
        z = made * tl.load(scale + N + lane, mask=lane < N, other=0) + tl.load(base + N + lane, mask=lane < N, other=0)
        s = 1 / (1 + tl.exp(-z))
        g = tl.load(d_post + row * N + lane, mask=inside, other=0).to(tl.float32) * single(post_factor)
        tl.store(d_affine + row * M + N + lane, g * s * (1 - s), mask=inside)
    if INIT != "":
        row, i, j = t[:, None, None], tl.arange(0, NP)[None, :, None], tl.arange(0, NP)[None, None, :]
        first: tl.constexpr = 2 * N if POST else N
        own = first + i * N + j
        square = (i < N) & (j < N)
        inside = (row < tokens) & square
        rows, columns = (row < tokens) & (i < N), (row < tokens) & (j < N)
        made = tl.load(logits + row * M + own, mask=inside, other=0)
        z = made * tl.load(scale + own, mask=square, other=0) + tl.load(base + own, mask=square, other=0)
        log: tl.constexpr = INIT == "log"
        began = _began(z, square, INIT)
        m = began
        if not log:
            m = tl.where(square, m + single(eps0), 0)
        at = divisors + row * STEPS * NP
        for k in range(STEPS // 2):
            m, one = _step(m, i < N, j < N, single(eps1), FIRST, log)
            tl.store(at + 2 * k * NP + (i if FIRST == 2 else j), one, mask=rows if FIRST == 2 else columns)
            m, other = _step(m, i < N, j < N, single(eps1), 3 - FIRST, log)
            tl.store(at + (2 * k + 1) * NP + (j if FIRST == 2 else i), other, mask=columns if FIRST == 2 else rows)
        if STEPS % 2:
            m, last = _step(m, i < N, j < N, single(eps1), FIRST, log)
            tl.store(at + (STEPS - 1) * NP + (i if FIRST == 2 else j), last, mask=rows if FIRST == 2 else columns)
        tl.debug_barrier()
        grad = tl.load(d_mix + row * x_t + i * x_i + j * x_j, mask=inside, other=0).to(tl.float32)
        if log:
            grad *= tl.where(square, tl.exp(m), 0)
        if STEPS % 2:
            grad, m = _back(grad, m, at + (STEPS - 1) * NP, rows, columns, inside, FIRST, log, i, j)
        for k in range(STEPS // 2):
            step = STEPS // 2 * 2 - 1 - 2 * k
            grad, m = _back(grad, m, at + step * NP, rows, columns, inside, 3 - FIRST, log, i, j)
            grad, m = _back(grad, m, at + (step - 1) * NP, rows, columns, inside, FIRST, log, i, j)
        if INIT == "softmax":
            grad = began * (grad - tl.sum(grad * began, 2, keep_dims=True))
        elif INIT == "softmax_columns":
            grad = began * (grad - tl.sum(grad * began, 1, keep_dims=True))
        elif INIT == "exp":
            grad *= began
        elif INIT == "sigmoid":
            grad *= began * (1 - began)
        elif INIT == "tanh":
            grad *= 1 - began * began
        tl.store(d_affine + row * M + own, grad, mask=inside)


_CHOICES = [{"BT": bt, "num_warps": w} for bt, w in ((16, 2), (32, 4), (64, 4), (128, 8))]
of_logits = Kernel(maps_of_logits, _CHOICES, key=("N", "STEPS"))
backward = Kernel(maps_backward, _CHOICES, key=("N", "STEPS"))
