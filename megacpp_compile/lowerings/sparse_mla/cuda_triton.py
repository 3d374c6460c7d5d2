"""`sparse_mla` on CUDA in Triton: kernels gather a query's top-k rows tile by tile, forward and twice in backward.

Backward is two kernels. q's gradient walks a query's rows with a block of its heads, as forward does; kv's has a tile
of a query's rows and goes over its heads, so that a row's gradient is added to memory once a query (float32 atomics),
not once a block of heads; under `torch.use_deterministic_algorithms(True)` it is stored, and summed along lists. Scores
and the probabilities' gradient are computed twice: 3840 multiply-adds a head, row and query at 576/512 channels, where
one kernel would take 2752, and more atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.triton_launch import Kernel, last_dim_contiguous, multiply, power_of_2, strides
from megacpp_compile.lowerings.sparse_mla import _lists
from megacpp_compile.lowerings.sparse_mla import _triton_kernels as kernels
from megacpp_compile.lowerings.sparse_mla.reference import delta_of

__all__ = ["sparse_mla", "sparse_mla_backward", "supports"]

# Channels that one program holds in registers for a block of heads: of values, and of the rest.
MAX_VALUE_CHANNELS, MAX_REST_CHANNELS = 512, 128
# Blocks a launch can have along its second dimension.
MOST_BLOCKS = 65535

_TILES = [
    {"BH": bh, "BK": bk, "num_warps": warps, "num_stages": stages}
    for bh, bk in ((64, 32), (64, 64), (64, 128), (32, 64), (16, 64)) for warps in (4, 8) for stages in (1, 2)
]  # fmt: skip
_KEY = ("V", "R", "heads", "topk")
_forward = Kernel(kernels.sparse_mla_forward, _TILES, _KEY)
_query_grad = Kernel(kernels.sparse_mla_query_grad, _TILES, _KEY)
_rows_grad = Kernel(kernels.sparse_mla_rows_grad, _TILES, _KEY, restore=("to",))
LIST_TILE = {"LANES": 64, "BN": 64, "num_warps": 4}
_LIST_TILES = [LIST_TILE | {"BN": pairs} for pairs in (32, 64, 128)]
_add_lists = Kernel(kernels.sparse_mla_add_lists, _LIST_TILES, ("CHANNELS",), restore=("dkv",))


def no_launch(q: Tensor, kv: Tensor, indices: Tensor) -> str | None:
    """Why there is no grid of programs for these operands, or None."""
    if any(isinstance(n, int) and n == 0 for n in (*q.shape, kv.shape[1], indices.shape[3])):
        return "there is nothing to attend to"
    if isinstance(q.shape[0], int) and q.shape[0] > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} sequences"
    return None


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    backward = name == "sparse_mla_backward"
    q, kv, indices = args[2:5] if backward else args[:3]
    kv_scale, d_v = (None, args[8]) if backward else (args[3], args[5])
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"queries in {q.dtype}: tensor cores multiply in float32 at most"
    if kv.dtype != (q.dtype if kv_scale is None else torch.float8_e4m3fn):
        return f"rows in {kv.dtype}, queries in {q.dtype}"
    sizes = (q.shape[2], q.shape[3], indices.shape[3])
    if not all(isinstance(n, int) for n in sizes):
        return f"symbolic heads, channels or number of rows: {sizes}"
    if d_v < 1 or d_v > MAX_VALUE_CHANNELS or q.shape[3] - d_v > MAX_REST_CHANNELS:
        most = f"{MAX_VALUE_CHANNELS} and {MAX_REST_CHANNELS}"
        return f"{d_v} and {q.shape[3] - d_v} channels: programs hold {most} at most"
    if reason := no_launch(q, kv, indices):
        return reason
    if backward and in_order() and not isinstance(q.shape[0] * q.shape[1] * kv.shape[1], int):
        return "deterministic algorithms are asked for, and numbers of queries or rows to make lists of are symbolic"
    return None


def in_order() -> bool:
    """Whether rows' gradients are to be summed in a fixed order."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _operands(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, causal: bool, offset: int
) -> dict[str, Any]:
    least = 32 if kv.dtype.itemsize == 1 else 16  # channels that tensor cores multiply at once
    q, kv = last_dim_contiguous(q), last_dim_contiguous(kv)
    rest = q.shape[-1] - d_v
    return {
        "q": q, "kv": kv, "indices": indices, "tokens": q.shape[1], "rows": kv.shape[1], "heads": q.shape[2],
        "topk": indices.shape[3], "offset": offset, "scale": scale, **strides("q", q, "bth"), **strides("kv", kv, "bs"),
        "i_b": indices.stride(0), "i_t": indices.stride(1), "i_k": indices.stride(3), "V": d_v,
        "VP": max(least, power_of_2(d_v)), "R": rest, "RP": max(least, power_of_2(rest)), "CAUSAL": int(causal),
    }  # fmt: skip


