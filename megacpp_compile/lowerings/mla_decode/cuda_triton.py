"""`mla_decode` on CUDA in Triton: rows are split over programs, whose partial softmaxes a second kernel combines.

The number of parts follows from the shapes alone; what each part has of a sequence is worked out on the device from its
length, so that a captured launch serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings._kernels.triton_launch import (
    MOST_BLOCKS,
    Kernel,
    last_dim_contiguous,
    multiply,
    power_of_2,
    strides,
)
from megacpp_compile.lowerings.mla_decode import _triton_kernels as kernels

__all__ = ["mla_decode", "supports"]

# Channels that one program holds in registers for a block of queries: of values, and of the rest.
MAX_VALUE_CHANNELS, MAX_REST_CHANNELS = 512, 128
# An H100 or H200 has so many; a program of this size fills one.
SMS = 132
# What a part takes beside its tiles, and its share of combining, in tiles.
START, COMBINE = 3, 0.01

_TILES = [
    {"BH": bh, "BK": bk, "num_warps": warps, "num_stages": stages}
    for bh, bk in ((64, 32), (64, 64), (32, 64), (16, 64), (16, 128)) for warps in (4, 8) for stages in (1, 2)
]  # fmt: skip
_rows = Kernel(kernels.mla_decode_rows, _TILES, ("V", "R", "heads", "tokens"))
_codes = Kernel(kernels.mla_decode_codes, _TILES, ("V", "R", "heads", "tokens"))
_combine = Kernel(
    kernels.mla_decode_combine, [{"BV": bv, "BS": bs, "num_warps": 4} for bv, bs in ((64, 32), (512, 4))], ("V", "SP")
)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    q, rows, _, _, codebook, _, d_v = args
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"queries in {q.dtype}: tensor cores multiply in float32 at most"
    if not all(isinstance(n, int) for n in (*q.shape[1:], d_v)):
        return f"symbolic tokens, heads or channels: {tuple(q.shape[1:])}"
    rest = q.shape[3] - d_v
    if d_v > MAX_VALUE_CHANNELS or rest > MAX_REST_CHANNELS:
        most = f"{MAX_VALUE_CHANNELS} and {MAX_REST_CHANNELS}"
        return f"{d_v} and {rest} channels: programs hold {most} at most"
    if codebook is not None and rest % 2:
        return f"an odd number of other channels, {rest}"
    if any(isinstance(n, int) and n == 0 for n in (*q.shape, rows.shape[1])):
        return "there is nothing to attend to"
    if isinstance(q.shape[0], int) and q.shape[0] > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} sequences"
    return None


def tile(q: Tensor, rows: Tensor) -> dict[str, int]:
    """The static choice of block sizes: what fits into registers and 227 KiB of shared memory at 512 + 64 channels."""
    queries = q.shape[1] * q.shape[2]
    if q.dtype.itemsize == 4:
        return {"BH": 16, "BK": 16, "num_warps": 8, "num_stages": 1}
    block = max(16, min(64, power_of_2(queries)))
    # Bytes are two tiles once decoded, beside those loaded ahead.
    rows_of_tile = 32 if block == 64 and rows.dtype == torch.uint8 else 64
    warps = 4 if block == 16 and rows.dtype == q.dtype else 8
    return {"BH": block, "BK": rows_of_tile, "num_warps": warps, "num_stages": 2}


def parts(q: Tensor, rows: Tensor, block: int) -> int:
    """Into how many parts to split a sequence's rows, of 4 tiles of 64 at least."""
    blocks = max(1, hint(q.shape[0]) * -(-q.shape[1] * q.shape[2] // block))
    return min(even_parts(blocks, hint(rows.shape[1]), SMS, 64), -(-hint(rows.shape[1]) // 256))


@functools.lru_cache(1024)
def even_parts(blocks: int, rows: int, at_once: int, tile: int) -> int:
    """Into how many parts to split each of `blocks` so that no SM waits for the last ones: a part takes as long as its
    tiles and START more, and `at_once` of them run at once."""
    tiles, best, least = -(-rows // tile), 1, float("inf")
    for splits in range(1, min(tiles, 2 * at_once) + 1):
        each = -(-tiles // splits)
        if splits > 1 and each == -(-tiles // (splits - 1)):
            continue  # the same, with a part that has none
        takes = -(-blocks * splits // at_once) * (each + START) + splits * COMBINE
        if takes < least:
            best, least = splits, takes
    return best


def mla_decode(
    q: Tensor,
    rows: Tensor,
    lengths: Tensor,
    row_scale: Tensor | None,
    codebook: Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, channels = q.shape
    rest, block = channels - d_v, tile(q, rows)
    splits = parts(q, rows, block["BH"])
    out, lse, part_out, part_lse = results(q, d_v, splits)
    q, rows = last_dim_contiguous(q), last_dim_contiguous(rows)
    least = 16 if rows.dtype == q.dtype else 32  # channels that tensor cores multiply at once
    half = 1 if codebook is None else 2
    args: dict[str, Any] = {
        "q": q, "kv": rows, "lengths": lengths, "part_out": part_out, "part_lse": part_lse, "tokens": tokens,
        "rows": rows.shape[1], "heads": heads, "splits": splits, "scale": scale, **strides("q", q, "bth"),
        **strides("kv", rows, "bs"), "l_b": lengths.stride(0), "V": d_v // half, "R": rest // half,
        "VP": max(least, power_of_2(d_v // half)), "RP": max(least, power_of_2(rest // half)), **multiply(q.dtype),
    }  # fmt: skip
    steps = (0, 0, 0) if row_scale is None else row_scale.stride()
    args |= {"row_scale": q if row_scale is None else row_scale, "s_b": steps[0], "s_s": steps[1]}

    def grid(meta: dict[str, Any]) -> tuple[Any, ...]:
        return triton.cdiv(tokens * heads, meta["BH"]), splits, batch

    if codebook is None:
        _rows(grid, block, SCALED=int(row_scale is not None), **args)
    else:
        _codes(grid, block, codebook=codebook, s_d=steps[2], **args)
    combine(part_out, part_lse, out, lse)
    return out, lse


def results(q: Tensor, d_v: int, splits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for out [b, t, h, d_v] and lse [b, t, h], and for what `combine` makes them of."""
    each = q.shape[:-1]
    out = torch.empty((*each, d_v), dtype=q.dtype, device=q.device)
    wide = [each, (*each, splits, d_v), (*each, splits)]
    lse, part_out, part_lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in wide)
    return out, lse, part_out, part_lse


def combine(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Results of parts [b, t, h, splits, d_v] and [b, t, h, splits] into out and lse. Many parts are read side by side,
    few channels of each: one after the other, each would wait for memory."""
    queries, (splits, d_v) = lse.numel(), part_out.shape[3:]
    across, warps = (32, 4) if splits >= 32 else (128, 2)
    block = {"BV": min(power_of_2(d_v), across), "BS": min(power_of_2(splits), 128), "num_warps": warps}
    _combine(
        lambda meta: (queries, triton.cdiv(d_v, meta["BV"])), block,
        part_out=part_out, part_lse=part_lse, out=out, lse=lse, splits=splits, V=d_v, SP=power_of_2(splits),
    )  # fmt: skip
