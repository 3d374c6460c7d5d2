"""`sparse_mla` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

Queries are taken a few at a time, so that the rows gathered for them fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megacpp_compile.lowerings._fp8 import SCALED_LANES, widened
from megacpp_compile.lowerings._op import compute_dtype

# Bytes of rows gathered at once.
CHUNK_BYTES = 256 << 20
# A compiled graph holds every chunk: no more than this many.
MOST_CHUNKS = 64


def _chunks(q: Tensor, indices: Tensor) -> Iterator[slice]:
    """Slices of queries. Of a symbolic number of them, one: a graph has to be as long as it is."""
    sizes = (q.shape[0], q.shape[1], indices.shape[-1], q.shape[-1])
    if not all(isinstance(n, int) for n in sizes):
        yield slice(None)
        return
    batch, tokens, k, lanes = sizes
    at_once = CHUNK_BYTES // max(1, batch * k * lanes * compute_dtype(q.dtype).itemsize)
    at_once = max(1, at_once, -(-tokens // MOST_CHUNKS))
    for start in range(0, max(tokens, 1), at_once):
        yield slice(start, start + at_once)


def _valid(indices: Tensor, rows: int, causal: bool, offset: int, first: int) -> Tensor:
    """Which of the indices [b, t, k] of queries from number `first` name a row they may see."""
    valid = (indices >= 0) & (indices < rows)
    if causal:
        position = torch.arange(indices.shape[1], device=indices.device) + (first + offset)
        valid = valid & (indices <= position[:, None])
    return valid


def _is_fp8(t: Tensor) -> bool:
    return t.is_floating_point() and t.element_size() == 1


class _Rows:
    """The latent rows by index: kv as [b, s, d], and its scale, if there is one."""

    def __init__(self, kv: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> None:
        self.kv, self.dtype, self.scale = kv.squeeze(2), dtype, None
        if kv_scale is not None:
            self.scale = kv_scale.squeeze(2)
            # A scale all rows share stays one number.
            if self.scale.shape[1] != 1 and self.scale.stride(1) == 0:
                self.scale = self.scale[:, :1]

    @property
    def count(self) -> int:
        return self.kv.shape[1]

    def take(self, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        """([b, t, k, d] payload, its scale), of which those that are not valid are zero."""
        if self.count == 0:
            empty = self.kv.new_zeros((*index.shape, self.kv.shape[-1]), dtype=self.dtype)
            return empty, None if self.scale is None else empty.new_ones(())
        batch = torch.arange(index.shape[0], device=index.device)[:, None, None]
        index = torch.where(valid, index, 0)
        # By their bytes: torch 2.9 takes no rows of fp8 tensors on a CPU.
        held = self.kv.view(torch.uint8) if _is_fp8(self.kv) else self.kv
        rows = widened(held[batch, index].view(self.kv.dtype), self.dtype).masked_fill(~valid.unsqueeze(-1), 0)
        if self.scale is None:
            return rows, None
        scale = self.scale.to(self.dtype)
        if scale.shape[1] == 1:
            return rows, scale.unsqueeze(1)
        return rows, scale.expand(self.kv.shape[0], -1, -1)[batch, index]


def _scaled(rows: Tensor, scale: Tensor) -> Tensor:
    if scale.dim() and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(SCALED_LANES, -1)[..., : rows.shape[-1]]
    return rows * scale


def _softmax(logits: Tensor, valid: Tensor, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities [b, t, h, k], 0 where invalid, and lse [b, t, h], unless it is known."""
    logits = logits.masked_fill(~valid.unsqueeze(2), float("-inf"))
    lse = torch.logsumexp(logits, -1) if lse is None else lse
    return torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)), lse


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    d_v: int,
    causal: bool = True,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    rows, outs, sums = _Rows(kv, kv_scale, dtype), [], []
    for part in _chunks(q, indices):
        index = indices[:, part].squeeze(2)
        valid = _valid(index, rows.count, causal, offset, part.start or 0)
        chosen, chosen_scale = rows.take(index, valid)
        queries = q[:, part].to(dtype)
        if chosen_scale is not None:
            chosen = _scaled(chosen, chosen_scale)
        p, lse = _softmax(torch.einsum("bthd,btkd->bthk", queries, chosen) * scale, valid)
        out = torch.einsum("bthk,btkd->bthd", p, chosen[..., :d_v])
        outs.append(out.to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 1).contiguous(), torch.cat(sums, 1).contiguous()


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
    """With p the probabilities, dp = grad . values and delta = grad . out - grad_lse, the scores' gradient is
    `p * (dp - delta)`."""
    dtype = compute_dtype(q.dtype)
    rows, parts = _Rows(kv, None, dtype), []
    batch, _, _, lanes = kv.shape
    # One row more than there are, for what invalid indices add: zeros.
    d_rows = torch.zeros((batch * (rows.count + 1), lanes), dtype=dtype, device=kv.device)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    for part in _chunks(q, indices):
        index = indices[:, part].squeeze(2)
        valid = _valid(index, rows.count, causal, offset, part.start or 0)
        chosen, _ = rows.take(index, valid)
        queries, d_out = q[:, part].to(dtype), grad[:, part].to(dtype)
        logits = torch.einsum("bthd,btkd->bthk", queries, chosen) * scale
        p, _ = _softmax(logits, valid, lse[:, part])
        dp = torch.einsum("bthd,btkd->bthk", d_out, chosen[..., :d_v])
        d_logits = p * (dp - delta[:, part].unsqueeze(-1)) * scale
        parts.append(torch.einsum("bthk,btkd->bthd", d_logits, chosen).to(q.dtype))
        d_chosen = torch.einsum("bthk,bthd->btkd", d_logits, queries)
        d_values = torch.einsum("bthk,bthd->btkd", p, d_out)
        d_chosen = d_chosen + torch.nn.functional.pad(d_values, (0, lanes - d_v))
        base = torch.arange(batch, device=kv.device)[:, None, None] * (rows.count + 1)
        place = torch.where(valid, index, rows.count) + base
        d_rows = d_rows.index_add(0, place.flatten(), d_chosen.flatten(0, 2))
    d_kv = d_rows.unflatten(0, (batch, rows.count + 1))[:, : rows.count].unsqueeze(2)
    return torch.cat(parts, 1).contiguous(), d_kv.to(kv.dtype).contiguous()
