"""Gluon device code that kernels for Hopper share: TMA, GEMMs, and sums that stay where they are written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# By the names they have in Triton 3.9, and by those of 3.6.
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(memory, dtype: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as [ROWS, LANES] of `dtype`."""
    if PUBLIC:
        return memory.reinterpret(dtype, [ROWS, LANES], LAYOUT)
    else:
        return memory._reinterpret(dtype, [ROWS, LANES], LAYOUT)


@gluon.jit
def as_tiles(memory, COUNT: gl.constexpr, TALL: gl.constexpr, LANES: gl.constexpr):
    """The same shared memory as so many tiles. One of more than 64 channels lies there as several of 64."""
    T: gl.constexpr = memory.dtype
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TALL, LANES], T)
    if PUBLIC:
        return memory.reinterpret(T, [COUNT, TALL, LANES], L)
    else:
        return memory._reinterpret(T, [COUNT, TALL, LANES], L)


@gluon.jit
def shared_tile(T: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr):
    """A tile in shared memory, as TMA and tensor cores read it."""
    return gl.allocate_shared_memory(T, [ROWS, LANES], gl.NVMMASharedLayout.get_default_for([ROWS, LANES], T))


@gluon.jit
def shared_tiles(T: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr):
    """Several tiles."""
    return gl.allocate_shared_memory(T, [COUNT, ROWS, LANES], gl.NVMMASharedLayout.get_default_for([ROWS, LANES], T))


@gluon.jit
def ring(COUNT: gl.constexpr, FULL: gl.constexpr = 1, EMPTY: gl.constexpr = 1):
    """(full, empty): two barriers for each of so many slots, of so many arrivals each. A fence and a barrier follow."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(full.index(slot), count=FULL)
        mbarrier.init(empty.index(slot), count=EMPTY)
    return full, empty


@gluon.jit
def next_slot(slot, phase, COUNT: gl.constexpr):
    """(slot, phase) behind those of a ring of so many slots."""
    slot += 1
    if slot == COUNT:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def unfenced(COUNT: gl.constexpr):
    """That many barriers, of one arrival each. A fence and a barrier follow."""
    landed = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(COUNT):
        mbarrier.init(landed.index(which), count=1)
    return landed


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """That many, of one arrival each, for all warps to wait at."""
    landed = unfenced(COUNT)
    fence_async_shared()
    barrier()
    return landed


@gluon.jit
def bring_tokens(rows, b, first, lane, landed, to):
    """A tile of `rows` [batch, tokens, lanes of all heads]; what lies beyond the last token is zero."""
    tma_load(rows, [b, first, lane], landed, to.reshape([1, to.shape[0], to.shape[1]]))


@gluon.jit
def bring_rows(flat, row, landed, to):
    """As many rows as `to` has, from number `row` on, and nothing else by that barrier."""
    mbarrier.expect(landed, to.shape[0] * to.shape[1] * to.dtype.primitive_bitwidth // 8)
    tma_load(flat, [row, 0], landed, to)


@gluon.jit
def put_tokens(rows, tile, out, b, first, lane):
    """`tile` to `out` [batch, tokens, lanes] by way of `rows`; what lies beyond the last token is cut."""
    barrier()
    rows.store(tile.to(rows.dtype))
    fence_async_shared()
    barrier()
    tma_store(out, [b, first, lane], rows.reshape([1, rows.shape[0], rows.shape[1]]))


@gluon.jit
def scaled(x, by):
    """x * by, here and now: moved behind GEMMs that are started and not done, the assembler would wait for these."""
    by = gl.convert_layout(gl.full(x.shape, 0.0, gl.float32, x.type.layout) + by, x.type.layout)
    return gl.inline_asm_elementwise("mul.f32 $0, $1, $2;", "=f,f,f", [x, by], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def added(to, x):
    """to + x, here and now: moved to where the sum is used, behind all waits, every x would be kept."""
    return gl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [to, x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def power(x):
    """2^x, here and now: made once for several places, it would be kept between them."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def in_parts(x):
    """A float32 as the sum of two bfloat16 numbers, which is it to 16 bits."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd, less_even, less_odd;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 even, $0, 16;
        and.b32 odd, $0, 0xffff0000;
        sub.f32 less_even, $2, even;
        sub.f32 less_odd, $3, odd;
        cvt.rn.bf16x2.f32 $1, less_odd, less_even;
        }""",
        "=&r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def product(a, b, N: gl.constexpr):
    """a [C, .] @ b [., N] of tiles in shared memory, under way; a warp group has all columns, or one of two half."""
    GROUPS: gl.constexpr = gl.num_warps() // 4
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, N // GROUPS, 16])
    zero = gl.full([a.shape[0], N], 0.0, gl.float32, M)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def multiplied(a, b, acc):
    """acc + a @ b, done."""
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(a, b, acc, is_async=True)])


@gluon.jit
def row_sum(x, rows):
    """Of x * rows, a tile in shared memory, by x's layout: [C]."""
    return gl.sum(x * rows.load(x.type.layout).to(gl.float32), 1)


@gluon.jit
def column_sums(x):
    """Those of even and of odd columns, one after the other: warps exchange half as much at once."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    both = gl.join(gl.sum(even, 0), gl.sum(odd, 0))
    return gl.reshape(both, [x.shape[1]])
