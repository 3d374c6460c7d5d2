"""`moe` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

Slots (token, choice) are sorted by expert, so that each expert's rows are contiguous: gather, grouped GEMMs, and a
weighted sum over every token's choices. No shape depends on the routing, and no sum on the order of atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation, passed_on
from megacpp_compile.lowerings._kernels.grouped import dtype_of
from megacpp_compile.lowerings._op import compute_dtype, ends_until
from megacpp_compile.lowerings.moe import float8
from megacpp_compile.lowerings.moe._grouped import Grouped, GroupedGemms, experts_of, weights_gradient

PRECISIONS = ("", "fp8_current")
_PRECISION_AT = {"moe": 10, "moe_backward": 11, "moe_sorted": 8, "moe_sorted_backward": 9}
# What a forward in fp8 takes of the time in 16 bits: GEMMs of 2.0 ms and casts of 0.6, where GEMMs took 3.25
# (docs/precision.md).
TIME_IN_FP8 = 0.8
SCALES = 2  # tensors of scales that follow what is kept of a call in float8


def precision_of(name: str, args: Sequence[Any]) -> str:
    """The argument `precision` of a call of an op of routed experts, which may leave it out."""
    at = _PRECISION_AT[name]
    return args[at] if len(args) > at else ""


def check_precision(precision: str) -> None:
    assert precision in PRECISIONS, precision


def by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(slots sorted by expert [S], where each expert's slots end [E]). Slots of no expert come last."""
    flat = indices.reshape(-1)
    key = torch.where((flat < 0) | (flat >= experts), experts, flat)
    # A radix sort passes once over each byte of its keys.
    key = key.to(torch.uint8 if experts < 256 else torch.int16 if experts < 2**15 else torch.int32)
    ordered, order = torch.sort(key, stable=True)
    ends = ends_until(ordered, torch.arange(experts, device=key.device).to(key.dtype))
    return order, ends.to(torch.int32)


def inverse_of(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))


def gate_and_up(hidden: Sequence[Tensor], layout: str) -> list[Tensor]:
    """[gate, up], or [up] where the layout has no gate."""
    if layout == "interleaved":
        return [hidden[0][:, ::2], hidden[0][:, 1::2]]
    if layout in ("gate_up", "up_gate"):
        first, second = hidden[0].chunk(2, -1)
        return [first, second] if layout == "gate_up" else [second, first]
    return list(hidden)


def activated(hidden: Sequence[Tensor], activation: str, layout: str, dtype: torch.dtype) -> Tensor:
    curve = Activation.parse(activation)
    gate, *up = (h.to(compute_dtype(h.dtype)) for h in gate_and_up(hidden, layout))
    out = curve.of_gate(gate)[0]
    return (out * curve.of_up(up[0])[0] if up else out).to(dtype)


