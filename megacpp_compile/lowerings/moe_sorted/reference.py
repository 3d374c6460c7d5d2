"""`moe_sorted` and its backward in plain PyTorch: `moe` without its sort, its gates and its sum over choices."""

from __future__ import annotations

from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.moe._grouped import GroupedGemms
from megacpp_compile.lowerings.moe.reference import Call, backward_of_rows, given, into_experts


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
    into8: Tensor | None = None,
    into_transposed: Tensor | None = None,
    into_scale: Tensor | None = None,
    down8: Tensor | None = None,
    down_transposed: Tensor | None = None,
    down_scale: Tensor | None = None,
    *,
    gemms: type[GroupedGemms] = GroupedGemms,
) -> tuple[Tensor, list[Tensor]]:
    payloads = into8, into_transposed, into_scale, down8, down_transposed, down_scale
    grouped = gemms.of_forward(precision, w_gate, payloads)
    call = Call(w_gate, w_up, w_down, b_gate, b_up, b_down, activation, layout, offsets, None, grouped)
    hidden, a = into_experts(x, call)
    y = grouped.rows([a], w_down, offsets, False, *given(None, b_down))
    return y, (hidden if keep_hidden else []) + (grouped.scales() if precision else [])


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
    into_transposed: Tensor | None = None,
    down_transposed: Tensor | None = None,
    *,
    gemms: type[GroupedGemms] = GroupedGemms,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of x, of w_gate and w_up as one tensor [E, 2n, d], the gate's channels first, w_down, and biases."""
    ones = grad.new_ones(grad.shape[0], dtype=compute_dtype(x.dtype))  # a gate for every row
    hidden, grouped = gemms.of_backward(precision, hidden, (into_transposed, down_transposed))
    call = Call(w_gate, w_up, w_down, b_gate, b_up, b_down, activation, layout, offsets, None, grouped)
    d_x, _, d_into, d_down, d_biases = backward_of_rows(grad, x, ones, hidden, call)
    return d_x, d_into, d_down, d_biases
