"""Rows and weights of grouped GEMMs as e4m3 payloads, on CUDA: each in one pass over memory.

A payload is the value divided by its row's scale (`fp8.round_to_fp8`). Weights are found as in `triton_grouped`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_grouped import TYPES, equal_strides, table_of
from megacpp_compile.lowerings._kernels.triton_launch import interpreted, power_of_2

FLOAT8 = torch.float8_e4m3fn
# Elements of a weight that a program holds at once: all of some rows.
_HELD = 32768
# Rows that a program of two warps holds, which mostly are of one group and read its scales once, and their elements.
_ROWS, _HELD_IN_ROWS = 2, 8192


@triton.jit
def scale_from(largest):
    """As `fp8.scale_from`."""
    return tl.where(largest > 0, tl.maximum(largest / 448, 1.1754943508222875e-38), 1.0)


@triton.jit
def quantise_rows(x, take, ends, channel_scale, out, scale, rows, xs, K: tl.constexpr, KP: tl.constexpr,
                  E: tl.constexpr, EP: tl.constexpr, RB: tl.constexpr):  # fmt: skip
    """out[r] * scale[r] = x[take[r]], or x[r]; with channel_scale [E, K] times that of the row's group."""
    r = tl.program_id(0) * RB + tl.arange(0, RB)
    inside = r < rows
    source = (r if take is None else tl.load(take + r, mask=inside, other=0)).to(tl.int64)
    k = tl.arange(0, KP)
    here = inside[:, None] & (k < K)[None, :]
    v = tl.load(x + source[:, None] * xs + k[None, :], mask=here, other=0).to(tl.float32)
    if channel_scale is not None:
        e = tl.arange(0, EP)
        end = tl.load(ends + e, mask=e < E, other=2147483647)
        behind = (end[None, :] <= r[:, None]).to(tl.int32)
        group = tl.minimum(tl.sum(behind, 1), E - 1)  # a row behind all groups may have any scale
        v *= tl.load(channel_scale + (group * K)[:, None] + k[None, :], mask=here, other=0)
    one = scale_from(tl.max(tl.abs(v), 1))
    tl.store(scale + r, one, mask=inside)
    tl.store(out + r.to(tl.int64)[:, None] * K + k[None, :], as_stored(v * (1 / one)[:, None], out), mask=here)