def moe(
    x: Tensor,
    indices: Tensor,
    gates: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    w_down: list[Tensor],
    activation: str,
    layout: str,
    out_dtype: torch.dtype,
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
    grouped: Grouped = GroupedGemms,  # type: ignore[assignment]
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    payloads = into8, into_transposed, into_scale, down8, down_transposed, down_scale
    grouped = forward_gemms(grouped, precision, w_gate, payloads)
    order, offsets = by_expert(indices, experts_of(w_down))
    token = order // indices.shape[1]
    hidden, a = into_experts(x, w_gate, w_up, offsets, token, activation, layout, b_gate, b_up, grouped)
    out = grouped.rows([a], w_down, offsets, False, *given(None, b_down))
    wide = torch.promote_types(compute_dtype(out.dtype), gates.dtype)
    y = _per_token(out, order, offsets, gates.to(wide)).sum(1).to(out_dtype)
    kept = (hidden if keep_hidden else []) + (grouped.scales() if precision else [])  # type: ignore[attr-defined]
    return y, kept, order, offsets


def forward_gemms(grouped: Grouped, precision: str, w_gate: list[Tensor], payloads: Sequence[Tensor | None]) -> Grouped:
    """The GEMMs of forward: `grouped`, or the reference's in float8 where these are its own in another precision."""
    if precision and grouped is GroupedGemms:
        return float8.forward_of(float8.Fp8Gemms, w_gate, payloads)
    return grouped


def into_experts(
    x: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    offsets: Tensor,
    token: Tensor | None,
    activation: str,
    layout: str,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    grouped: Grouped,
) -> tuple[list[Tensor], Tensor]:
    """(results of the GEMMs before the activation, the activated hidden) of rows `token` of x, or of all."""
    if _fused(grouped, "fuses_forward", activation, layout):
        interleaved = True if layout == "interleaved" else None
        return grouped.gated(  # type: ignore[attr-defined, no-any-return]
            x, w_gate, w_up, offsets, token, activation, *given(b_gate, b_up, interleaved)
        )
    hidden = _before_activation(x, w_gate, w_up, offsets, token, b_gate, b_up, grouped)
    return hidden, activated(hidden, activation, layout, x.dtype)


def _before_activation(
    x: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    offsets: Tensor,
    token: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    grouped: Grouped,
) -> list[Tensor]:
    pairs = (w_gate, b_gate), (w_up, b_up)
    return [grouped.rows([x], w, offsets, False, token, *given(b)) for w, b in pairs if w]


def empty_hidden(
    x: Tensor, rows: Any, w_gate: list[Tensor], w_up: list[Tensor], b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Tensors such as `rows` rows of x have before the activation."""
    pairs = (w_gate, b_gate), (w_up, b_up)
    return [x.new_empty((rows, w[0].shape[-2]), dtype=dtype_of(x, b)) for w, b in pairs if w]


def given(*args: Any) -> tuple[Any, ...]:
    """`args` up to the last that is not None, so that a call without biases has no arguments for them."""
    kept = [i + 1 for i, a in enumerate(args) if a is not None]
    return args[: max(kept, default=0)]


def _fused(grouped: Grouped, which: str, activation: str, layout: str) -> bool:
    """Whether `grouped` has a kernel of a GEMM and all that follows it up to the next one."""
    fuses = getattr(grouped, which, None)
    return fuses is not None and fuses(Activation.parse(activation), layout)


def _per_token(rows: Tensor, order: Tensor, offsets: Tensor, gates: Tensor) -> Tensor:
    """[T, k, d]: every token's rows times its gates; zero for slots of no expert, whose rows may be anything."""
    place = inverse_of(order).view(gates.shape)
    return torch.where((place < offsets[-1])[..., None], rows[place].to(gates.dtype) * gates[..., None], 0)


def moe_backward(
    grad: Tensor,
    x: Tensor,
    gates: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    w_down: list[Tensor],
    hidden: list[Tensor],
    order: Tensor,
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
    grouped: Grouped = GroupedGemms,  # type: ignore[assignment]
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of x, gates, w_gate and w_up as one tensor [E, 2n, d], the gate's channels first, w_down, and biases.

    With `out = down(a) + b_down` and `dy` the gradient of y, the gate's gradient `dy . out` is `(dy @ w_down) . a` and
    `dy . b_down`: no expert's output is kept.
    """
    tokens, k = gates.shape
    token = order // k
    gate_of = gates.reshape(-1)[order].to(compute_dtype(x.dtype))
    d_rows, d_gate, d_into, d_down, d_biases = backward_of_rows(
        grad, x, gate_of, w_gate, w_up, w_down, hidden, offsets, token, activation, layout, precision, b_gate, b_up,
        b_down, grouped, (into_transposed, down_transposed),
    )  # fmt: skip
    d_gates = d_gate.to(gates.dtype)[inverse_of(order)].view(gates.shape)
    d_x = _per_token(d_rows, order, offsets, gates.new_ones((), dtype=gate_of.dtype).expand(tokens, k)).sum(1)
    return d_x.to(x.dtype), d_gates, d_into, d_down, d_biases


def backward_of_rows(
    grad: Tensor,
    x: Tensor,
    gate_of: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    w_down: list[Tensor],
    hidden: list[Tensor],
    offsets: Tensor,
    token: Tensor | None,
    activation: str,
    layout: str,
    precision: str,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    grouped: Grouped,
    transposed: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rows that experts read, of their gates `gate_of` [S], and of weights and biases as
    `moe_backward` has them. token: the rows of x and of grad; None where these are in the order of experts already."""
    if precision:
        hidden, scales = hidden[:-SCALES], hidden[-SCALES:]
        grouped = float8.Fp8Gemms(scales, transposed) if grouped is GroupedGemms else grouped
    ups = [w for w in (w_gate, w_up) if w]
    hidden = hidden or _before_activation(x, w_gate, w_up, offsets, token, b_gate, b_up, grouped)
    unrounded, grad = grad, grad.to(x.dtype)
    if _fused(grouped, "fuses_backward", activation, layout):
        d_hidden, a, d_gate = grouped.gradients(grad, w_down, hidden, gate_of, offsets, token, activation)  # type: ignore[attr-defined]
    else:
        d_act = _before_gates(grad, w_down, offsets, token, grouped)
        # Of wide biases the gradients are summed as exactly as biases were added.
        wide = next((b.dtype for b in (b_gate, b_up) if b is not None and b.dtype != x.dtype), x.dtype)
        d_hidden, a, d_gate = _gradients(d_act, hidden, gate_of, offsets, activation, layout, x.dtype, wide)

    added_grad = unrounded.to(x.dtype if b_down is None else b_down.dtype)
    d_biases, added = _bias_gradients(added_grad, d_hidden, gate_of, offsets, token, (b_gate, b_up), b_down, grouped)
    d_hidden = d_hidden.to(x.dtype)
    d_gate = d_gate if added is None else d_gate + added
    d_down = weights_gradient(grouped, [w_down], (grad, token), (a, None), offsets)
    d_into = weights_gradient(grouped, ups, (d_hidden, None), (x, token), offsets)
    parts = [d_hidden] if getattr(grouped, "side_by_side", False) else list(d_hidden.chunk(len(ups), 1))
    d_rows = grouped.rows(parts, [w for part in ups for w in part], offsets, True)
    return d_rows, d_gate, d_into, d_down, d_biases


def _bias_gradients(
    grad: Tensor,
    d_hidden: Tensor,
    gate_of: Tensor,
    offsets: Tensor,
    token: Tensor | None,
    into: tuple[Tensor | None, Tensor | None],
    b_down: Tensor | None,
    grouped: Grouped,
) -> tuple[list[Tensor], Tensor | None]:
    """(gradients of the biases that are there; by row, what the last one adds to the gradients of the gate weights)"""
    found, added = list[Tensor](), None
    if any(b is not None for b in into):
        widths = [b.shape[1] if b is not None else 0 for b in into]
        widths = [w or d_hidden.shape[1] - sum(widths) for w in widths]  # of a layout without a gate, what is left is 0
        sums = grouped.sums(d_hidden, offsets).split(widths, 1)
        found = [part.to(b.dtype, copy=True) for part, b in zip(sums, into, strict=True) if b is not None]
    if b_down is not None:
        rows = torch.arange(gate_of.shape[0], device=gate_of.device)
        expert = ends_until(offsets, rows).clamp(max=b_down.shape[0] - 1)
        added = ((grad if token is None else grad[token]).to(gate_of.dtype) * b_down[expert].to(gate_of.dtype)).sum(-1)
        added = torch.where(rows < offsets[-1], added, 0)
        found.append(grouped.sums(grad, offsets, token, gate_of).to(b_down.dtype))
    return found, added


def _before_gates(
    grad: Tensor, w_down: list[Tensor], offsets: Tensor, token: Tensor | None, grouped: Grouped
) -> Tensor:
    """The gradient of the activated hidden, by row, without the gate. In float16 it may leave the range where eager's,
    with the gate, does not: powers of two bring the rows to about 1 before they are multiplied, and give the result
    its size again in float32."""
    if grad.dtype != torch.float16:
        return grouped.rows([grad], w_down, offsets, True, token)
    largest = grad.abs().amax(-1, keepdim=True).float()
    power = torch.where(largest > 0, largest, 1).log2().floor().exp2()
    d_act = grouped.rows([(grad / power).to(grad.dtype)], w_down, offsets, True, token)
    return d_act * (power if token is None else power[token])


def _gradients(
    d_act: Tensor,
    hidden: Sequence[Tensor],
    gate_of: Tensor,
    offsets: Tensor,
    activation: str,
    layout: str,
    narrow: torch.dtype,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradients of the hidden in dtype `wide`, side by side; the activated hidden times its gate weight, in `narrow`;
    gradients of the gate weights), by row. d_act: the gradient of the activated hidden, without the gate weight."""
    dtype = gate_of.dtype
    here = (torch.arange(d_act.shape[0], device=d_act.device) < offsets[-1])[:, None]
    d_a = torch.where(here, d_act.to(dtype), 0)
    inner, *up = (torch.where(here, h.to(dtype), 0) for h in gate_and_up(hidden, layout))
    curve = Activation.parse(activation)
    f, slope = curve.of_gate(inner)
    factor, up_slope = curve.of_up(up[0]) if up else (None, None)
    a = f if factor is None else f * factor
    d_gate = (d_a * a).sum(-1)
    d_a = d_a * gate_of[:, None]
    parts = [d_a * slope] if factor is None else [d_a * slope * factor, d_a * f]
    parts[0] = passed_on(parts[0], slope, curve.selects)
    if up_slope is not None:
        parts[1] = passed_on(parts[1] * up_slope, up_slope, curve.selects)
    if layout == "interleaved":
        d_hidden = torch.stack([p.to(wide) for p in parts], -1).flatten(-2)
        return d_hidden, (a * gate_of[:, None]).to(narrow), d_gate
    if layout == "up_gate":
        parts.reverse()
    return torch.cat([p.to(wide) for p in parts], -1), (a * gate_of[:, None]).to(narrow), d_gate
