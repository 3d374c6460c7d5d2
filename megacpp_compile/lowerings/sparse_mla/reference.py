"""`sparse_mla` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

Queries are taken a few at a time, so that the rows gathered for them fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK, widened
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.targets import by_xla

# Bytes of rows gathered at once.
CHUNK_BYTES = 256 << 20
# A compiled graph holds every chunk: no more than this many.
MOST_CHUNKS = 64


def _chunks(q: Tensor, indices: Tensor) -> Iterator[slice]:
    """Slices of queries; a single one where their number is symbolic, as a graph cannot have a symbolic length."""
    sizes = (q.shape[0], q.shape[1], indices.shape[-1], q.shape[-1])
    if not all(isinstance(n, int) for n in sizes):
        yield slice(None)
        return
    batch, tokens, k, channels = sizes
    at_once = CHUNK_BYTES // max(1, batch * k * channels * compute_dtype(q.dtype).itemsize)
    at_once = max(1, at_once, -(-tokens // MOST_CHUNKS))
    for start in range(0, max(tokens, 1), at_once):
        yield slice(start, start + at_once)


def last_seen(tokens: int, causal: bool, offset: int, like: Tensor) -> Tensor | None:
    """The number of the last row each query may see, [t, 1], int64; None where it may see all."""
    return torch.arange(tokens, device=like.device).unsqueeze(-1) + offset if causal else None


def named(indices: Tensor, rows: int, last: Tensor | None) -> Tensor:
    """Which of the indices [b, t, k] name a row that their query may see."""
    valid = (indices >= 0) & (indices < rows)
    return valid if last is None else valid & (indices <= last)


def _is_fp8(t: Tensor) -> bool:
    return t.is_floating_point() and t.element_size() == 1


class LatentRows:
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
        index = torch.where(valid, index, 0)
        batch = torch.arange(index.shape[0], dtype=index.dtype, device=index.device)[:, None, None]
        if _is_fp8(self.kv) and not by_xla(self.kv.device):
            # By their bytes: torch 2.9 takes no rows of fp8 tensors on a CPU. XLA takes them, and has no such view.
            taken = self.kv.view(torch.uint8)[batch, index].view(self.kv.dtype)
        else:
            taken = self.kv[batch, index]
        rows = torch.where(valid.unsqueeze(-1), widened(taken, self.dtype), 0)
        if self.scale is None:
            return rows, None
        scale = self.scale.to(self.dtype)
        if scale.shape[1] == 1:
            return rows, scale.unsqueeze(1)
        return rows, scale.expand(self.kv.shape[0], -1, -1)[batch, index]


def _scaled(rows: Tensor, scale: Tensor) -> Tensor:
    if scale.dim() and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(SCALE_BLOCK, -1)[..., : rows.shape[-1]]
    return rows * scale


def _softmax(logits: Tensor, valid: Tensor, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities [b, t, h, k], 0 where invalid, and lse [b, t, h], unless it is known."""
    # `where` and `isneginf`: to compare with a number, or to fill with one, XLA goes by way of float64.
    logits = torch.where(valid.unsqueeze(2), logits, -torch.inf)
    lse = torch.logsumexp(logits, -1) if lse is None else lse
    return torch.exp(logits - torch.where(lse.isneginf(), 0, lse).unsqueeze(-1)), lse


def attend(
    rows: LatentRows, q: Tensor, index: Tensor, last: Tensor | None, scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of some queries [b, t, h, d], with the indices [b, t, k] of their rows."""
    valid = named(index, rows.count, last)
    gathered, gathered_scale = rows.take(index, valid)
    if gathered_scale is not None:
        gathered = _scaled(gathered, gathered_scale)
    p, lse = _softmax(torch.einsum("bthd,btkd->bthk", q.to(rows.dtype), gathered) * scale, valid)
    return torch.einsum("bthk,btkd->bthd", p, gathered[..., :d_v]).to(q.dtype), lse


def attend_backward(
    rows: LatentRows, d_rows: Tensor, grad: Tensor, delta: Tensor, q: Tensor, index: Tensor, lse: Tensor,
    last: Tensor | None, scale: float, d_v: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(The gradient of some queries, `d_rows` [b * (s + 1), d] with what these queries add to it). The extra row behind
    each sequence takes the zeros that invalid indices add.

    With p the probabilities, dp = grad . values and delta = grad . out - grad_lse, the scores' gradient is
    `p * (dp - delta)`."""
    valid = named(index, rows.count, last)
    gathered, _ = rows.take(index, valid)
    queries, d_out = q.to(rows.dtype), grad.to(rows.dtype)
    p, _ = _softmax(torch.einsum("bthd,btkd->bthk", queries, gathered) * scale, valid, lse)
    dp = torch.einsum("bthd,btkd->bthk", d_out, gathered[..., :d_v])
    d_logits = p * (dp - delta.unsqueeze(-1)) * scale
    d_q = torch.einsum("bthk,btkd->bthd", d_logits, gathered).to(q.dtype)
    d_gathered = torch.einsum("bthk,bthd->btkd", d_logits, queries)
    d_values = torch.einsum("bthk,bthd->btkd", p, d_out)
    d_gathered = d_gathered + torch.nn.functional.pad(d_values, (0, q.shape[-1] - d_v))
    base = torch.arange(q.shape[0], device=q.device)[:, None, None] * (rows.count + 1)
    place = torch.where(valid, index, rows.count) + base
    return d_q, d_rows.index_add(0, place.flatten(), d_gathered.flatten(0, 2))


def no_gradient(rows: LatentRows) -> Tensor:
    """Zeros [b * (s + 1), d], the `d_rows` that `attend_backward` starts from."""
    batch, count, channels = rows.kv.shape
    return torch.zeros((batch * (count + 1), channels), dtype=rows.dtype, device=rows.kv.device)


def of_rows(d_rows: Tensor, kv: Tensor) -> Tensor:
    """The gradient of kv, from the last `d_rows` of `attend_backward`."""
    batch, count = kv.shape[:2]
    return d_rows.unflatten(0, (batch, count + 1))[:, :count].unsqueeze(2).to(kv.dtype).contiguous()


def delta_of(grad: Tensor, grad_lse: Tensor | None, out: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, t, h]: `grad . out - grad_lse`, what the scores' gradient subtracts; see `attend_backward`."""
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


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
    rows = LatentRows(kv, kv_scale, compute_dtype(q.dtype))
    last, parts = last_seen(q.shape[1], causal, offset, q), []
    for part in _chunks(q, indices):
        seen = None if last is None else last[part]
        parts.append(attend(rows, q[:, part], indices[:, part].squeeze(2), seen, scale, d_v))
    outs, sums = zip(*parts, strict=True)
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
    rows = LatentRows(kv, None, compute_dtype(q.dtype))
    last, delta = last_seen(q.shape[1], causal, offset, q), delta_of(grad, grad_lse, out, rows.dtype)
    d_rows, parts = no_gradient(rows), []
    for part in _chunks(q, indices):
        seen = None if last is None else last[part]
        g, d, mine, index, its = (t[:, part] for t in (grad, delta, q, indices.squeeze(2), lse))
        d_q, d_rows = attend_backward(rows, d_rows, g, d, mine, index, its, seen, scale, d_v)
        parts.append(d_q)
    return torch.cat(parts, 1).contiguous(), of_rows(d_rows, kv)
