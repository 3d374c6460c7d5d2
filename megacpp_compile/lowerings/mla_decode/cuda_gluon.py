"""`mla_decode` on Hopper in Gluon, Triton's language of explicit layouts, for bfloat16 queries of 512 + 64 channels: a
kernel for up to 32 queries of a sequence, all heads and new tokens counted, over rows in bfloat16, one for those over
rows of fewer bits, and one for more queries. `cuda_triton` serves what these do not, and combines the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from megacpp_compile.lowerings._kernels.triton_launch import last_dim_contiguous, strides
from megacpp_compile.lowerings.mla_decode import cuda_triton
from megacpp_compile.lowerings.mla_decode.cuda_triton import SMS, combine, even_parts, results
from megacpp_compile.report import log
from megacpp_compile.targets.chips import on_hopper

try:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from megacpp_compile.lowerings.mla_decode import _gluon_large_q as many
    from megacpp_compile.lowerings.mla_decode import _gluon_rows as kinds
    from megacpp_compile.lowerings.mla_decode import _gluon_small_q as few
    from megacpp_compile.lowerings.mla_decode import _gluon_small_q_quantized as few_widened

    missing = ""
except (ImportError, AttributeError) as error:  # Gluon is experimental: what it has differs between releases
    missing = f"Triton {triton.__version__} has not all of Gluon that it takes: {error}"

__all__ = ["mla_decode", "supports"]

# A graph holds the op itself, which asks again when it runs: Inductor takes no kernels of Gluon.
TRACED = False
VALUE_CHANNELS, REST_CHANNELS = 512, 64
# Rows of a tile, and queries of a program: of few, and of many.
ROWS, FEW, MANY = 64, (16, 32), 64
KINDS = {torch.bfloat16: "PLAIN", torch.float8_e4m3fn: "FP8", torch.uint8: "CODES"}
# Registers a thread of those who take the softmax, and of others: what is left of 65536 is for the eight warps that a
# kernel is launched with, of which those of many queries' sums take 128 for themselves.
# EARLY: see `_gluon_few_widened`.
_FEW = {
    16: {"SOFTMAX_REGISTERS": 96, "SUM_REGISTERS": 112, "EARLY": 1},
    32: {"SOFTMAX_REGISTERS": 96, "SUM_REGISTERS": 168, "EARLY": 0},
}
_MANY = {
    "PLAIN": {"SOFTMAX_REGISTERS": 136, "COPY_REGISTERS": 40, "COPY_WARPS": 4},
    "FP8": {"SOFTMAX_REGISTERS": 88, "COPY_REGISTERS": 96, "COPY_WARPS": 4},
    "CODES": {"SOFTMAX_REGISTERS": 88, "COPY_REGISTERS": 96, "COPY_WARPS": 4},
}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    if missing:
        return missing
    q, rows, _, _, _, _, d_v = args
    if not on_hopper(q.device):
        return "it is written for Hopper's tensor cores"
    if q.dtype != torch.bfloat16:
        return f"queries in {q.dtype}"
    if (d_v, q.shape[3] - d_v) != (VALUE_CHANNELS, REST_CHANNELS):
        return f"{d_v} and {q.shape[3] - d_v} channels: it has {VALUE_CHANNELS} and {REST_CHANNELS}"
    if not aligned(rows):
        return "rows do not begin at multiples of 16 bytes"
    return cuda_triton.supports(name, args)


def aligned(rows: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, if the first one does, which only real memory can tell."""
    steps = (rows.stride(0), rows.stride(1), rows.storage_offset())
    known = all(isinstance(n, int) and n * rows.dtype.itemsize % 16 == 0 for n in steps)
    # Rows that are all the same one have no descriptor.
    return known and rows.stride(2) == 1 and rows.stride(1) > 0 and (rows.stride(0) > 0 or rows.shape[0] == 1)


def block_of(queries: int) -> int:
    return next((n for n in FEW if queries <= n), MANY)


def launch_of(kind: str, queries: int) -> tuple[Any, int, dict[str, int]]:
    """(The kernel for so many queries a program, its warps, its sizes)."""
    if queries == MANY:
        return many.mla_decode_many, 8, {"BH": queries, **_MANY[kind]}
    if kind == "PLAIN":
        return few.mla_decode_few, 4, {"N": queries, "STAGES": 2}
    return few_widened.mla_decode_few_widened, 8, {"N": queries, **_FEW[queries]}


def descriptor(rows: Tensor, lanes: int) -> Any:
    """Of all rows, by tiles of so many channels."""
    tile = [1, ROWS, lanes]
    # Of a single sequence the stride may be anything.
    steps = [rows.stride(0) if rows.shape[0] > 1 else rows.shape[1] * rows.stride(1), rows.stride(1), 1]
    return TensorDescriptor(rows, list(rows.shape), steps, tile, NVMMASharedLayout.get_default_for(tile, bfloat16))


def mla_decode(
    q: Tensor,
    rows: Tensor,
    lengths: Tensor,
    row_scale: Tensor | None,
    codebook: Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    if rows.data_ptr() % 16:  # memory of somebody else's
        return cuda_triton.mla_decode(q, rows, lengths, row_scale, codebook, scale, d_v)
    batch, tokens, heads, _ = q.shape
    kind, n = KINDS[rows.dtype], block_of(tokens * heads)
    blocks = triton.cdiv(tokens * heads, n)
    splits = even_parts(batch * blocks, rows.shape[1], SMS, ROWS)
    out, lse, part_out, part_lse = results(q, d_v, splits)
    q = last_dim_contiguous(q)
    cached = rows if kind == "PLAIN" else rows.view(torch.int32)
    kernel, warps, sizes = launch_of(kind, n)
    args: dict[str, Any] = {
        "q": q, "kv": cached, "lengths": lengths, "part_out": part_out, "part_lse": part_lse, "tokens": tokens,
        "rows": rows.shape[1], "heads": heads, "splits": splits, "scale": scale, **strides("q", q, "bth"),
        **strides("kv", cached, "bs"), "l_b": lengths.stride(0), "V": d_v, "R": REST_CHANNELS, "BK": ROWS, **sizes,
    }  # fmt: skip
    if n == MANY or kind != "PLAIN":
        steps = (0, 0, 0) if row_scale is None else row_scale.stride()
        args |= {"row_scale": q if row_scale is None else row_scale, "codebook": q if codebook is None else codebook}
        args |= {"s_b": steps[0], "s_s": steps[1], "s_d": steps[2], "KIND": getattr(kinds, kind).value}
    if n == MANY:
        plain = kind == "PLAIN"
        args |= {"halves": descriptor(rows, d_v // 2) if plain else cached}
        args |= {"rests": descriptor(rows, REST_CHANNELS) if plain else cached}
    try:
        kernel[(blocks, splits, batch)](**args, num_warps=warps)
    except TritonError as error:  # a release whose Gluon has the same names, and another meaning for them
        global missing
        words = (str(error).strip() or type(error).__name__).splitlines()[-1]
        missing = f"Triton {triton.__version__} did not compile it: {words[:200]}"
        log.logger.warning("mla_decode: %s; Triton's own kernel serves", missing)
        return cuda_triton.mla_decode(q, rows, lengths, row_scale, codebook, scale, d_v)
    combine(part_out, part_lse, out, lse)
    return out, lse
