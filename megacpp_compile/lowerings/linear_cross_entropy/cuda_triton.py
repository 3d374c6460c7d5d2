"""`linear_cross_entropy` on CUDA: cuBLAS makes the logits of a chunk of tokens, one Triton kernel puts their gradient
in their place (`_triton_rows`), and cuBLAS takes it from there.

In memory beside operands and results: the logits of one chunk (`chunks`), and where several chunks add to the gradient
of w, that in `chunks.sum_dtype`. No atomics: equal inputs give equal bits. A target that is no word fails an assertion
on the device, as in eager.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.dispatch import disable_current_modes
from megacpp_compile._torch.ops import assert_async, aten
from megacpp_compile.lowerings._kernels import triton_grouped
from megacpp_compile.lowerings._kernels.triton_launch import is_wide
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.linear_cross_entropy import chunks
from megacpp_compile.lowerings.linear_cross_entropy._triton_rows import launch
from megacpp_compile.lowerings.linear_cross_entropy.chunks import TILE
from megacpp_compile.lowerings.linear_cross_entropy.reference import counted, counts, reduced, row_losses

__all__ = ["linear_cross_entropy", "linear_cross_entropy_backward", "supports"]

# Bytes of float32 products that torch 2.9, which adds none of them inside a GEMM, makes beside that sum.
SCRATCH_BYTES = 64 << 20
# Rows of the logits' gradient that a program adds up.
SUMMED = 512

of_chunks = torch.ops.megacpp_head.walk.default  # of `_chunk_ops`, which calls `walk`


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    words = args[3 if name.endswith("_backward") else 1].shape[0]
    return f"{words} words: a row is counted in 32 bits" if isinstance(words, int) and words >= 1 << 31 else None


class HeadChunks:
    """The chunks of a call. w and b have `width` words, of which those behind `words` are zeros: cuBLAS has no fast
    kernel for an odd number of them, also where rows are aligned, and adds a bias inside a GEMM whose result is
    contiguous."""

    def __init__(self, x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, grads: str) -> None:
        self.tokens, self.words, self.width = x.shape[0], w.shape[0], chunks.padded(w.shape[0], x.dtype)
        self.x, self.target = _dense(x), target.contiguous()
        self.w, self.b = _padded(_dense(w), self.width), b if b is None else _padded(b.contiguous(), self.width)
        wide = chunks.wide_bytes(w, grads)
        self.slices = list(chunks.chunks(self.tokens, self.width, x.dtype.itemsize, x.device, wide, w.shape[1]))

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, their logits [.., width]), each time in the same memory."""
        longest = max((s.stop - s.start for s in self.slices), default=0)
        buffer = self.x.new_empty((longest, self.width))
        for rows in self.slices:
            logits = buffer[: rows.stop - rows.start]
            if self.b is None:
                torch.mm(self.x[rows], self.w.t(), out=logits)
            else:
                torch.addmm(self.b, self.x[rows], self.w.t(), out=logits)
            yield rows, logits


class HeadGradients:
    """Those of x, w and b that `wanted` names, from chunk to chunk; w's and b's are returned in `dtype`."""

    def __init__(self, of: HeadChunks, wanted: str, dtype: torch.dtype) -> None:
        self.of, self.wanted, self.dtype = of, wanted, dtype
        x, w, b = (name in wanted for name in "xwb")
        sums = torch.promote_types(dtype, chunks.sum_dtype(of.w.dtype, len(of.slices)))
        new = of.w.new_empty if of.tokens else of.w.new_zeros
        self.dx = of.x.new_empty(of.x.shape if x else 0)
        self.dw = new(of.w.shape if w else 0, dtype=sums)
        self.db = new(of.width if b else 0, dtype=compute_dtype(of.w))
        self.ends = functools.cache(functools.partial(parts_of, device=of.x.device))

    def add(self, rows: slice, d: Tensor) -> None:
        """d: the gradient of the logits of `rows`, zeros behind the words."""
        if "x" in self.wanted:
            torch.mm(d, self.of.w, out=self.dx[rows])
        if "w" in self.wanted:
            add_product(self.dw, d.t(), self.of.x[rows], first=rows.start == 0)
        if "b" in self.wanted:
            if rows.start:
                self.db += column_sums(d, self.ends(len(d)))
            else:
                column_sums(d, self.ends(len(d)), self.db)

    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, that of b in the compute dtype."""
        return self.dx, self.dw[: self.of.words].to(self.dtype), self.db[: self.of.words]


def walk(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    are_words: Tensor | None,
    count: Tensor,
    dlse: Tensor | None,
    lse: Tensor | None,
    settings: Sequence[float],
    grads: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the op `_chunk_ops.walk`: run the kernel on every chunk, and `HeadGradients` on what it leaves there."""
    if are_words is not None:
        assert_async(are_words, "linear_cross_entropy: a target is out of bounds")
    of = HeadChunks(x, w, b, target, grads)
    made = HeadGradients(of, grads, dtype)
    count = count.contiguous()
    found = [torch.empty_like(count) if lse is None else count.new_empty(0) for _ in range(3)]
    statistics = found if lse is None else [lse.contiguous()] * 3
    vectors = dict(zip(("lse", "picked", "total"), statistics, strict=True))
    vectors |= {"target": of.target, "count": count, "dlse": count if dlse is None else dlse.contiguous()}
    sweeps = {"STATISTICS": lse is None, "GRADIENT": bool(grads), "DLSE": dlse is not None}
    walk_chunks(of.logits(), made, vectors, constants(x, *settings) | sweeps)
    return *found, *made.made()  # type: ignore[return-value]


