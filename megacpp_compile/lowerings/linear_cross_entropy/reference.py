"""`linear_cross_entropy` and its backward in plain PyTorch, a chunk of tokens at a time: their meaning, their CPU
lowering, and the oracle.

With z the final logits of a row, p their softmax and `count` what the row's loss counts for (0 where it is ignored):

    row loss       (1 - eps) (lse - z_target) + eps (lse - mean z) + z_loss lse^2
    its gradient   p (1 + 2 z_loss lse) - (1 - eps) [word = target] - eps / words

Where a rank has a part of the words (`ranks`), statistics of all rows come first, then those of all ranks, and then the
gradient of the rank's own words, for which logits of more than one chunk are made again.

The loop over chunks has as many turns as there are tokens, so that graphs hold the op.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.linear_cross_entropy.chunks import chunks, kept_dtype
from megacpp_compile.lowerings.linear_cross_entropy.ranks import in_bounds, joined, statistics_of_words

# A loop over chunks, of which there may be any number.
TRACED = False


def final_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The logits that softmax is taken of, in the compute dtype."""
    z = logits.to(compute_dtype(logits))
    if scale != 1:
        z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def statistics(z: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, the logit of the word `at`, the sum of logits) of each row."""
    return torch.logsumexp(z, -1), z.gather(1, at.unsqueeze(1)).squeeze(1), z.sum(-1)


def row_losses(lse: Tensor, picked: Tensor, total: Tensor, words: int, label_smoothing: float, z_loss: float) -> Tensor:
    """The loss of each row, from its statistics."""
    loss = lse - picked
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - total / words)
    return loss + z_loss * lse.square() if z_loss else loss


def gradient(
    z: Tensor, lse: Tensor, at: Tensor, count: Tensor, dlse: Tensor | None, label_smoothing: float, scale: float,
    softcap: float | None, z_loss: float, words: int | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits as the GEMM makes them, in the compute dtype; 0 in a row that counts for nothing.
    count: what each row's loss counts for; dlse: the gradient of lse; words: how many there are, None for z's."""
    of_lse = count * (1 + 2 * z_loss * lse) if z_loss else count
    left_out = count == 0
    if dlse is not None:
        of_lse, left_out = of_lse + dlse, left_out & (dlse == 0)
    d = torch.exp(z - lse.unsqueeze(1)) * of_lse.unsqueeze(1)
    hot = torch.arange(z.shape[1], device=z.device) == at.unsqueeze(1)
    d = torch.where(hot, d - (1 - label_smoothing) * count.unsqueeze(1), d)
    if label_smoothing:
        d = d - (label_smoothing / (words or z.shape[1])) * count.unsqueeze(1)
    if softcap is not None:
        d = d * (1 - (z / softcap).square())
    d = d if scale == 1 else d * scale
    return torch.where(left_out.unsqueeze(1), 0, d)  # whatever its logits are, no number or infinite ones