@triton.jit
def quantise_weights(table, out, scale, stride, R: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, E: tl.constexpr,
                     PARTS: tl.constexpr, RB: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """out [E, PARTS * R, C] * scale [E, PARTS * R] = PARTS * E weights [R, C], those of a part one after the other."""
    e, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    w = tl.multiple_of(tl.load(table + part * E + e).to(tl.pointer_type(TYPE)), 16)
    r = tl.program_id(0) * RB + tl.arange(0, RB)
    c = tl.arange(0, CP)
    inside = (r < R)[:, None] & (c < C)[None, :]
    v = tl.load(w + r[:, None] * stride + c[None, :], mask=inside, other=0).to(tl.float32)
    rows = scale_from(tl.max(tl.abs(v), 1))
    at = e.to(tl.int64) * PARTS * R + part * R + r
    tl.store(scale + at, rows, mask=r < R)
    tl.store(out + at[:, None] * C + c[None, :], as_stored(v * (1 / rows)[:, None], out), mask=inside)


@triton.jit
def _divided(at, scale, inside, four, R: tl.constexpr):
    """A row of every four over its scale."""
    of = tl.load(scale, mask=four < R // 4, other=1)
    return tl.load(at, mask=inside, other=0).to(tl.float32) * (1 / of)[:, None]


@triton.jit
def word_of(v0, v1, v2, v3, INTERPRETED: tl.constexpr):
    """Four numbers in e4m3, the first in the lowest byte: two conversions side by side, as a GPU has them, and no byte
    is taken out of a pair again."""
    if INTERPRETED:
        word = v0.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= v1.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= v2.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= v3.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [v0, v1, v2, v3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def quantise_transposed(table, out, scale, stride, R: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
                        PARTS: tl.constexpr,
                    RB: tl.constexpr, CB: tl.constexpr, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """The same payloads transposed, [E, C, PARTS * R], by scales that are known. A word of `out` has those of four
    rows, and it is words that are transposed: bytes were transposed wrongly on an H200 by Triton 3.6, see
    docs/kernels.md."""
    e, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    w = tl.multiple_of(tl.load(table + part * E + e).to(tl.pointer_type(TYPE)), 16)
    across: tl.constexpr = (C + CB - 1) // CB
    four = (tl.program_id(0) // across) * (RB // 4) + tl.arange(0, RB // 4)
    c = (tl.program_id(0) % across) * CB + tl.arange(0, CB)
    inside = (four < R // 4)[:, None] & (c < C)[None, :]
    at = w + (4 * four)[:, None] * stride + c[None, :]
    of = scale + (e * PARTS + part) * R + 4 * four
    v0 = _divided(at, of, inside, four, R)
    v1 = _divided(at + stride, of + 1, inside, four, R)
    v2 = _divided(at + 2 * stride, of + 2, inside, four, R)
    v3 = _divided(at + 3 * stride, of + 3, inside, four, R)
    word = word_of(v0, v1, v2, v3, INTERPRETED)
    words: tl.constexpr = PARTS * R // 4
    place = (e.to(tl.int64) * C + c)[:, None] * words + (part * (R // 4) + four)[None, :]
    tl.store(out + place, tl.trans(word), mask=(c < C)[:, None] & (four < R // 4)[None, :])


def quantised_rows(
    x: Tensor, take: Tensor | None = None, channel_scale: Tensor | None = None, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(payload [S, k], scale [S]) of rows `take` of x, or of all; times channel_scale [E, k] of the group of each."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    channel_scale = None if channel_scale is None else channel_scale.contiguous()
    rows, k = (x if take is None else take).shape[0], x.shape[1]
    experts = 0 if offsets is None else offsets.shape[0]
    out = torch.empty((rows, k), dtype=FLOAT8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        wide = power_of_2(k)
        at_once = max(1, min(_ROWS, _HELD_IN_ROWS // wide))
        launch(
            quantise_rows, (triton.cdiv(rows, at_once),), x=x, take=take, ends=offsets, channel_scale=channel_scale,
            out=out, scale=scale, rows=rows, xs=x.stride(0), K=k, KP=wide, E=experts, EP=power_of_2(experts),
            RB=at_once, num_warps=2 if at_once == _ROWS else 4,
        )  # fmt: skip
    return out, scale


def quantised_weights(weights: Sequence[Tensor], parts: int) -> tuple[Tensor, Tensor]:
    """(payload [E, parts * r, c], scale [E, parts * r]) of parts * E weights [r, c], those of a part together."""
    weights, table, sizes = _found(weights, parts)
    e, r, c = sizes["E"], parts * sizes["R"], sizes["C"]
    out = torch.empty((e, r, c), dtype=FLOAT8, device=table.device)
    scale = torch.empty((e, r), dtype=torch.float32, device=table.device)
    wide = power_of_2(c)
    at_once = max(1, _HELD // wide)
    launch(
        quantise_weights, (triton.cdiv(sizes["R"], at_once), e * parts), table=table, out=out, scale=scale,
        stride=weights[0].stride(0), CP=wide, RB=at_once, TYPE=TYPES[weights[0].dtype], **sizes, num_warps=16,
    )  # fmt: skip
    return out, scale


def transposed_weights(weights: Sequence[Tensor], parts: int, scale: Tensor) -> Tensor:
    """The payload of `quantised_weights` transposed, [E, c, parts * r], by its scale. r is a multiple of 4."""
    weights, table, sizes = _found(weights, parts)
    e, r, c = sizes["E"], parts * sizes["R"], sizes["C"]
    out = torch.empty((e, c, r), dtype=FLOAT8, device=table.device)
    blocks = {"RB": 128, "CB": 128}
    programs = triton.cdiv(sizes["R"], blocks["RB"]) * triton.cdiv(c, blocks["CB"])
    launch(
        quantise_transposed, (programs, e * parts), table=table, out=out.view(torch.int32), scale=scale.contiguous(),
        stride=weights[0].stride(0), TYPE=TYPES[weights[0].dtype], **sizes, **blocks, INTERPRETED=interpreted(),
        num_warps=8,
    )  # fmt: skip
    return out


def _found(weights: Sequence[Tensor], parts: int) -> tuple[Sequence[Tensor], Tensor, dict[str, int]]:
    """(weights with contiguous channels and equal strides, copies if need be; where each lies; their sizes)."""
    if not equal_strides(weights) or weights[0].stride(-1) != 1:
        weights = [w.contiguous() for w in weights]
    r, c = weights[0].shape
    sizes = {"R": r, "C": c, "E": len(weights) // parts, "PARTS": parts}
    return weights, table_of(weights, weights[0].device), sizes
