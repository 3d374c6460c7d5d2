"""The Triton kernel of `selective_scan`'s gradients: a chunk's tokens from the last, with their states made anew.

States are kept every `K` tokens of a chunk, in memory that a program takes for chunk after chunk, mostly of L2, and
those of `K` tokens in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import power_of_two
from megacpp_compile.lowerings.selective_scan._triton_walk import exponents, numbers


@triton.jit
def selective_gradients(dy, u, dt, A, B, C, D, states, left, kept, du, d_dt, dA, dB, dC, dD,
                        tokens, chunks, groups, items, dy_b, u_b, dt_b, B_b, C_b,
                        channels: tl.constexpr, N: tl.constexpr, A_d: tl.constexpr, A_n: tl.constexpr,
                        D_d: tl.constexpr, dy_t: tl.constexpr, u_t: tl.constexpr, dt_t: tl.constexpr,
                        B_t: tl.constexpr, C_t: tl.constexpr, L: tl.constexpr,
                        K: tl.constexpr, EACH: tl.constexpr, BD: tl.constexpr,
                        BN: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """An item is a chunk and a group of EACH blocks of BD channels, which a program takes one after another.

    du, d_dt [b, t, d]; over chunks, dA [b, c, d, n] and dD [b, c, d]; over groups, dB and dC [b, g, t, n].
    left [b, c, d, n]: the gradient of the state that leaves a chunk. kept [programs, L / K, BD, BN] is the programs'
    own.
    """
    n, lane = tl.arange(0, BN), tl.arange(0, BD)
    real, none = n < N, tl.zeros([1], tl.int32)
    kept += tl.program_id(0).to(tl.int64) * ((L + K - 1) // K) * BD * BN + lane[:, None] * BN + n[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        g, c, b = item % groups, item // groups % chunks, (item // groups // chunks).to(tl.int64)
        first, count = (c * L).to(tl.int64), tl.minimum(L, tokens - c * L)
        parts, shared = (count + K - 1) // K, ((b * groups + g) * tokens + first) * N + n
        for j in range(EACH):
            d = (g * EACH + j) * BD + lane
            ours = d < channels
            both = ours[:, None] & real[None, :]
            rate = numbers(A + d[:, None] * A_d + n[None, :] * A_n, both)
            power = exponents(rate)
            own = (b * chunks + c) * channels + d
            at = own[:, None] * N + n[None, :]
            state = tl.load(states + at, mask=both, other=0)
            u_d, dt_d = u + b * u_b + first * u_t + d, dt + b * dt_b + first * dt_t + d
            dy_d, out = dy + b * dy_b + first * dy_t + d, (b * tokens + first) * channels + d
            B_n, C_n = B + b * B_b + first * B_t + n, C + b * C_b + first * C_t + n
            for part in range(parts):
                tl.store(kept + part * BD * BN, state)
                if part + 1 < parts:
                    u_k, dt_k, B_k = u_d + part * K * u_t, dt_d + part * K * dt_t, B_n + part * K * B_t
                    for k in tl.static_range(K):
                        step = numbers(dt_k + k * dt_t, ours)
                        value = step * numbers(u_k + k * u_t, ours)
                        added = value[:, None] * numbers(B_k + k * B_t, real)[None, :]
                        state = state * power_of_two(step[:, None] * power) + added
            tl.debug_barrier()
            grad = tl.load(left + at, mask=both, other=0)
            d_rate, d_skip = tl.zeros([BD, BN], tl.float32), tl.zeros([BD], tl.float32)
            skip = tl.zeros([BD], tl.float32)
            if SKIP:
                skip += numbers(D + d * D_d, ours)
            for i in range(parts):
                begin = (parts - 1 - i) * K
                rest = count - begin  # tokens of the chunk from here on
                u_k, dt_k, dy_k = u_d + begin * u_t, dt_d + begin * dt_t, dy_d + begin * dy_t
                B_k, C_k, out_k = B_n + begin * B_t, C_n + begin * C_t, out + begin * channels
                shared_k = shared + begin * N
                state = tl.load(kept + (parts - 1 - i) * BD * BN)
                behind, decays, steps, values, rows = (state,), (), (), (), ()
                d_rows, reads, of_Bs, of_Cs = (), (), (), ()
                for k in tl.static_range(K):
                    there = none + k < rest
                    # All that is read of these tokens is asked for before the first of it is waited for. Block after
                    # block of a group adds its part to dB and dC; who begins has nothing to read.
                    earlier = real & there & (none + j > 0)
                    d_rows = d_rows + (numbers(dy_k + k * dy_t, ours & there),)  # type: ignore[assignment]
                    reads = reads + (numbers(C_k + k * C_t, real & there),)  # type: ignore[assignment]
                    of_Bs = of_Bs + (tl.load(dB + shared_k + k * N, mask=earlier, other=0),)  # type: ignore[assignment]
                    of_Cs = of_Cs + (tl.load(dC + shared_k + k * N, mask=earlier, other=0),)  # type: ignore[assignment]
                    steps = steps + (numbers(dt_k + k * dt_t, ours & there),)  # type: ignore[assignment]
                    values = values + (numbers(u_k + k * u_t, ours & there),)  # type: ignore[assignment]
                    rows = rows + (numbers(B_k + k * B_t, real & there),)  # type: ignore[assignment]
                for k in tl.static_range(K):
                    decay = power_of_two(steps[k][:, None] * power)
                    state = state * decay + (steps[k] * values[k])[:, None] * rows[k][None, :]
                    behind, decays = behind + (state,), decays + (decay,)  # type: ignore[assignment]
                for back in tl.static_range(K):
                    there = none + (K - 1 - back) < rest
                    d_row, read = d_rows[K - 1 - back], reads[K - 1 - back]  # type: ignore[var-annotated]
                    step, value, decay = steps[K - 1 - back], values[K - 1 - back], decays[K - 1 - back]
                    own_rows = shared_k + (K - 1 - back) * N
                    of_B, of_C = of_Bs[K - 1 - back], of_Cs[K - 1 - back]  # type: ignore[var-annotated]
                    of_C += tl.sum(d_row[:, None] * behind[K - back], 0)
                    grad += d_row[:, None] * read[None, :]
                    of_B += tl.sum(grad * (step * value)[:, None], 0)
                    entering = tl.sum(grad * rows[K - 1 - back][None, :], 1)
                    grad *= decay
                    exponent = grad * behind[K - 1 - back]
                    d_rate += exponent * step[:, None]
                    of_step = tl.sum(exponent * rate, 1) + value * entering
                    of_value = step * entering
                    if SKIP:
                        of_value += skip * d_row
                        d_skip += d_row * value
                    at_row = out_k + (K - 1 - back) * channels
                    tl.store(du + at_row, as_stored(of_value, du), mask=ours & there)
                    tl.store(d_dt + at_row, as_stored(of_step, d_dt), mask=ours & there)
                    tl.store(dB + own_rows, of_B, mask=real & there)
                    tl.store(dC + own_rows, of_C, mask=real & there)
            tl.store(dA + at, d_rate, mask=both)
            if SKIP:
                tl.store(dD + own, d_skip, mask=ours)
            tl.debug_barrier()


gradients = Kernel(
    selective_gradients, [{"num_warps": 1, "num_stages": 1}], key=("channels", "N", "L", "K", "EACH", "BD", "SKIP")
)
