"""`moe_sorted` on CUDA: the kernels of `moe`, which read rows where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile.lowerings.moe import cuda_triton as unsorted
from megacpp_compile.lowerings.moe.float8 import forward_of
from megacpp_compile.lowerings.moe.reference import SCALES, precision_of
from megacpp_compile.lowerings.moe_sorted import reference

__all__ = ["moe_sorted", "moe_sorted_backward", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x, down = (args[0], args[4]) if name == "moe_sorted" else (args[1], args[4])
    return unsorted.refusal(x, down, precision_of(name, args))


def moe_sorted(
    x: Tensor,
    offsets: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    w_down: list[Tensor],
    activation: str,
    layout: str,
    keep_hidden: bool = True,
    precision: str = "",
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *payloads: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    grouped: Any = forward_of(unsorted.Fp8Gemms, w_gate, payloads) if precision else unsorted.GroupedGemms
    return reference.moe_sorted(
        x, offsets, w_gate, w_up, w_down, activation, layout, keep_hidden, precision, b_gate, b_up, b_down,
        grouped=grouped,
    )  # fmt: skip


def moe_sorted_backward(
    grad: Tensor,
    x: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    w_down: list[Tensor],
    hidden: list[Tensor],
    offsets: Tensor,
    activation: str,
    layout: str,
    precision: str = "",
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *transposed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    grouped: Any = unsorted.Fp8Gemms(hidden[-SCALES:], transposed) if precision else unsorted.GroupedGemms
    return reference.moe_sorted_backward(
        grad, x, w_gate, w_up, w_down, hidden, offsets, activation, layout, precision, b_gate, b_up, b_down,
        grouped=grouped,
    )  # fmt: skip
