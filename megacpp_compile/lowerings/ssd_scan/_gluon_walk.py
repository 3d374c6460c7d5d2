"""The walk over the chunks of a head on Hopper, in Gluon: as `_triton_walk.ssd_walk`.

There a program waits for every tile, and numbers that it has no registers for go to memory and back in every chunk.
Here the state is transposed, in registers, as wgmma's left operand, and so are the values: of what GEMMs hand to each
other only the weighted scores go through shared memory. TMA brings B and C a chunk ahead, and two programs of a
multiprocessor take turns: one multiplies while the other prepares.
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
    barrier,
    barriers,
    bring_tokens,
    in_parts,
    next_slot,
    power,
    scaled,
    seen_as,
    shared_tile,
    shared_tiles,
    tma_store,
)


@gluon.jit
def _factors(decay, steps, cuts, row, chunk, there, L: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr):
    """Of a head's chunk, number `row`, for each token [4 L]: the logarithm that scores decay by, the step, what
    multiplies what it reads of the state, and what it adds to it. chunk: its number in `cuts`."""
    place = gl.arange(0, 4 * L, gl.BlockedLayout([2], [32], [4], [0]))
    kind, token = place // L, place % L
    there = (place >= 0) & there
    a = gl.load(decay + row * L + token, mask=there, other=0.0)
    end = gl.load(decay + row * L + L - 1 + place * 0, mask=there, other=0.0)
    step = gl.load(steps + row * L + token, mask=there, other=0.0)
    late: gl.constexpr = 2 if REVERSE else 3
    of_decay = power(gl.where(kind == late, end - a, a)) * gl.where(kind == late, step, 1.0)
    if PACKED:
        cut = gl.load(cuts + chunk * L + token, mask=there, other=0)
        last = gl.load(cuts + chunk * L + L - 1 + place * 0, mask=there, other=0)
        of_decay = gl.where(cut == gl.where(kind == late, last, 0), of_decay, 0.0)
    sign: gl.constexpr = -1.0 if REVERSE else 1.0
    return gl.where(kind == 0, sign * a, gl.where(kind == 1, step, of_decay))


@gluon.jit
def _whole(decay, cuts, row, chunk, there, L: gl.constexpr, PACKED: gl.constexpr):
    """The logarithm of the decay over a chunk."""
    whole = gl.load(decay + row * L + L - 1, mask=there, other=0.0)
    if PACKED:
        whole = gl.where(gl.load(cuts + chunk * L + L - 1, mask=there, other=0) == 0, whole, float("-inf"))
    return whole


@gluon.jit
def _bring(q, k, b, first, lane, landed, q_s, k_s, ROWS: gl.constexpr):
    N: gl.constexpr = q_s.shape[1]
    L: gl.constexpr = q_s.shape[0]
    mbarrier.expect(landed, (4 if ROWS else 2) * L * N)
    bring_tokens(k, b, first, lane, landed, k_s)
    if ROWS:
        bring_tokens(q, b, first, lane, landed, q_s)


@gluon.jit
def _bring_values(v, b, first, lane, landed, v_s):
    mbarrier.expect(landed, v_s.shape[0] * v_s.shape[1] * v_s.dtype.primitive_bitwidth // 8)
    bring_tokens(v, b, first, lane, landed, v_s)


@gluon.jit
def ssd_walk_hopper(q, k, v, out, decay, steps, cuts, skip, first, states, last, heads, chunks, per_group, every,
                    kept, skip_h, L: gl.constexpr, P: gl.constexpr, N: gl.constexpr, REVERSE: gl.constexpr,
                    SKIP: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, PACKED: gl.constexpr,
                    STAGES: gl.constexpr):  # fmt: skip
    """q, k, v and out are descriptors of [b, tokens, channels of all groups or heads] by tiles [1, L, N or 64]. Of a
    head's P channels a program has 64."""
    gl.static_assert(gl.num_warps() == 4 and L == 64)
    T: gl.constexpr = gl.bfloat16
    BP: gl.constexpr = 64
    VALUES: gl.constexpr = v.dtype
    OUT: gl.constexpr = out.dtype
    # The state's; those of tiles by tokens; and of their left operands.
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OF_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_L, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, OF_S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, OF_L)
    COLUMN: gl.constexpr = gl.SliceLayout(0, OF_L)
    tile, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    k_s = shared_tiles(T, STAGES, L, N)
    v_s = shared_tile(VALUES, L, BP)
    if ROWS:
        q_s = shared_tiles(T, STAGES, L, N)
        high_s = shared_tiles(T, 2, L, L)
    else:
        q_s = k_s
    rows = gl.allocate_shared_memory(gl.float32, [2, 4 * L], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = barriers(STAGES + 1)
    key_lane, value_lane = h // per_group * N, h * P + tile * BP
    at = (tile * BP + gl.arange(0, BP, gl.SliceLayout(1, OF_S)))[:, None] * N + gl.arange(
        0, N, gl.SliceLayout(0, OF_S)
    )[None, :]
    head = (b * heads + h).to(gl.int64) * P * N
    state = gl.full([BP, N], 0.0, gl.float32, OF_S)
    if FIRST:
        state += gl.load(first + head + at).to(gl.float32)
    own = 0.0
    if SKIP:
        own = gl.load(skip + h * skip_h).to(gl.float32)
    zero = gl.full([BP, L], 0.0, gl.float32, OF_L)
    row_r, row_s = gl.arange(0, L, ROW)[:, None], gl.arange(0, L, COLUMN)[None, :]
    c = chunks - 1 if REVERSE else 0
    forth = -1 if REVERSE else 1
    row = (b * chunks + c) * heads + h
    for slot in gl.static_range(STAGES):
        if slot < chunks:
            _bring(q, k, b, (c + slot * forth) * L, key_lane, full.index(slot), q_s.index(slot), k_s.index(slot), ROWS)
    values_full = full.index(STAGES)
    _bring_values(v, b, c * L, value_lane, values_full, v_s)
    rows.index(0).store(_factors(decay, steps, cuts, row, b * chunks + c, True, L, REVERSE, PACKED))
    whole = _whole(decay, cuts, row, b * chunks + c, True, L, PACKED)
    barrier()
    slot, phase = 0, 0
    for i in range(chunks):
        mine = rows.index(i & 1)
        more = i + 1 < chunks
        chunk = b * chunks + c + forth
        coming = _factors(decay, steps, cuts, row + forth * heads, chunk, more, L, REVERSE, PACKED)
        whole_coming = _whole(decay, cuts, row + forth * heads, chunk, more, L, PACKED)
        # REVERSE: how far the chunk is from being the last of those that make one, or of all.
        behind = gl.minimum(every - 1 - c % every, i) if REVERSE else c % every
        if behind == 0:
            gl.store(states + ((b * kept + c // every) * heads + h).to(gl.int64) * P * N + at, state)
        mbarrier.wait(full.index(slot), phase)
        if ROWS:
            scores = warpgroup_mma(
                q_s.index(slot), k_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            apart = mine.slice(0, L).load(ROW)[:, None] - mine.slice(0, L).load(COLUMN)[None, :]
            keep = row_r <= row_s if REVERSE else row_r >= row_s
            if PACKED:
                of_chunk = cuts + (b * chunks + c) * L
                keep = keep & (gl.load(of_chunk + row_r) == gl.load(of_chunk + row_s))
            weighted = scores * power(gl.where(keep, apart, float("-inf")))
            if REVERSE:
                weighted = weighted * mine.slice(L, L).load(ROW)[:, None]
            else:
                weighted = weighted * mine.slice(L, L).load(COLUMN)[None, :]
            high, low = in_parts(weighted)
            tma.store_wait(0)
            barrier()
            high_s.index(0).store(high)
            high_s.index(1).store(low)
        rows.index(1 - (i & 1)).store(coming)
        fence_async_shared()
        barrier()
        if ROWS:
            high, low = in_parts(state)
            read = warpgroup_mma(
                gl.convert_layout(low, LEFT_S), q_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            read = warpgroup_mma(
                gl.convert_layout(high, LEFT_S), q_s.index(slot).permute((1, 0)), read, is_async=True
            )
        state = scaled(state, gl.exp2(whole))
        if ROWS:
            read = warpgroup_mma_wait(0, deps=[read])
            read = read * mine.slice(2 * L, L).load(COLUMN)[None, :]
        # Not before that GEMM is done: beside what it has in registers these have no place.
        mbarrier.wait(values_full, i & 1)
        values = v_s.permute((1, 0)).load(OF_L)
        wide = values.to(gl.float32)
        if ROWS:
            if SKIP:
                read += wide * own
            if VALUES == T:
                left = gl.convert_layout(values, LEFT)
                read = warpgroup_mma(left, high_s.index(1).permute((1, 0)), read, is_async=True)
                read = warpgroup_mma(left, high_s.index(0).permute((1, 0)), read, is_async=True)
            else:
                left, rest = in_parts(values)
                left = gl.convert_layout(left, LEFT)
                read = warpgroup_mma(gl.convert_layout(rest, LEFT), high_s.index(0).permute((1, 0)), read,
                                     is_async=True)  # fmt: skip
                read = warpgroup_mma(left, high_s.index(1).permute((1, 0)), read, is_async=True)
                read = warpgroup_mma(left, high_s.index(0).permute((1, 0)), read, is_async=True)
        else:
            barrier()
            if more:
                _bring_values(v, b, (c + forth) * L, value_lane, values_full, v_s)
        high, low = in_parts(wide * mine.slice(3 * L, L).load(COLUMN)[None, :])
        state = warpgroup_mma(gl.convert_layout(low, LEFT), k_s.index(slot), state, is_async=True)
        state = warpgroup_mma(gl.convert_layout(high, LEFT), k_s.index(slot), state, is_async=True)
        if ROWS:
            read = warpgroup_mma_wait(2, deps=[read])
            barrier()
            if more:
                _bring_values(v, b, (c + forth) * L, value_lane, values_full, v_s)
            out_s = seen_as(high_s, OUT, L, BP, gl.NVMMASharedLayout.get_default_for([L, BP], OUT))
            out_s.permute((1, 0)).store(read.to(OUT))
            fence_async_shared()
            barrier()
            tma_store(out, [b, c * L, value_lane], out_s.reshape([1, L, BP]))
        state = warpgroup_mma_wait(0, deps=[state])
        barrier()
        if i + STAGES < chunks:
            _bring(q, k, b, (c + STAGES * forth) * L, key_lane, full.index(slot), q_s.index(slot), k_s.index(slot),
                   ROWS)  # fmt: skip
        c += forth
        row += forth * heads
        whole = whole_coming
        slot, phase = next_slot(slot, phase, STAGES)
    gl.store(last + head + at, state)
    if ROWS:
        tma.store_wait(0)
