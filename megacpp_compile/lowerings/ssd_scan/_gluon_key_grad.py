"""The gradient of B on Hopper, in Gluon, chunks side by side: as `_triton_gradients.ssd_group_grad` with KEYS.

What this takes is to read the states, of which a chunk has one for each head, larger than its tokens: TMA brings them a
head ahead. In shared memory their numbers become two parts of bfloat16, once for all tokens of the chunk.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import (
    added,
    barrier,
    barriers,
    bring_rows,
    bring_tokens,
    in_parts,
    power,
    put_tokens,
    row_sum,
    seen_as,
    shared_tile,
    shared_tiles,
    tma_load,
)


@gluon.jit
def _bring(x, left, b, first, lane, row, landed, x_s, state_s):
    """A head's tokens, and the gradient of the state that leaves their chunk, number `row`."""
    P: gl.constexpr = state_s.shape[0]
    mbarrier.expect(landed, 2 * x_s.shape[0] * P + 4 * P * state_s.shape[1])
    tma_load(left, [row * P, 0], landed, state_s)
    bring_tokens(x, b, first, lane, landed, x_s)


@gluon.jit
def _factors(decay, steps, cuts, row, chunk, there, L: gl.constexpr, PACKED: gl.constexpr):
    """Of a head's chunk, number `row`: how far each token reaches the state, and the steps [2 L]. chunk: its number in
    `cuts`."""
    place = gl.arange(0, 2 * L, gl.BlockedLayout([1], [32], [8], [0]))
    token, there = row * L + place % L, (place >= 0) & there
    reach = gl.load(decay + row * L + L - 1 + place * 0, mask=there & (place < L), other=0.0)
    reach -= gl.load(decay + token, mask=there & (place < L), other=0.0)
    reach = power(reach)
    if PACKED:
        cut = gl.load(cuts + chunk * L + place % L, mask=there, other=0)
        last = gl.load(cuts + chunk * L + L - 1 + place * 0, mask=there, other=0)
        reach = gl.where(cut == last, reach, 0.0)
    return gl.where(place < L, reach, gl.load(steps + token, mask=there & (place >= L), other=0.0))


@gluon.jit
def _within(d_scores, queries, zero, L: gl.constexpr):
    """The scores' gradient by the chunk's queries."""
    OF_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, L, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_L, 2)
    s, r = gl.arange(0, L, gl.SliceLayout(1, OF_L))[:, None], gl.arange(0, L, gl.SliceLayout(0, OF_L))[None, :]
    high, low = in_parts(gl.load(d_scores + r * L + s))
    out = warpgroup_mma(gl.convert_layout(low, LEFT), queries, zero, use_acc=False, is_async=True)
    out = warpgroup_mma(gl.convert_layout(high, LEFT), queries, out, is_async=True)
    return warpgroup_mma_wait(0, deps=[out])


@gluon.jit
def ssd_key_grad_hopper(x, B, C, d_scores, decay, steps, cuts, left, entering, d_B, dots, inner, heads, chunks,
                        per_group, parts, L: gl.constexpr, P: gl.constexpr, N: gl.constexpr, HB: gl.constexpr,
                        PACKED: gl.constexpr):  # fmt: skip
    """x is a descriptor of [b, tokens, channels of all heads] by tiles [1, L, P]; B, C and d_B of all groups, or parts,
    by [1, L, N]; left, the gradients of the states that leave chunks, and entering, of rows [b c h P] by [P, N]."""
    gl.static_assert(gl.num_warps() == 8 and L == 128)
    T: gl.constexpr = gl.bfloat16
    F: gl.constexpr = gl.float32
    OF_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OF_N)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, N], T)
    c, part, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    keys = shared_tile(T, L, N)
    parts_s = shared_tiles(T, 2, P, N)
    x_s = shared_tiles(T, 2, L, P)
    state_s = shared_tiles(F, 2, P, N)
    enters_s = shared_tile(F, P, N)
    rows = gl.allocate_shared_memory(F, [2, 2 * L], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    landed = barriers(4)
    lane, h, first = part * HB // per_group * N, part * HB, c * L
    row = (b * chunks + c) * heads + h
    queries = seen_as(parts_s, T, L, N, TILE)
    mbarrier.expect(landed.index(2), 4 * L * N)
    bring_tokens(B, b, first, lane, landed.index(2), keys)
    bring_tokens(C, b, first, lane, landed.index(2), queries)
    _bring(x, left, b, first, h * P, row, landed.index(0), x_s.index(0), state_s.index(0))
    if HB > 1:
        _bring(x, left, b, first, (h + 1) * P, row + 1, landed.index(1), x_s.index(1), state_s.index(1))
    bring_rows(entering, row * P, landed.index(3), enters_s)
    rows.index(0).store(_factors(decay, steps, cuts, row, b * chunks + c, True, L, PACKED))
    zero = gl.full([L, N], 0.0, F, OF_N)
    mbarrier.wait(landed.index(2), 0)
    at = ((b * chunks + c) * parts + part).to(gl.int64) * L * L
    total = _within(d_scores + at, queries, zero, L)
    r = gl.arange(0, L, ROW)
    barrier()
    for i in range(HB):
        slot, mine = i & 1, rows.index(i & 1)
        coming = _factors(decay, steps, cuts, row + 1, b * chunks + c, i + 1 < HB, L, PACKED)
        mbarrier.wait(landed.index(slot), (i >> 1) & 1)
        mbarrier.wait(landed.index(3), slot)
        product = gl.full([16], 0.0, F, gl.SliceLayout(1, FLAT))
        for which in gl.static_range(P // 16):
            state = state_s.index(slot).slice(which * 16, 16).load(FLAT)
            high, low = in_parts(state)
            parts_s.index(0).slice(which * 16, 16).store(high)
            parts_s.index(1).slice(which * 16, 16).store(low)
            product += gl.sum(state * enters_s.slice(which * 16, 16).load(FLAT), 1)
        rows.index(1 - slot).store(coming)
        fence_async_shared()
        barrier()
        if i + 1 < HB:
            bring_rows(entering, (row + 1) * P, landed.index(3), enters_s)
        d = warpgroup_mma(x_s.index(slot), parts_s.index(1), zero, use_acc=False, is_async=True)
        d = warpgroup_mma(x_s.index(slot), parts_s.index(0), d, is_async=True)
        d = warpgroup_mma_wait(0, deps=[d])
        # Here, not while that GEMM is under way: of groups of one head some rows then came out wrong (ptxas 12.8).
        gl.store(inner + row, gl.sum(product, 0))
        barrier()
        if i + 2 < HB:
            _bring(x, left, b, first, (h + 2) * P, row + 2, landed.index(slot), x_s.index(slot), state_s.index(slot))
        d = d * mine.slice(0, L).load(ROW)[:, None]
        gl.store(dots + row * L + r, row_sum(d, keys))
        total = added(total, d * mine.slice(L, L).load(ROW)[:, None])
        row += 1
        h += 1
    if d_B.dtype == T:
        put_tokens(keys, total, d_B, b, first, part * N)
    else:
        both: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, N], F)
        put_tokens(seen_as(state_s, F, L, N, both), total, d_B, b, first, part * N)
    tma.store_wait(0)
