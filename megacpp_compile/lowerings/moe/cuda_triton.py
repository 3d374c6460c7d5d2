"""`moe` on CUDA: the reference's algebra, which Inductor fuses into one pass between any two GEMMs, and the grouped
GEMM that is best for where the weights lie.

Kernels of its own do the GEMMs (`hopper_grouped`). They find each weight by its address, so that separate ones stay
where they are; torch's grouped GEMM (CUTLASS) would need a copy of them all. They read rows where they are too, so
nothing is gathered for a GEMM. Gate, up and activation are one kernel. Behind backward's first GEMM a kernel over rows
does all up to the next ones; where rows are few, within that GEMM. Gradients of the weights are one tensor however the
weights lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation
from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_float8
from megacpp_compile.lowerings._kernels import grouped_fp8  # noqa: F401  registers the GEMMs
from megacpp_compile.lowerings.moe import _grouped, reference

__all__ = ["moe", "moe_backward", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    return refusal(args[0] if name == "moe" else args[1], args[5], reference.precision_of(name, args))


def refusal(kept: Tensor, down: Sequence[Tensor], precision: str) -> str | None:
    """Why these kernels cannot multiply rows of `kept` by weights such as `down`, or None."""
    if kept.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return f"GEMMs in {kept.dtype}"
    if precision:
        sizes = down[0].shape[-2:]
        if kept.device.type == "cuda" and (missing := no_float8(kept.device)):
            return missing
        if kept.dtype not in (torch.bfloat16, torch.float16):
            return f"float8 payloads of {kept.dtype}"
        if any(n % FP8_GEMM_ALIGNMENT for n in sizes if isinstance(n, int)):
            return f"float8 GEMMs of {sizes[0]} x {sizes[1]}, which are no multiples of {FP8_GEMM_ALIGNMENT}"
    return None


def _fuses(activation: Activation, layout: str) -> bool:
    """Whether the kernels that fuse compute this; anything else is Inductor's to fuse, between two grouped GEMMs."""
    return layout in ("pair", "gate_up") and not activation.soft


def _fuses_interleaved(activation: Activation, layout: str) -> bool:
    """As `_fuses`, in forward: there a kernel of channels in turn has registers enough; in backward it would spill."""
    return layout == "interleaved" and not activation.soft or _fuses(activation, layout)


class Fp8Gemms(_grouped.Fp8Gemms):
    """`_grouped.Fp8Gemms` by kernels that multiply payloads, fused as in `GroupedGemms`."""

    fuses_forward, fuses_backward = staticmethod(_fuses), staticmethod(_fuses)

    def _payload(self, weights: list[Tensor], parts: int = 1) -> tuple[Tensor, Tensor]:
        """(payload, scale) of weights in forward: as given, or made and its scale kept."""
        if parts > 1 and self._payloads is not None:
            del self._cast[:parts]
            return self._payloads.into, self._payloads.into_scale
        if self._cast:
            return self._cast.pop(0)
        payload, scale = torch.ops.grouped_gemms.weights_fp8(weights, parts)
        self._made.append(scale)
        return payload, scale

    def _transposed(self, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(payload transposed, scale) of weights in backward."""
        scale = self._given.pop()
        return self._kept.pop() if self._kept else torch.ops.grouped_gemms.transposed_fp8(weights, scale), scale

    def gated(
        self,
        x: Tensor,
        w_gate: list[Tensor],
        w_up: list[Tensor],
        offsets: Tensor,
        token: Tensor | None,
        activation: str,
        b_gate: Tensor | None = None,
        b_up: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        pair = bool(w_gate)
        biases = reference.given(*((b_gate, b_up) if pair else (b_up,)))
        payload, scale = self._payload([*w_gate, *w_up], 2 if pair else 1)
        first, second, a = torch.ops.grouped_gemms.gated_fp8(
            x, payload, scale, offsets, token, activation, pair, *biases
        )
        return [first, second] if pair else [first], a

    def gradients(
        self,
        grad: Tensor,
        weights: list[Tensor],
        hidden: list[Tensor],
        gates: Tensor,
        offsets: Tensor,
        token: Tensor | None,
        activation: str,
    ) -> Any:
        operands = self._transposed(weights)
        return torch.ops.grouped_gemms.gradients_fp8(grad, *operands, hidden, gates, offsets, token, activation)

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
        if transposed:
            x = x if take is None else x[take]
            return torch.ops.grouped_gemms.rows_back_fp8(x, *self._transposed(weights), offsets)  # type: ignore[no-any-return]
        operands = self._payload(weights)
        return torch.ops.grouped_gemms.rows_fp8(x, *operands, offsets, take, *reference.given(bias))  # type: ignore[no-any-return]


class GroupedGemms(_grouped.GroupedGemms):
    """The grouped GEMMs; `gated` fuses gate, up and activation, `gradients` what lies between backward's GEMMs."""

    gradients = torch.ops.grouped_gemms.gradients
    float8 = Fp8Gemms
    fuses_forward, fuses_backward = staticmethod(_fuses_interleaved), staticmethod(_fuses)

    @staticmethod
    def gated(
        x: Tensor,
        w_gate: list[Tensor],
        w_up: list[Tensor],
        offsets: Tensor,
        token: Tensor | None,
        activation: str,
        b_gate: Tensor | None = None,
        b_up: Tensor | None = None,
        interleaved: bool = False,
    ) -> tuple[list[Tensor], Tensor]:
        biases = (b_gate, b_up) if w_gate else (b_up, None)
        others = reference.given(*biases, interleaved or None)
        first, second, a = torch.ops.grouped_gemms.gated(
            x, w_gate or w_up, w_up if w_gate else [], offsets, token, activation, *others
        )
        return [first, second] if w_gate else [first], a


moe = functools.partial(reference.moe, gemms=GroupedGemms)
moe_backward = functools.partial(reference.moe_backward, gemms=GroupedGemms)
