"""The GEMMs of `moe` in float8, in plain PyTorch: what `precision="fp8_current"` means, and the oracle.

Both operands of a GEMM are e4m3, with a scale for every row: of x a token's; of the input of `down`, of the output's
gradient and of the gradients before the activation a slot's; of a weight [n]. Biases are added unrounded. Backward
multiplies by the same payloads as forward. There the weights' scales lie along the summed dimension, so they are
multiplied into the rows before these are rounded. Gradients of the weights are GEMMs of unrounded operands.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels import grouped
from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8, rounded_by, widened
from megacpp_compile.lowerings._op import compute_dtype, ends_until

FORMAT = torch.float8_e4m3fn


class Fp8Gemms:
    """The GEMMs of one call. given: the scales that forward kept; backward, whose GEMMs run in reverse order, pops them
    from the end."""

    weights = torch.ops.grouped_gemms.weights
    sums = torch.ops.grouped_gemms.sums
    side_by_side = True  # the gradients of gate and up are rounded as one row

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        self._given, self._made = list(given), list[Tensor]()

    def scales(self) -> list[Tensor]:
        """The scales of the weights before the activation, the gate's first [E, 2n], and of those behind it [E, d]."""
        *into, down = self._made
        return [torch.cat(into, 1), down]

    def rows(
        self,
        xs: list[Tensor],
        weights: list[Tensor],
        offsets: Tensor,
        transposed: bool,
        take: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        (x,) = xs
        dtype = compute_dtype(x)
        each = [w.to(dtype) for w in grouped.separate(weights)]
        experts = offsets.shape[0]
        wide = x.to(dtype)
        if transposed:
            scale = self._given.pop()
            wide = wide if take is None else wide[take]
            group = ends_until(offsets, torch.arange(wide.shape[0], device=x.device)).clamp(max=experts - 1)
            payload, own = round_to_fp8(wide * scale[group], FORMAT)
            # Of several parts, one after the other, as the weights lie.
            parts = scale.view(experts, len(each) // experts, -1).transpose(0, 1).flatten(0, 1)
            operands = [widened(rounded_by(w, s[:, None], FORMAT), dtype) for w, s in zip(each, parts, strict=True)]
            rows = (widened(payload, dtype) * own).chunk(len(each) // experts, 1)
            return torch.ops.grouped_gemms.rows(list(rows), operands, offsets, True).to(x.dtype)
        payload, own = round_to_fp8(wide, FORMAT)
        rounded = [round_to_fp8(w, FORMAT) for w in each]
        self._made.append(torch.stack([s.squeeze(-1) for _, s in rounded]))
        operands = [widened(p, dtype) * s for p, s in rounded]
        added = () if bias is None else (bias.to(dtype),)
        y = torch.ops.grouped_gemms.rows([widened(payload, dtype) * own], operands, offsets, False, take, *added)
        return y.to(grouped.dtype_of(x, bias))