def aligned(t: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, as memory from an allocator does. The stride of a single sequence,
    which a GEMM by heads leaves at 1, moves nothing."""
    unit = 16 // t.dtype.itemsize
    steps = [step for size, step in zip(t.shape[:-1], t.stride(), strict=False) if not statically_known_true(size == 1)]
    return all(statically_known_true(n % unit == 0) for n in (t.storage_offset(), *steps))


def scale_steps(kv_scale: Tensor | None) -> tuple[Any, Any, Any]:
    """Strides of the scales by sequence, row and block of channels; 0 where one scale serves all."""
    if kv_scale is None:
        return 0, 0, 0
    b, s, d = (0 if statically_known_true(kv_scale.shape[dim] == 1) else kv_scale.stride(dim) for dim in (0, 1, 3))
    return b, s, d


def _tile(q: Tensor, heads: int, rows: int, stages: int) -> dict[str, int]:
    """The static choice of block sizes: what fits into registers and 227 KiB of shared memory at 512 + 64 channels."""
    if q.dtype.itemsize == 4:
        return {"BH": 16, "BK": 16, "num_warps": 8, "num_stages": 1}
    return {"BH": max(16, min(heads, power_of_2(q.shape[2]))), "BK": rows, "num_warps": 8, "num_stages": stages}


def _by_heads(q: Tensor) -> Any:
    return lambda meta: (q.shape[1] * triton.cdiv(q.shape[2], meta["BH"]), q.shape[0])


def _by_rows(q: Tensor, indices: Tensor) -> Any:
    return lambda meta: (q.shape[1] * triton.cdiv(indices.shape[3], meta["BK"]), q.shape[0])


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    d_v: int,
    causal: bool = True,
    offset: int = 0,
    fp8_gemms: bool = False,  # allowed, not taken: these kernels multiply in the queries' dtype
) -> tuple[Tensor, Tensor]:
    out = torch.empty((*q.shape[:-1], d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    args = _operands(q, kv, indices, scale, d_v, causal, offset)
    steps = zip(("s_b", "s_s", "s_d"), scale_steps(kv_scale), strict=True)
    args |= {**dict(steps), "kv_scale": q if kv_scale is None else kv_scale, "out": out, "lse": lse}
    by_blocks = kv_scale is not None and kv_scale.shape[3] > 1
    scaled = {"SCALED": int(kv_scale is not None), "BLOCKS": int(by_blocks)}
    # Scales by block, one a channel once loaded, do not fit into shared memory beside tiles loaded ahead.
    _forward(_by_heads(q), _tile(q, 64, 64, 1 if by_blocks else 2), **args, **scaled, **multiply(q.dtype))
    return out, lse


def sparse_mla_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    d_v: int,
    causal: bool,
    offset: int,
) -> tuple[Tensor, Tensor]:
    delta = delta_of(grad, grad_lse, out, torch.float32)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    grad = last_dim_contiguous(grad.to(q.dtype))

    def operands(share: slice) -> dict[str, Any]:
        g, sums, mine, index, own = (t[:, share] for t in (grad, delta, q, indices, lse))
        args = _operands(mine, kv, index, scale, d_v, causal, offset + (share.start or 0)) | multiply(q.dtype)
        args |= {"grad": g, "lse": own.contiguous(), "delta": sums.contiguous(), **strides("g", g, "bth")}
        return args | {"ALIGNED": int(aligned(args["q"]) and aligned(g))}

    _query_grad(_by_heads(q), _tile(q, 64, 32, 2), dq=dq, **operands(slice(None)))
    if not in_order():
        _rows_grad(_by_rows(q, indices), _tile(q, 32, 64, 2), to=dkv, LISTED=0, **operands(slice(None)))
        return dq, dkv.to(kv.dtype)
    for share in _lists.shares(q, indices):
        mine, index = q[:, share], indices[:, share]
        parts = torch.empty((index.numel(), q.shape[3]), dtype=_lists.part_dtype(q.dtype), device=q.device)
        _rows_grad(_by_rows(mine, index), _tile(q, 32, 64, 2), to=parts, LISTED=1, **operands(share))
        add_lists(parts, index, dkv, causal, offset + share.start)
    return dq, dkv.to(kv.dtype)


def add_lists(parts: Tensor, indices: Tensor, dkv: Tensor, causal: bool, offset: int) -> None:
    """Adds `parts` [pairs, d], of each of the `indices` [b, t, 1, k], to dkv [b, s, 1, d], float32, in their order."""
    pairs, starts = _lists.by_row(indices, dkv.shape[1], causal, offset)
    _add_lists(
        lambda meta: (dkv.shape[0] * dkv.shape[1], triton.cdiv(dkv.shape[3], meta["LANES"])), LIST_TILE,
        parts=parts, pairs=pairs, starts=starts, dkv=dkv, CHANNELS=dkv.shape[3],
    )  # fmt: skip
