"""`moe_sorted` on XLA: `moe`'s blocks of rows, a fixed number in all, each of which is one GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile.lowerings.moe.reference import precision_of
from megacpp_compile.lowerings.moe.tpu_xla import GroupedGemms, refusal
from megacpp_compile.lowerings.moe_sorted import reference


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x = args[0] if name == "moe_sorted" else args[1]
    return refusal(x.shape, precision_of(name, args))


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
) -> tuple[Tensor, list[Tensor]]:
    return reference.moe_sorted(
        x, offsets, w_gate, w_up, w_down, activation, layout, keep_hidden, precision, b_gate, b_up, b_down,
        grouped=GroupedGemms(),
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
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return reference.moe_sorted_backward(
        grad, x, w_gate, w_up, w_down, hidden, offsets, activation, layout, precision, b_gate, b_up, b_down,
        grouped=GroupedGemms(),
    )  # fmt: skip
