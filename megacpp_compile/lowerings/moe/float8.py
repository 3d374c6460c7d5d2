"""The GEMMs of `moe` in float8, in plain PyTorch: what `precision="fp8_current"` means, and the oracle.

Both operands of a GEMM are e4m3, with a scale for every row: of x a token's; of the input of `down`, of the output's
gradient and of the gradients before the activation a slot's; of a weight [n]. Biases are added unrounded. Backward
multiplies by the same payloads as forward. There the weights' scales lie along the summed dimension, so they are
multiplied into the rows before these are rounded. Gradients of the weights are GEMMs of unrounded operands. Payloads of
the weights are made in each call, or given to it (`Float8Operands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels import grouped
from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8, rounded_by, widened
from megacpp_compile.lowerings._op import compute_dtype, ends_until

FORMAT = torch.float8_e4m3fn


class Float8Operands(NamedTuple):
    """Casts of a layer's weights that its caller made (`megacpp::fp8_quantize_experts`): of those before the activation
    [E, channels, d], the gate's first, transposed [E, d, channels], and their scales; the same of those behind it.
    transposed: empty where there is no backward."""

    into: Tensor
    into_transposed: Tensor
    into_scale: Tensor
    down: Tensor
    down_transposed: Tensor
    down_scale: Tensor

    @classmethod
    def of(cls, given: Sequence[Tensor | None]) -> Float8Operands | None:
        """The last arguments of an op of experts; None where it has none."""
        there = [t for t in given if t is not None]
        assert len(there) in (0, len(cls._fields)), "all of the casts, or none"
        return cls(*there) if there else None

    @classmethod
    def kept(cls, given: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """(scales, transposed) that backward keeps of the last arguments of an op of experts."""
        own = cls.of(given)
        return ([own.into_scale, own.down_scale], [own.into_transposed, own.down_transposed]) if own else ([], [])


class Fp8Gemms:
    """The GEMMs of one call. given: the scales that forward kept; backward, whose GEMMs run in reverse order, pops them
    from the end, and so the weights transposed, where forward was given payloads. payloads: forward's, with `parts`
    weights before the activation."""

    weights = torch.ops.grouped_gemms.weights
    sums = torch.ops.grouped_gemms.sums
    side_by_side = True  # the gradients of gate and up are rounded as one row

    def __init__(
        self,
        given: Sequence[Tensor] = (),
        transposed: Sequence[Tensor | None] = (),
        payloads: Float8Operands | None = None,
        parts: int = 1,
    ) -> None:
        self._given, self._made, self._payloads = list(given), list[Tensor](), payloads
        self._kept = [t for t in transposed if t is not None]
        self._cast = list[tuple[Tensor, Tensor]]()
        if payloads is not None:
            scales = [scale.contiguous() for scale in payloads.into_scale.chunk(parts, 1)]  # as kernels read them
            into = zip(payloads.into.chunk(parts, 1), scales, strict=True)
            self._cast = [*into, (payloads.down, payloads.down_scale)]

    def scales(self) -> list[Tensor]:
        """The scales of the weights before the activation, the gate's first [E, 2n], and of those behind it [E, d];
        none where the caller has them."""
        return [torch.cat(self._made[:-1], 1), self._made[-1]] if self._made else []

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
            if self._kept:  # [E, d, parts * n]
                blocks = self._kept.pop().view(experts, -1, len(each) // experts, each[0].shape[0])
                rounded = [*blocks.permute(2, 0, 3, 1).flatten(0, 1).unbind(0)]
            else:
                rounded = [rounded_by(w, s[:, None], FORMAT) for w, s in zip(each, parts, strict=True)]
            operands = [widened(w, dtype) for w in rounded]
            rows = (widened(payload, dtype) * own).chunk(len(each) // experts, 1)
            return torch.ops.grouped_gemms.rows(list(rows), operands, offsets, True).to(x.dtype)
        payload, own = round_to_fp8(wide, FORMAT)
        if self._cast:
            pairs = list(zip(*self._cast.pop(0), strict=True))
            operands = [widened(p, dtype) * s[:, None] for p, s in pairs]
        else:
            pairs = [round_to_fp8(w, FORMAT) for w in each]
            self._made.append(torch.stack([s.squeeze(-1) for _, s in pairs]))
            operands = [widened(p, dtype) * s for p, s in pairs]
        added = () if bias is None else (bias.to(dtype),)
        y = torch.ops.grouped_gemms.rows([widened(payload, dtype) * own], operands, offsets, False, take, *added)
        return y.to(grouped.dtype_of(x, bias))


def forward_of(gemms: type[Fp8Gemms], w_gate: Sequence[Tensor], payloads: Sequence[Tensor | None]) -> Fp8Gemms:
    """The GEMMs of a forward call whose last arguments are `payloads`."""
    return gemms(payloads=Float8Operands.of(payloads), parts=2 if w_gate else 1)
