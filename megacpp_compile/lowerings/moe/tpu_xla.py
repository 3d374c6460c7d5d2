"""`moe` on XLA: each expert's rows are padded to whole blocks, a fixed number in all, and each block is one GEMM.

No shape depends on the routing: S rows of E experts fill at most `(S + E (B - 1)) / B` blocks of B rows, wherever the
rows go. Nothing is dropped. The cost is less than B rows of padding an expert, and a copy of an expert's weights for
each of its blocks. B is about the rows an expert gets if all get the same.

Order and result are the reference's, but for gradients of weights in half precision: a block's is rounded before those
of its expert are summed, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype, ends_until
from megacpp_compile.lowerings.moe import _grouped, reference

# Rows from which a GEMM takes longer than to copy its weights, on what multiplies a few hundred times faster than
# it reads.
MOST_ROWS = 512


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    return refusal(args[2].shape, reference.precision_of(name, args))  # the gates' in forward and in backward


def refusal(shape: Sequence[Any], precision: str) -> str | None:
    """Why blocks cannot serve a number of rows that `shape` says, or None."""
    if precision:
        return "no float8 GEMMs"
    return None if all(isinstance(n, int) for n in shape) else "a number of tokens that is not fixed"


def block_rows(slots: int, experts: int) -> int:
    """Rows of a block, a power of two: about what an expert gets if slots are spread evenly."""
    even = -(-slots // experts)
    return min(MOST_ROWS, 1 << max(0, even - 1).bit_length())


class _Blocks:
    """Where sorted rows go. `expert` [n]: whose weights a block reads; `source` [n * rows]: the sorted row that comes
    there, 0 where none does; `filled` [n, rows, 1]: whether one does; `place` [S]: where a sorted row went; `mine`
    [S, 1]: whether it is any expert's."""

    def __init__(self, offsets: Tensor, slots: int) -> None:
        experts, on = offsets.shape[0], offsets.device
        self.rows = rows = block_rows(slots, experts)
        self.count = (slots + experts * (rows - 1)) // rows
        ends = offsets.long()
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        blocks = (ends - starts + rows - 1) // rows
        block_ends = blocks.cumsum(0)
        first = block_ends - blocks  # of each expert

        block = torch.arange(self.count, device=on)
        self.expert = ends_until(block_ends, block).clamp(max=experts - 1)  # blocks behind the last hold no rows
        start = starts[self.expert] + (block - first[self.expert]) * rows
        slot = start[:, None] + torch.arange(rows, device=on)
        filled = slot < ends[self.expert][:, None]
        self.source = torch.where(filled, slot, 0).flatten()
        self.filled = filled[..., None]

        slot = torch.arange(slots, device=on)
        self.mine = (slot < ends[-1])[:, None]
        owner = ends_until(ends, slot).clamp(max=experts - 1)
        self.place = torch.where(self.mine[:, 0], first[owner] * rows + slot - starts[owner], 0)

    def fill(self, x: Tensor, take: Tensor | None) -> Tensor:
        """[n, rows, d] of sorted rows, or of rows `take` of x; rows of a block that none fills hold some other row."""
        source = self.source if take is None else take[self.source]
        return x[source].unflatten(0, (self.count, self.rows))


class GroupedGemms(_grouped.GroupedGemms):
    """The grouped GEMMs of one call, all with the same offsets."""

    def __init__(self) -> None:
        self._blocks: _Blocks | None = None

    def blocks(self, offsets: Tensor, slots: int) -> _Blocks:
        self._blocks = self._blocks or _Blocks(offsets, slots)
        return self._blocks

    def rows(  # type: ignore[override]
        self,
        xs: list[Tensor],
        weights: list[Tensor],
        offsets: Tensor,
        transposed: bool,
        take: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        slots = (xs[0] if take is None else take).shape[0]
        each = _stacked(weights, len(xs))
        if slots == 0:
            dtype = xs[0].dtype if bias is None else bias.dtype
            return xs[0].new_zeros((0, each[0].shape[-1 if transposed else -2]), dtype=dtype)
        k = self.blocks(offsets, slots)
        out = None if bias is None else bias[k.expert][:, None]
        for x, w in zip(xs, each, strict=True):
            w = w[k.expert]
            part = k.fill(x, take) @ (w if transposed else w.transpose(-1, -2))
            out = part if out is None else out + part
        assert out is not None
        return torch.where(k.mine, out.flatten(0, 1)[k.place], 0)

    def weights(  # type: ignore[override]
        self,
        grad: Tensor,
        x: Tensor,
        offsets: Tensor,
        take_grad: Tensor | None = None,
        take_x: Tensor | None = None,
    ) -> Tensor:
        slots = (grad if take_grad is None else take_grad).shape[0]
        out = x.new_zeros((offsets.shape[0], grad.shape[1], x.shape[1]))
        if slots == 0:
            return out
        k = self.blocks(offsets, slots)
        # Both, as nothing times infinity is no number.
        left, right = (torch.where(k.filled, k.fill(t, take), 0) for t, take in ((grad, take_grad), (x, take_x)))
        parts = left.transpose(-1, -2) @ right
        return out.to(compute_dtype(out)).index_add(0, k.expert, parts.to(compute_dtype(out))).to(x.dtype)

    def sums(  # type: ignore[override]
        self, rows: Tensor, offsets: Tensor, take: Tensor | None = None, factors: Tensor | None = None
    ) -> Tensor:
        slots = (rows if take is None else take).shape[0]
        out = rows.new_zeros((offsets.shape[0], rows.shape[1]), dtype=compute_dtype(rows))
        if slots == 0:
            return out
        k = self.blocks(offsets, slots)
        filled = torch.where(k.filled, k.fill(rows, take).to(out.dtype), 0)
        if factors is not None:
            filled = filled * torch.where(k.filled, k.fill(factors[:, None], None).to(out.dtype), 0)
        return out.index_add(0, k.expert, filled.sum(1))


def _stacked(weights: list[Tensor], parts: int) -> list[Tensor]:
    """[E, n, d] of each of the `parts` that `weights` hold one after the other."""
    if weights[0].dim() == 3:
        return weights
    experts = len(weights) // parts
    return [torch.stack(weights[i * experts : (i + 1) * experts]) for i in range(parts)]


moe = functools.partial(reference.moe, gemms=GroupedGemms)
moe_backward = functools.partial(reference.moe_backward, gemms=GroupedGemms)
