"""`megacpp::mla_decode`: attention of a few new tokens over cached latent rows, with absorbed queries.

    q          [b, t, h, d_qk], float32, float16, bfloat16 (float64), any strides: the queries of the t newest tokens,
               of which the first d_v channels are multiplied by W_uk already
    rows       [b, s, w], the cache, shared by all heads: whole rows are keys, their first `d_v` channels values. In
               q's dtype (w = d_qk); float8_e4m3fn with `row_scale` [b, s, 1] (w = d_qk); or uint8, two channels a byte
               (w = d_qk / 2), with `row_scale` [b, s, 2] and `codebook`
    lengths    [b] int32 or int64: how many rows of a sequence are valid, the t new ones included, which are the last
               of them. A tensor, so that one program serves all lengths
    row_scale  None, or float32: row = payload * scale; of bytes the values' channels have the first, the others the
               second
    codebook   None, or float32 [16]: what the 4 bits of a channel stand for. Byte i holds channel i in its low and
               channel i + d_v / 2 in its high bits, and behind the values' bytes so for the other channels
    scale      of the scores;  d_v <= d_qk, both parts even where rows are bytes
    returns    out [b, t, h, d_v] in q's dtype, for W_uv to multiply;  lse [b, t, h], natural logarithm of the sum of
               exponentials, float32 (float64 for float64). A query without a row has out 0 and lse -inf

Query i sees the first `lengths - t + i + 1` rows. Rows from `lengths` on may hold anything. Computed in float32 (in
float64 for float64); kernels round probabilities to q's dtype before they multiply values, and payloads to q's dtype.

Forward only. In training it is refused, AbsorbedInTrainingError: a score takes 2.7 times the channels there, no flash
kernel takes its two parts, and the keys and values it saves are not held where they are recomputed. Raises OperandError
for operands of other shapes and dtypes.
Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; `absorb` in DeepSeek-V3's reference code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.errors import AbsorbedInTrainingError
from megacpp_compile.fx.sizes import hint, rows
from megacpp_compile.lowerings._op import compute_dtype, define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.mla_decode import reference

PREFERENCE = {"cuda": ("cuda_gluon", "cuda_triton", "reference")}
REFERENCE_SERVES = {"tpu": "two GEMMs and a masked softmax in static shapes, with the lengths as data"}


def _check(
    q: Tensor, rows: Tensor, lengths: Tensor, row_scale: Tensor | None, codebook: Tensor | None, d_v: int
) -> str | None:
    if q.dim() != 4 or rows.dim() != 3 or lengths.dim() != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, rows, lengths))
        return f"q, rows and lengths are {shapes}, not [b, t, h, d_qk], [b, s, w] and [b]"
    if rows.shape[0] != q.shape[0] or lengths.shape[0] != q.shape[0]:
        return f"b is {q.shape[0]} in q, {rows.shape[0]} in rows and {lengths.shape[0]} in lengths"
    if lengths.dtype not in (torch.int32, torch.int64):
        return f"lengths are {lengths.dtype}, not int32 or int64"
    if not 0 < d_v <= q.shape[3]:
        return f"q has {q.shape[3]} channels, of which d_v = {d_v} are values"
    if (rows.dtype == torch.uint8) != (codebook is not None):
        return f"rows are {rows.dtype} {'without' if codebook is None else 'with'} a codebook; bytes alone have one"
    if codebook is not None and (tuple(codebook.shape) != (16,) or d_v % 2 or q.shape[3] % 2):
        return f"bytes take a codebook [16] and an even number of channels, not {tuple(codebook.shape)}, {d_v}"
    if rows.shape[2] * (1 if codebook is None else 2) != q.shape[3]:
        return f"q has {q.shape[3]} channels, a row {rows.shape[2]} elements of {rows.dtype}"
    if (rows.dtype in (torch.uint8, torch.float8_e4m3fn)) != (row_scale is not None):
        return f"rows are {rows.dtype} {'without' if row_scale is None else 'with'} row_scale"
    if row_scale is None and rows.dtype != q.dtype:
        return f"q is {q.dtype}, rows {rows.dtype}"
    if row_scale is not None and tuple(row_scale.shape) != (*rows.shape[:2], 1 if codebook is None else 2):
        return f"row_scale is {tuple(row_scale.shape)}: [b, s, 1] for fp8, [b, s, 2] for bytes"
    return None


@define_op(reference.mla_decode, check=_check, served=True)
def mla_decode(q, rows, lengths, row_scale, codebook, scale, d_v):  # type: ignore[no-untyped-def]
    outer = q.shape[:-1]
    return q.new_empty((*outer, d_v)), q.new_empty(outer, dtype=compute_dtype(q.dtype))


def _refuse(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Called where an operand requires a gradient and grad mode is on: training."""
    raise AbsorbedInTrainingError("megacpp::mla_decode", inputs[0].shape[-1], inputs[6])


def _backward(ctx: Any, *_: Any) -> Any:
    raise AssertionError("refused in forward")


mla_decode.register_autograd(_backward, setup_context=_refuse)


def _flops(q: Tensor, cached: Tensor, *others: Any) -> float:
    """Each query by every row, and their probabilities by those rows' values; as if the cache were full."""
    return 2 * rows(q) * hint(cached.shape[1]) * (hint(q.shape[-1]) + others[-1])


declare({"megacpp::mla_decode": OpTraits(core=True, block_kind="ablock", flops=_flops)})
