"""`megacpp::sparse_mla`: top-k sparse MLA, attention of each query over the latent rows that an indexer names for it.

    q          [b, t, h, d_qk]    float32, float16, bfloat16 (float64), any strides
    kv         [b, s, 1, d_qk]    the latent rows, shared by all heads: whole rows are keys, their first `d_v` channels
                                  values; q's dtype, or an fp8 payload (float8_e4m3fn) with `kv_scale`
    indices    [b, t, 1, k]       int32 or int64, the rows of each query; any that is no row of kv (-1 by convention) is
                                  invalid, and with `causal` any beyond `offset` + the query's number. A row that is
                                  named twice counts twice
    kv_scale   None, or float32 that broadcasts to [b, s, 1, n]: row = payload * scale, for whole rows (n = 1) or every
                                  128 channels (n = ceil(d_qk / 128)). One number for a tensor or a sequence is an
                                  `expand`ed view; nobody writes it out per row
    scale      of the scores;  d_v <= d_qk;  offset: rows before the first query (a cached prefix)
    fp8_gemms  with fp8 rows that have one scale each: lets a kernel round queries and probabilities to e4m3 where that
               is faster (Hopper; costs 2.8 % of the output in norm, of normal operands)
    returns    out [b, t, h, d_v] in q's dtype;  lse [b, t, h], natural logarithm of the sum of exponentials, float32
               (float64 for float64). A query without a valid row has out 0 and lse -inf

Computed in float32 (float64 for float64); kernels round probabilities to q's dtype before they multiply values, and fp8
rows to q's dtype, unless `fp8_gemms`. Raises OperandError for operands of other shapes and dtypes.

Backward (q and kv of one dtype; the fp8 path is forward only and says so): q's gradient is summed in a fixed order.
That of kv sums over all queries that name a row: the CUDA kernels add in float32 with atomics, so that its last bits
differ from run to run. Under `torch.use_deterministic_algorithms(True)` they store what each query adds, in bfloat16 if
that is q's dtype, else in float32, and sum it in the order of the queries.
Saved for backward: q, kv, indices, out, lse.
Source: DeepSeek-V3.2, https://github.com/deepseek-ai/DeepSeek-V3.2-Exp; invalid rows and the 576/512 channels are those
of FlashMLA's `flash_mla_sparse_fwd`, causality that of tilelang's examples/deepseek_v32. Both of those return lse in
base 2, and FlashMLA +inf for a query without rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.errors import ForwardOnlyError
from megacpp_compile.fx.sizes import hint, rows
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.sparse_mla import reference

PREFERENCE = {"cuda": ("cuda_gluon", "cuda_triton", "reference")}


def _check(q: Tensor, kv: Tensor, indices: Tensor, kv_scale: Tensor | None, d_v: int, fp8_gemms: bool) -> str | None:
    blocks = -(-kv.shape[-1] // SCALE_BLOCK)
    if q.dim() != 4 or kv.dim() != 4 or indices.dim() != 4 or kv.shape[2] != 1 or indices.shape[2] != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, kv, indices))
        return f"q, kv and indices are {shapes}, not [b, t, h, d_qk], [b, s, 1, d_qk] and [b, t, 1, k]"
    if indices.shape[:2] != q.shape[:2] or kv.shape[0] != q.shape[0]:
        return f"[b, t] are {tuple(q.shape[:2])} in q, {tuple(indices.shape[:2])} in indices; b is {kv.shape[0]} in kv"
    if kv.shape[3] != q.shape[3] or not 0 < d_v <= q.shape[3]:
        return f"q has {q.shape[3]} channels, kv {kv.shape[3]}, of which d_v = {d_v} are values"
    if indices.dtype not in (torch.int32, torch.int64):
        return f"indices are {indices.dtype}, not int32 or int64"
    if (kv.dtype == torch.float8_e4m3fn) != (kv_scale is not None):
        return f"kv is {kv.dtype} {'without' if kv_scale is None else 'with'} kv_scale; fp8 rows alone have one"
    if kv_scale is None and kv.dtype != q.dtype:
        return f"q is {q.dtype}, kv {kv.dtype}"
    if kv_scale is not None and (kv_scale.dim() != 4 or kv_scale.shape[3] not in (1, blocks)):
        per_row = f"a number a row or for every {SCALE_BLOCK} channels"
        return f"kv_scale is {tuple(kv_scale.shape)}: [b, s, 1, n], {per_row}"
    if fp8_gemms and (kv_scale is None or kv_scale.shape[3] != 1):
        return "fp8_gemms takes rows in fp8 that have a scale each, or one for all"
    return None


@define_op(reference.sparse_mla, check=_check, served=True)
def sparse_mla(q, kv, indices, kv_scale, scale, d_v, causal=True, offset=0, fp8_gemms=False):  # type: ignore[no-untyped-def]
    outer = q.shape[:-1]
    return q.new_empty((*outer, d_v)), q.new_empty(outer, dtype=compute_dtype(q.dtype))


def _check_backward(kv: Tensor) -> None:
    if kv.dtype == torch.float8_e4m3fn:
        raise ForwardOnlyError("megacpp::sparse_mla", "rows in fp8", "give it kv in q's dtype to train")


@define_op(reference.sparse_mla_backward, check=_check_backward, served=True)
def sparse_mla_backward(grad, grad_lse, q, kv, indices, out, lse, scale, d_v, causal, offset):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


differentiate(sparse_mla, sparse_mla_backward, of="q kv", results="out lse", zeros="out")


def _flops(q: Tensor, kv: Tensor, indices: Tensor, kv_scale: Any, scale: float, d_v: int, *_: Any) -> float:
    """Each query by its chosen rows, and their probabilities by those rows' values; as if none were masked."""
    return 2 * rows(q) * hint(indices.shape[-1]) * (hint(q.shape[-1]) + d_v)


declare(
    {
        "megacpp::sparse_mla": OpTraits(core=True, block_kind="ablock", up_projection="kv", flops=_flops, tokens=1),
        "megacpp::sparse_mla_backward": OpTraits(),
    }
)
