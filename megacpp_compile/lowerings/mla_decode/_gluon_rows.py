"""What `mla_decode`'s Gluon kernels have in common: their part of a sequence, and rows of fewer bits as bfloat16.

Rows are read as words of 32 bits, and what a word stands for is stored in the order that is the cheapest to make. So
channels lie at other places in shared memory than in the cache; queries are brought into the same order, and results
back. KIND is PLAIN (bfloat16), FP8 (e4m3, of which a word is 4 channels) or CODES (a word is 8 of 4 bits).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLAIN, FP8, CODES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# e4m3's exponent and mantissa moved to where bfloat16 has them are the number times 2^-120, which one exact
# multiplication undoes, subnormal or not. Channels 0 and 2 come first, then 1 and 3.
_WIDEN = gl.constexpr(
    "{ .reg .b32 v, t, u, m; mov.b32 m, 0x7b807b80; shl.b32 v, $2, 8;"
    " shr.b32 t, v, 4; and.b32 t, t, 0x07f007f0; and.b32 u, v, 0x80008000; or.b32 t, t, u; mul.rn.bf16x2 $0, t, m;"
    " shr.b32 t, $2, 4; and.b32 t, t, 0x07f007f0; and.b32 u, $2, 0x80008000; or.b32 t, t, u; mul.rn.bf16x2 $1, t, m; }"
)
# A byte permutation is a look-up of four codes of 3 bits among 8 bytes; the fourth bit chooses between two of them. Low
# and high bytes of the 16 entries are in four registers each.
_HALF = (
    " prmt.b32 x, $5, $6, s; prmt.b32 y, $7, $8, s; prmt.b32 lo, x, y, c;"
    " prmt.b32 x, $9, $10, s; prmt.b32 y, $11, $12, s; prmt.b32 hi, x, y, c;"
)
_LOOK_UP = gl.constexpr(
    "{ .reg .b32 s, c, x, y, lo, hi; and.b32 s, $4, 0x77777777; shr.b32 c, $4, 1; and.b32 c, c, 0x44444444;"
    " or.b32 c, c, 0x32103210;"
    + _HALF + " prmt.b32 $0, lo, hi, 0x5140; prmt.b32 $1, lo, hi, 0x7362; shr.b32 s, s, 16; shr.b32 c, c, 16;"
    + _HALF + " prmt.b32 $2, lo, hi, 0x5140; prmt.b32 $3, lo, hi, 0x7362; }"
)  # fmt: skip
_SCALE = gl.constexpr(
    "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;"
    " mul.f32 a, a, $2; mul.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }"
)
_LOOK_UP_CONSTRAINTS = gl.constexpr("=&r,=&r,=&r,=&r" + 9 * ",r")


@gluon.jit
def part(lengths, b, rows, splits, l_b, BK: gl.constexpr):
    """(The sequence's length, the first and the end of this program's rows, of those there are)."""
    length = gl.load(lengths + b * l_b).to(gl.int32)
    there = gl.minimum(length, rows)
    each = gl.cdiv(gl.cdiv(there, splits), BK) * BK
    start = gl.program_id(1) * each
    return length, start, gl.minimum(start + each, there)


@gluon.jit
def channel(place, HALF: gl.constexpr, KIND: gl.constexpr):
    """Which channel of its part, of 2 HALF, lies at a place."""
    if KIND == FP8:
        return (place & -4) | ((place & 1) << 1) | ((place >> 1) & 1)
    elif KIND == CODES:
        return (place >> 1) + (place & 1) * HALF
    else:
        return place


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _plane(codebook, first: gl.constexpr, high: gl.constexpr):
    """The low or high bytes of four entries, rounded to bfloat16, as a word."""
    word = 0
    for i in gl.static_range(4):
        entry = gl.load(codebook + first + i).to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32)
        word |= ((entry >> (8 if high else 0)) & 255) << (8 * i)
    return word


@gluon.jit
def planes(codebook, KIND: gl.constexpr):
    """The codebook as eight words; none where there is none."""
    if KIND == CODES:
        return (_plane(codebook, 0, False), _plane(codebook, 4, False), _plane(codebook, 8, False),
                _plane(codebook, 12, False), _plane(codebook, 0, True), _plane(codebook, 4, True),
                _plane(codebook, 8, True), _plane(codebook, 12, True))  # fmt: skip
    else:
        return (0, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def read(kv, kv_s, first, end, word, WORDS: gl.constexpr, BK: gl.constexpr, KIND: gl.constexpr):
    """WORDS of a tile's rows. What a thread reads at once becomes 16 bytes of shared memory."""
    VEC: gl.constexpr = 1 if KIND == CODES else 2
    ACROSS: gl.constexpr = min(32, WORDS // VEC)
    L: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    row = first + gl.arange(0, BK, gl.SliceLayout(1, L))
    word += gl.arange(0, WORDS, gl.SliceLayout(0, L))
    at = (kv + row.to(gl.int64) * kv_s)[:, None] + word[None, :]
    at = gl.max_contiguous(gl.multiple_of(at, [1, 4 * VEC]), [1, VEC])
    return gl.load(at, mask=(row < end)[:, None] & (word >= 0)[None, :], other=0)


@gluon.jit
def scale_of(row_scale, s_s, row, end):
    return gl.load(row_scale + row.to(gl.int64) * s_s, mask=row < end, other=0.0)


@gluon.jit
def queries(at, there, to, first, LANES: gl.constexpr, HALF: gl.constexpr, KIND: gl.constexpr, L: gl.constexpr):
    """Stores a part of the queries at those addresses, from a place on, in the order of the rows' channels."""
    place = first + gl.arange(0, LANES, gl.SliceLayout(0, L))
    at = at[:, None] + channel(place, HALF, KIND)[None, :]
    to.store(gl.load(at, mask=there[:, None] & (place >= 0)[None, :], other=0.0))


@gluon.jit
def decoded(x, book, ROWS: gl.constexpr, WORDS: gl.constexpr, KIND: gl.constexpr):
    """What words stand for in bfloat16, two channels a word."""
    if KIND == FP8:
        a, b = gl.inline_asm_elementwise(_WIDEN, "=&r,=&r,r", [x], (gl.int32, gl.int32), True, 1)
        return gl.reshape(gl.join(a, b), [ROWS, 2 * WORDS])
    else:
        t0, t1, t2, t3, t4, t5, t6, t7 = book
        a, b, c, d = gl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_CONSTRAINTS, [x, t0, t1, t2, t3, t4, t5, t6, t7],
            (gl.int32, gl.int32, gl.int32, gl.int32), True, 1,
        )  # fmt: skip
        return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [ROWS, 4 * WORDS])


@gluon.jit
def scaled(pairs, its):
    """Pairs of bfloat16 times their row's scale."""
    its = gl.expand_dims(its, 1).to(gl.int32, bitcast=True)
    return gl.inline_asm_elementwise(_SCALE, "=r,r,r", [pairs, its], gl.int32, True, 1)
