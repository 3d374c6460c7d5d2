"""`linear_cross_entropy` on XLA: the reference's formulas in a `while` loop over chunks of tokens. XLA sees no order
between chunks that are unrolled, and would hold the logits of several at once.

The target's logit is found by comparison, as gathers and scatters do not fuse. A row whose target is no word has NaN
for its loss: to ask is to wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.xla_loop import loop, parted, rejoined
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.linear_cross_entropy.chunks import chunk_rows, kept_dtype
from megacpp_compile.lowerings.linear_cross_entropy.reference import (
    counted,
    counts,
    final_logits,
    gradient,
    places_of,
    reduced,
    row_losses,
)

# ATen cannot express XLA's `while`: the lowered graph calls this function.
TRACED = False


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x, w = args[2:4] if name.endswith("_backward") else args[:2]
    if x.device.type == "tpu":
        return "no-loop: torch_tpu is given none"
    sizes = (*x.shape, *w.shape)
    return None if all(isinstance(n, int) for n in sizes) else "a number of tokens or of words that is not fixed"


def _statistics(z: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hot = torch.arange(z.shape[1], device=z.device) == at.unsqueeze(1)
    picked = torch.where(hot, z, 0).sum(-1)
    return torch.logsumexp(z, -1), torch.where(hot.any(-1), picked, torch.nan), z.sum(-1)


class Held:
    """What the loop carries: w, b where there is one, and the sums of their gradients that `wanted` names."""

    def __init__(self, w: Tensor, b: Tensor | None, wanted: str, wide: torch.dtype, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of the gradients that are made
        self.operands, self.wanted = (w,) if b is None else (w, b), [name for name in "wb" if name in wanted]
        shapes = {"w": w.shape, "b": w.shape[:1]}
        self.first = *self.operands, *(w.new_zeros(shapes[name], dtype=wide) for name in self.wanted)

    def logits(self, carried: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return F.linear(x, *carried[: len(self.operands)])

    def added(self, carried: tuple[Tensor, ...], d: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """`carried` with what a chunk adds. d: the gradient of its logits, in the compute dtype."""
        sums = dict(zip(self.wanted, carried[len(self.operands) :], strict=True))
        if "w" in sums:
            # Of operands widened again: rounded as a GEMM's, summed in the compute dtype.
            sums["w"] = sums["w"] + d.to(x.dtype).to(d.dtype).t() @ x.to(d.dtype)
        if "b" in sums:
            sums["b"] = sums["b"] + d.sum(0)
        return *carried[: len(self.operands)], *sums.values()

    def made(self, carried: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        w = self.operands[0]
        sums = dict(zip(self.wanted, carried[len(self.operands) :], strict=True))
        dw, db = (sums[name].to(self.dtype) if name in sums else w.new_empty(0, dtype=self.dtype) for name in "wb")
        return dw, db


def _parts(x: Tensor, w: Tensor, *by_row: Tensor) -> tuple[Tensor, ...]:
    """x and what else has an element a row, in as many parts as there are chunks; rows that are not there are zero."""
    rows = chunk_rows(x.shape[0], w.shape[0], compute_dtype(x).itemsize, x.device)
    n = max(1, -(-x.shape[0] // rows))
    return tuple(parted(t.unsqueeze(0), n).squeeze(1) for t in (x, *by_row))


def _joined(t: Tensor, tokens: int) -> Tensor:
    return rejoined(t.unsqueeze(1), tokens).squeeze(0).contiguous()


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, words, wide = x.shape[0], w.shape[0], compute_dtype(x)
    count = counts(target, weight, ignore_index, wide)
    held = Held(w, b, grads, wide, kept_dtype(w.dtype))

    def body(carried: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> Any:
        x, at, count = part
        z = final_logits(held.logits(carried, x), scale, softcap)
        lse, picked, total = _statistics(z, at)
        results = lse, row_losses(lse, picked, total, words, label_smoothing, z_loss)
        if not grads:
            return carried, results
        d = gradient(z, lse, at, count, None, label_smoothing, scale, softcap, z_loss)
        dx = (d.to(x.dtype) @ carried[0],) if "x" in grads else ()
        return held.added(carried, d, x), (*results, *dx)

    carried, results = loop(body, held.first, _parts(x, w, places_of(target, ignore_index), count))
    lse, loss, *dx = (_joined(t, tokens) for t in results)
    return reduced(loss, count, reduction), lse, dx[0] if dx else x.new_empty(0), *held.made(carried)


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
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, wide = x.shape[0], lse.dtype
    count = counts(target, weight, ignore_index, wide)
    count = counted(count, dloss)
    held = Held(w, b, grads, wide, w.dtype)
    own = () if dlse is None else (dlse.to(wide),)

    def body(carried: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> Any:
        x, at, count, lse, *own = part
        z = final_logits(held.logits(carried, x), scale, softcap)
        d = gradient(z, lse, at, count, own[0] if own else None, label_smoothing, scale, softcap, z_loss)
        return held.added(carried, d, x), (d.to(x.dtype) @ carried[0] if "x" in grads else lse,)

    carried, (dx,) = loop(body, held.first, _parts(x, w, places_of(target, ignore_index), count, lse, *own))
    return _joined(dx, tokens) if "x" in grads else x.new_empty(0), *held.made(carried)