def counts(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What each row's loss counts for: 0 where it is ignored, else its weight or 1."""
    counted = target != ignore_index
    return counted.to(dtype) if weight is None else torch.where(counted, weight.to(dtype), 0)


def counted(count: Tensor, dloss: Tensor | None) -> Tensor:
    """What counts is multiplied by the gradient of its loss; what does not stays 0, be that infinite."""
    return torch.zeros_like(count) if dloss is None else torch.where(count == 0, 0, count * dloss.to(count.dtype))


class HeadGradients:
    """Those of x, w and b that `wanted` names, from chunk to chunk; w's and b's are summed in the compute dtype, and
    returned in `dtype`."""

    def __init__(self, x: Tensor, w: Tensor, wanted: str, dtype: torch.dtype) -> None:
        self.x, self.w, self.wanted, self.dtype = x, w, wanted, dtype
        wide = compute_dtype(x)
        self.dx = x.new_empty(x.shape if "x" in wanted else 0)
        self.dw = w.new_zeros(w.shape if "w" in wanted else 0, dtype=wide)
        self.db = w.new_zeros(w.shape[0] if "b" in wanted else 0, dtype=wide)

    def add(self, rows: slice, d: Tensor) -> None:
        """d: the gradient of the logits of `rows`, in the compute dtype."""
        if "x" in self.wanted:
            self.dx[rows] = d.to(self.x.dtype) @ self.w
        if "w" in self.wanted:
            of_rows = d.t(), self.x[rows].to(d.dtype)
            self.dw = torch.mm(*of_rows) if rows.start == 0 else self.dw.addmm_(*of_rows)
        if "b" in self.wanted:
            self.db += d.sum(0)

    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.dx, self.dw.to(self.dtype), self.db.to(self.dtype)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    grads: str,
    first: int = 0,
    words: int | None = None,
    group: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, own, wide = x.shape[0], w.shape[0], compute_dtype(x)
    count, at = counts(target, weight, ignore_index, wide), places_of(target, ignore_index)
    settings = label_smoothing, scale, softcap, z_loss, words or own
    made = HeadGradients(x, w, grads, kept_dtype(w.dtype))
    if group is not None and words is not None:
        in_bounds(at, words)
        at = at - first
        lse, picked, total = (torch.empty_like(count) for _ in range(3))
        parts = list(chunks(n, own, wide.itemsize, x.device))
        for rows in parts:
            z = final_logits(F.linear(x[rows], w, b), scale, softcap)
            lse[rows], picked[rows], total[rows] = statistics_of_words(z, at[rows])
        lse, picked, total = joined(lse, picked, total, group)
        loss = row_losses(lse, picked, total, words, label_smoothing, z_loss)
        for rows in parts if grads else ():
            z = z if len(parts) == 1 else final_logits(F.linear(x[rows], w, b), scale, softcap)
            made.add(rows, gradient(z, lse[rows], at[rows], count[rows], None, *settings))
        return reduced(loss, count, reduction), lse, *made.made()
    lse, loss = (x.new_empty(n, dtype=wide) for _ in range(2))
    for rows in chunks(n, own, wide.itemsize, x.device):
        z = final_logits(F.linear(x[rows], w, b), scale, softcap)
        lse[rows], picked, total = statistics(z, at[rows])
        loss[rows] = row_losses(lse[rows], picked, total, own, label_smoothing, z_loss)
        if grads:
            made.add(rows, gradient(z, lse[rows], at[rows], count[rows], None, *settings))
    return reduced(loss, count, reduction), lse, *made.made()


def linear_cross_entropy_backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float | None,
    z_loss: float,
    grads: str,
    first: int = 0,
    words: int | None = None,
    group: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, w and b (empty where `grads` does not name them), from those of each row's loss and lse."""
    count, at = counts(target, weight, ignore_index, lse.dtype), places_of(target, ignore_index) - first
    count = counted(count, dloss)
    made = HeadGradients(x, w, grads, w.dtype)
    for rows in chunks(x.shape[0], w.shape[0], lse.dtype.itemsize, x.device):
        z = final_logits(F.linear(x[rows], w, b), scale, softcap)
        own = None if dlse is None else dlse[rows].to(lse.dtype)
        settings = label_smoothing, scale, softcap, z_loss, words
        made.add(rows, gradient(z, lse[rows], at[rows], count[rows], own, *settings))
    return made.made()


def reduced(loss: Tensor, count: Tensor, reduction: str) -> Tensor:
    """What the op returns of the losses of all rows; a row that counts for nothing adds nothing, not even an
    infinity."""
    loss = torch.where(count == 0, 0, loss * count)
    return loss.sum() if reduction == "sum" else loss


def places_of(target: Tensor, ignore_index: int) -> Tensor:
    """The word that each row is compared with, the first one where the row is ignored."""
    return torch.where(target == ignore_index, 0, target)
