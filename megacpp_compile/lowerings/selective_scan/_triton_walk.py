"""Triton kernels: a chunk's walk over its tokens, forwards or back, and the walk over all chunks that carries states.

A program has one warp, some channels and all of their states: what it reads of a token are vectors of registers, and no
sum leaves the warp. exp2 is all that takes long, one for each token, channel and state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E, power_of_two


@triton.jit
def numbers(pointer, mask):
    """Of any dtype, in float32."""
    return tl.load(pointer, mask=mask, other=0).to(tl.float32)


@triton.jit
def exponents(rate):
    """Of decays as powers of two, for a step of 1. A rate of -inf is the least of numbers: a step of 0, as tokens
    behind the last have, is no decay."""
    power = rate * LOG2_E
    return tl.where(power == float("-inf"), -3.4e38, power)


@triton.jit
def selective_ends(v, dt, A, R, ends, sums, tokens, chunks, v_b, dt_b, R_b,
                   channels: tl.constexpr, N: tl.constexpr, A_d: tl.constexpr, A_n: tl.constexpr, v_t: tl.constexpr,
                   dt_t: tl.constexpr, R_t: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
                   REVERSE: tl.constexpr):  # fmt: skip
    """ends[b, c, d, n]: the state that a chunk of zeros would leave (v = u, R = B), or in REVERSE the gradient of the
    one that enters it, were that of the one it leaves 0 (v = dy, R = C). sums[b, c, d]: of its steps."""
    c, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, n = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN)
    ours, real = d < channels, n < N
    both = ours[:, None] & real[None, :]
    power = exponents(numbers(A + d[:, None] * A_d + n[None, :] * A_n, both))
    count = tl.minimum(L, tokens - c * L)
    first = c * L + (count - 1 if REVERSE else 0)
    v += b * v_b + first.to(tl.int64) * v_t + d
    dt += b * dt_b + first.to(tl.int64) * dt_t + d
    R += b * R_b + first.to(tl.int64) * R_t + n
    ahead = -1 if REVERSE else 1
    state, total, none = tl.zeros([BD, BN], tl.float32), tl.zeros([BD], tl.float32), tl.zeros([1], tl.int32)
    value, step, row = numbers(v, ours), numbers(dt, ours), numbers(R, real)
    for i in range(count):
        # What the next token reads is on its way while this one's exponentials are made.
        more = none + i + 1 < count
        v += ahead * v_t
        dt += ahead * dt_t
        R += ahead * R_t
        value_next, step_next, row_next = numbers(v, ours & more), numbers(dt, ours & more), numbers(R, real & more)
        decay = power_of_two(step[:, None] * power)
        if REVERSE:
            state = (state + value[:, None] * row[None, :]) * decay
        else:
            state = state * decay + (step * value)[:, None] * row[None, :]
        total += step
        value, step, row = value_next, step_next, row_next
    own = (b * chunks + c) * channels + d
    tl.store(ends + own[:, None] * N + n[None, :], state, mask=both)
    tl.store(sums + own, total, mask=ours)


@triton.jit
def selective_carry(ends, sums, A, first, states, last, chunks, first_b, first_d, first_n,
                    channels: tl.constexpr, N: tl.constexpr, A_d: tl.constexpr, A_n: tl.constexpr,
                    BD: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    """states[b, c, d, n]: the state that enters each chunk, or in REVERSE the gradient of the one that leaves it; the
    last goes to `last`."""
    b = tl.program_id(1).to(tl.int64)
    d, n = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN)
    ours = d < channels
    both = ours[:, None] & (n < N)[None, :]
    power = exponents(numbers(A + d[:, None] * A_d + n[None, :] * A_n, both))
    state = tl.zeros([BD, BN], tl.float32)
    if FIRST:
        state += numbers(first + b * first_b + d[:, None] * first_d + n[None, :] * first_n, both)
    for i in range(chunks):
        own = (b * chunks + (chunks - 1 - i if REVERSE else i)) * channels + d
        at = own[:, None] * N + n[None, :]
        tl.store(states + at, state, mask=both)
        decay = power_of_two(tl.load(sums + own, mask=ours, other=0)[:, None] * power)
        state = state * decay + tl.load(ends + at, mask=both, other=0)
    tl.store(last + (b * channels + d)[:, None] * N + n[None, :], state, mask=both)


@triton.jit
def selective_rows(u, dt, A, B, C, D, states, y, tokens, chunks, u_b, dt_b, B_b, C_b,
                   channels: tl.constexpr, N: tl.constexpr, A_d: tl.constexpr, A_n: tl.constexpr, D_d: tl.constexpr,
                   u_t: tl.constexpr, dt_t: tl.constexpr, B_t: tl.constexpr, C_t: tl.constexpr, L: tl.constexpr,
                   BD: tl.constexpr, BN: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """y of a chunk, from the state that enters it."""
    c, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, n = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN)
    ours, real = d < channels, n < N
    both = ours[:, None] & real[None, :]
    power = exponents(numbers(A + d[:, None] * A_d + n[None, :] * A_n, both))
    state = tl.load(states + ((b * chunks + c) * channels + d)[:, None] * N + n[None, :], mask=both, other=0)
    count, first = tl.minimum(L, tokens - c * L), (c * L).to(tl.int64)
    u += b * u_b + first * u_t + d
    dt += b * dt_b + first * dt_t + d
    B += b * B_b + first * B_t + n
    C += b * C_b + first * C_t + n
    y += (b * tokens + first) * channels + d
    skip, none = tl.zeros([BD], tl.float32), tl.zeros([1], tl.int32)
    if SKIP:
        skip += numbers(D + d * D_d, ours)
    value, step, added, read = numbers(u, ours), numbers(dt, ours), numbers(B, real), numbers(C, real)
    for i in range(count):
        more = none + i + 1 < count
        u += u_t
        dt += dt_t
        B += B_t
        C += C_t
        value_next, step_next = numbers(u, ours & more), numbers(dt, ours & more)
        added_next, read_next = numbers(B, real & more), numbers(C, real & more)
        state = state * power_of_two(step[:, None] * power) + (step * value)[:, None] * added[None, :]
        row = tl.sum(state * read[None, :], 1)
        if SKIP:
            row += skip * value
        tl.store(y, as_stored(row, y), mask=ours)
        y += channels
        value, step, added, read = value_next, step_next, added_next, read_next


_ONE_WARP = [{"num_warps": 1, "num_stages": 1}]
ends = Kernel(selective_ends, _ONE_WARP, key=("channels", "N", "L", "BD", "REVERSE"))
carry = Kernel(selective_carry, _ONE_WARP, key=("channels", "N", "BD", "REVERSE"))
rows = Kernel(selective_rows, _ONE_WARP, key=("channels", "N", "L", "BD"))