def walk_chunks(
    logits: Iterable[tuple[slice, Tensor]], made: HeadGradients, vectors: dict[str, Tensor], constants: dict[str, Any]
) -> None:
    """Run the kernel on chunks, (tokens, their logits) each, and `made` on gradients that it leaves there. vectors: a
    number for each token."""
    for rows, chunk in logits:
        own = {name: t[rows] for name, t in vectors.items()}
        launch(len(chunk), made.of.words, logits=chunk, ROOM=made.of.width, **own, **constants)
        if constants["GRADIENT"]:
            made.add(rows, chunk)


def constants(x: Tensor, label_smoothing: float, scale: float, softcap: float, z_loss: float) -> dict[str, Any]:
    """Those of the kernel that say what a loss is. softcap: 0 for none."""
    return {"SMOOTHING": label_smoothing, "SCALE": scale, "SOFTCAP": softcap, "Z_LOSS": z_loss,
            "WIDE": is_wide(x.dtype)}  # fmt: skip


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
    count, kept = counts(target, weight, ignore_index, compute_dtype(x)), chunks.kept_dtype(w.dtype)
    are_words = ((target >= 0) & (target < w.shape[0]) | (target == ignore_index)).all()
    settings = label_smoothing, scale, softcap or 0.0, z_loss
    lse, picked, total, dx, dw, db = of_chunks(x, w, b, target, are_words, count, None, None, settings, grads, kept)
    loss = row_losses(lse, picked, total, w.shape[0], label_smoothing, z_loss)
    return reduced(loss, count, reduction), lse, dx, dw, db.to(kept)


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
    count = counted(counts(target, weight, ignore_index, lse.dtype), dloss)
    own = None if dlse is None else dlse.to(lse.dtype)
    settings = label_smoothing, scale, softcap or 0.0, z_loss
    *_, dx, dw, db = of_chunks(x, w, b, target, None, count, own, lse, settings, grads, w.dtype)
    return dx, dw, db.to(w.dtype)


def _padded(t: Tensor, words: int) -> Tensor:
    """`t` with zeros behind what it has, so many words in all."""
    if len(t) == words:
        return t
    padded = t.new_empty((words, *t.shape[1:]))
    padded[: len(t)], padded[len(t) :] = t, 0
    return padded


def column_sums(d: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of d's rows in the compute dtype, of those up to each of `ends` first."""
    return torch.sum(triton_grouped.sums(d, ends, None, None), 0, out=out)


def parts_of(rows: int, device: torch.device) -> Tensor:
    """Where parts of `SUMMED` rows end, which fill a GPU."""
    return torch.arange(SUMMED, rows + SUMMED, SUMMED, device=device).clamp_(max=rows)


def _dense(t: Tensor) -> Tensor:
    """`t` as cuBLAS takes it, so that no chunk copies it again."""
    rows_or_columns = (t.stride(1 - d) == 1 and t.stride(d) >= max(1, t.shape[1 - d]) for d in (0, 1))
    return t if any(rows_or_columns) else t.contiguous()


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b for the first chunk, total += a @ b for others, where total may be wider than a and b."""
    wide = total.dtype
    if wide == a.dtype or total.device.type != "cuda":  # a CPU runs this for tests alone
        a, b = a.to(wide), b.to(wide)
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif first:
        aten.mm.dtype_out(a, b, wide, out=total)
    elif _adds_wide(a.device, a.dtype):
        aten.addmm.dtype_out(total, a, b, wide, out=total)
    else:
        each = max(TILE, SCRATCH_BYTES // max(1, b.shape[1] * wide.itemsize))
        for words in range(0, len(total), each):
            total[words : words + each] += aten.mm.dtype(a[words : words + each], b, wide)


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product of half precision to float32 inside the GEMM: older ones take no such sum. Tried
    with tensors of their own where kernels are compiled ahead, on fake ones."""
    with disable_current_modes():
        a = torch.zeros((16, 16), dtype=dtype, device=device)
        total = torch.zeros((16, 16), device=device)
        try:
            aten.addmm.dtype_out(total, a, a, torch.float32, out=total)
        except RuntimeError:
            return False
        return True
