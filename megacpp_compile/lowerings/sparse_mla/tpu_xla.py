"""`sparse_mla` on XLA: the reference in a `while` loop over queries, so that only a few queries' rows are gathered at
once. XLA sees no order between chunks that are unrolled, and gathers the rows of several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.xla_loop import loop, parted, parts_of, rejoined
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.sparse_mla.reference import (
    LatentRows,
    attend,
    attend_backward,
    delta_of,
    last_seen,
    no_gradient,
    of_rows,
)

# Bytes of rows gathered at once, as they are computed with.
GATHERED_BYTES = 8 << 20
# ATen cannot express XLA's `while`: the lowered graph calls this function.
TRACED = False


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    q, indices = (args[2], args[4]) if name == "sparse_mla_backward" else (args[0], args[2])
    if q.device.type == "tpu":
        return "no-loop: torch_tpu is given none"
    sizes = (*q.shape, *indices.shape)
    return None if all(isinstance(n, int) for n in sizes) else "a number of tokens or of rows that is not fixed"


def _parts(q: Tensor, indices: Tensor) -> int:
    a_query = q.shape[0] * indices.shape[-1] * q.shape[-1] * compute_dtype(q.dtype).itemsize
    return parts_of(q.shape[1], a_query, GATHERED_BYTES)


def _queries(n: int, q: Tensor, indices: Tensor, causal: bool, offset: int) -> tuple[Tensor, ...]:
    """What each part has of q, indices and, where it matters, the last row a query sees."""
    last = last_seen(q.shape[1], causal, offset, q)
    seen = () if last is None else (parted(last.unsqueeze(0), n).squeeze(1),)
    return parted(q, n), parted(indices.squeeze(2), n, fill=-1), *seen


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    d_v: int,
    causal: bool = True,
    offset: int = 0,
    fp8_gemms: bool = False,  # allowed, not taken: nothing is rounded here
) -> tuple[Tensor, Tensor]:
    dtype, n = compute_dtype(q.dtype), _parts(q, indices)

    def body(held: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> Any:
        queries, index, *last = part
        rows = LatentRows(held[0], held[1] if len(held) > 1 else None, dtype)
        return held, attend(rows, queries, index, last[0] if last else None, scale, d_v)

    # A loop of torch_xla's carries no float8. In bfloat16 it is exact.
    held = (kv,) if kv_scale is None else (kv.to(torch.bfloat16), kv_scale)
    _, results = loop(body, held, _queries(n, q, indices, causal, offset))
    out, lse = (rejoined(t, q.shape[1]) for t in results)
    return out.contiguous(), lse.contiguous()


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
    dtype, n = compute_dtype(q.dtype), _parts(q, indices)
    delta = delta_of(grad, grad_lse, out, dtype)

    def body(held: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> Any:
        kv, d_rows = held
        d_out, its_delta, its_lse, queries, index, *last = part
        seen = last[0] if last else None
        rows = LatentRows(kv, None, dtype)
        d_q, d_rows = attend_backward(rows, d_rows, d_out, its_delta, queries, index, its_lse, seen, scale, d_v)
        return (kv, d_rows), (d_q,)

    mine = tuple(parted(t, n) for t in (grad, delta, lse))
    held = (kv, no_gradient(LatentRows(kv, None, dtype)))
    (_, d_rows), (d_q,) = loop(body, held, (*mine, *_queries(n, q, indices, causal, offset)))
    return rejoined(d_q, q.shape[1]).contiguous(), of_rows(d_rows, kv)
