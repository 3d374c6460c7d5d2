"""Triton kernels: states of linear attention, segments of `STATES_EVERY` chunks side by side.

A state is what entered times the decay, plus what was added, so that segments are walked over at once: first each from
nothing (`walk`), then their sums are joined one after the other (`join`), element by element, and where all states are
wanted each is walked over again from what enters it. REVERSE: gradients of states, from the last chunk to the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    add_product,
    chunk_tokens,
    end_of,
    operand,
)

# A gate below it, in powers of 2, leaves nothing of a float32, and sums of such keep their digits.
LEAST = tl.constexpr(-160.0)


@triton.jit
def in_powers(g):
    """Gates in powers of 2, -inf as a number; NaN stays."""
    g = g.to(tl.float32) * LOG2_E
    return tl.where(g < LEAST, LEAST, g)


@triton.jit
def gla_decay(g, table, decay, tokens, heads, chunks, g_b, g_t, g_h,
              C: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """decay [b, c, h, C]: gates of a head summed up to and with a token of its chunk, in powers of 2."""
    c, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    r, h = tl.arange(0, C)[:, None], tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    gates = tl.load(g + b * g_b + first * g_t + (r * g_t + h * g_h), mask=(r < length) & (h < heads), other=0)
    total = tl.cumsum(in_powers(gates), 0)
    tl.store(decay + ((b * chunks + c) * heads + h) * C + r, total, mask=h < heads)


@triton.jit
def place(chunks, behind_last, EVERY: tl.constexpr):
    """(segment, head, how many chunks) of a program whose first index runs over segments, then heads."""
    segments = (chunks + EVERY - 1) // EVERY
    segment = tl.program_id(0) % segments
    return segment, (tl.program_id(0) // segments).to(tl.int64), tl.minimum(EVERY, behind_last - 1 - segment * EVERY)


@triton.jit
def begun(state, document, outside, heads, h, at, K: tl.constexpr, V: tl.constexpr, OUTSIDE: tl.constexpr):
    """The state a document begins with."""
    if OUTSIDE:
        return tl.load(outside + (document * heads + h) * K * V + at).to(tl.float32)
    else:
        return tl.zeros(state.shape, tl.float32)


@triton.jit
def gla_walk(x, y, decay, ends, table, edges, others, outside, entering, totals, states, last,
             tokens, chunks, behind_last, heads, per_key, scale, x_b, x_t, x_h, y_b, y_t, y_h,
             C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, EVERY: tl.constexpr,
             REVERSE: tl.constexpr, STATES: tl.constexpr, GATED: tl.constexpr, CHANNELS: tl.constexpr,
             OUTSIDE: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Over the chunks of a segment, BV of V channels, with the state in registers: x = k and y = v, or, REVERSE, x = q
    and y = do, times `scale`.

    Without STATES from nothing, writing what the segment adds to entering [b, s, h, K, V] and its decay, in powers of
    2, to totals [b, s, h, K if CHANNELS else 1], -inf where a document begins in it. With STATES from `entering`,
    writing to states [b, c, h, K, V] each chunk's state as the chunk reads it (`_triton_small_decay`), and, REVERSE,
    those that begin documents to `last`. edges [c]: the document that a walk enters with a chunk, or -1; others: the
    one that it leaves.
    """
    scale = single(scale)
    segment, h, count = place(chunks, behind_last, EVERY)
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, n, p = tl.arange(0, C), tl.arange(0, K), tile * BV + tl.arange(0, BV)[None, :]
    x += b * x_b + h // per_key * x_h
    y += b * y_b + h * y_h
    at = n[:, None] * V + p
    kept = (b * ((chunks + EVERY - 1) // EVERY) + segment) * heads + h
    state = tl.zeros([K, BV], tl.float32)
    if STATES:
        state += tl.load(entering + kept * K * V + at)
    whole = tl.zeros([K if CHANNELS else 1], tl.float32)
    for i in range(count):
        c = segment * EVERY + i
        if REVERSE:
            c = segment * EVERY + count - 1 - i
        row = (b * chunks + c) * heads + h
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        if PACKED:
            document = tl.load(edges + c)
            if document >= 0:
                state = begun(state, document, outside, heads, h, at, K, V, OUTSIDE)
                whole = tl.full(whole.shape, float("-inf"), tl.float32)
        rows = tl.load(x + first * x_t + (r[:, None] * x_t + n[None, :]), mask=there, other=0)
        values = tl.load(y + first * y_t + (r[:, None] * y_t + p), mask=there, other=0)
        if CHANNELS:
            before, after = end_of(ends, row, 2 if REVERSE else 1, 1, K), end_of(ends, row, 1 if REVERSE else 2, 1, K)
            through = end_of(ends, row, 0, 1, K)
            state *= tl.exp2(before)[:, None]
        if STATES:
            tl.store(states + row * K * V + at, as_stored(state, states))
        if CHANNELS:
            state *= tl.exp2(through)[:, None]
            if REVERSE:
                values = values.to(tl.float32) * scale
            whole += before + through + after
        elif GATED:
            total, end = tl.load(decay + row * C + r), tl.load(decay + row * C + C - 1)
            if REVERSE:
                values = values.to(tl.float32) * (tl.exp2(total) * scale)[:, None]
            else:
                values = values.to(tl.float32) * tl.exp2(end - total)[:, None]
            state *= tl.exp2(end)
            whole += end
        elif REVERSE:
            values = values.to(tl.float32) * scale
        state = add_product(state, tl.trans(operand(rows, WIDE)), values, WIDE)
        if CHANNELS:
            state *= tl.exp2(after)[:, None]
        if STATES and REVERSE and PACKED:
            document = tl.load(others + c)
            if document >= 0:
                tl.store(last + (document * heads + h) * K * V + at, state)
    if not STATES:
        tl.store(entering + kept * K * V + at, state)
        if CHANNELS:
            tl.store(totals + kept * K + n, whole, mask=n * 0 + tile == 0)
        else:
            tl.store(totals + kept + tl.arange(0, 1), whole, mask=tl.arange(0, 1) + tile == 0)
    elif REVERSE and not PACKED:
        if segment == 0:
            tl.store(last + (b * heads + h) * K * V + at, state)


@triton.jit
def gla_join(entering, totals, table, starts, outside, chunks, segments, heads,
             K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr, REVERSE: tl.constexpr,
             CHANNELS: tl.constexpr, OUTSIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """entering [b, s, h, K, V]: for what each segment adds, what enters it; zero before segments that are not there.
    BLOCK of a state's numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = i < K * V
    state = tl.zeros([BLOCK], tl.float32)
    if OUTSIDE and not PACKED:
        state += tl.load(outside + (b * heads + h) * K * V + i, mask=inside, other=0).to(tl.float32)
    for count in range(segments):
        s = count
        if REVERSE:
            s = segments - 1 - count
        kept = (b * segments + s) * heads + h
        more = inside & (i * 0 + count + 1 < segments)  # where there is but one, nobody has written it
        added = tl.load(entering + kept * K * V + i, mask=more, other=0)
        if CHANNELS:
            whole = tl.load(totals + kept * K + i // V, mask=more, other=0)
        else:
            whole = tl.load(totals + kept + i * 0, mask=more, other=0)
        if PACKED and not REVERSE:
            if tl.load(table + 2 * s * EVERY + 1) <= tl.load(table + 2 * s * EVERY):
                state = tl.zeros([BLOCK], tl.float32)
            document = tl.load(starts + s * EVERY)
            if document >= 0:
                state = tl.zeros([BLOCK], tl.float32)
                if OUTSIDE:
                    state += tl.load(outside + (document * heads + h) * K * V + i, mask=inside, other=0).to(tl.float32)
        tl.store(entering + kept * K * V + i, state, mask=inside)
        # Nothing goes past the start of a document, NaN neither.
        state = tl.where(whole == float("-inf"), 0, state * tl.exp2(whole)) + added


decay = Kernel(gla_decay, [{"BH": 16, "num_warps": 4}], key=("heads", "C"))
walk = Kernel(
    gla_walk,
    [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (2, 3)],
    key=("heads", "C", "K", "V", "BV", "REVERSE", "STATES"),
    restore=("entering",),
)
join = Kernel(gla_join, [{"num_warps": 4, "BLOCK": 512}], key=("heads", "K", "V"), restore=("entering",))
