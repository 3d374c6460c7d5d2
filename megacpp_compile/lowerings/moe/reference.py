"""`moe` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

Slots (token, choice) are sorted by expert, so that each expert's rows are contiguous: gather, grouped GEMMs, and a
weighted sum over every token's choices. No shape depends on the routing, and no sum on the order of atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp_compile.lowerings._activation import Activation, passed_on
from megacpp_compile.lowerings._op import compute_dtype, ends_until
from megacpp_compile.lowerings.moe._grouped import GroupedGemms, experts_of, weights_gradient

PRECISIONS = ("", "fp8_current")
_PRECISION_AT = {"moe": 10, "moe_backward": 11, "moe_sorted": 8, "moe_sorted_backward": 9}
# What a forward in fp8 takes of the time in 16 bits: GEMMs of 2.0 ms and casts of 0.6, where GEMMs took 3.25
# (docs/precision.md).
TIME_IN_FP8 = 0.8


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
    gemms: type[GroupedGemms] = GroupedGemms,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    payloads = into8, into_transposed, into_scale, down8, down_transposed, down_scale
    grouped = gemms.of_forward(precision, w_gate, payloads)
    order, offsets = by_expert(indices, experts_of(w_down))
    weights, biases, token = (w_gate, w_up, w_down), (b_gate, b_up, b_down), order // indices.shape[1]
    hidden, a = into_experts(x, Call(*weights, *biases, activation, layout, offsets, token, grouped))
    out = grouped.rows([a], w_down, offsets, False, *given(None, b_down))
    wide = torch.promote_types(compute_dtype(out.dtype), gates.dtype)
    y = _per_token(out, order, offsets, gates.to(wide)).sum(1).to(out_dtype)
    kept = (hidden if keep_hidden else []) + (grouped.scales() if precision else [])
    return y, kept, order, offsets


class Call(NamedTuple):
    """What forward and backward of one call share: the op's operands by their names, and `grouped`, its GEMMs. token:
    the rows of x and of grad; None where these are in the order of experts already."""

    w_gate: list[Tensor]
    w_up: list[Tensor]
    w_down: list[Tensor]
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    activation: str
    layout: str
    offsets: Tensor
    token: Tensor | None
    grouped: Any

    def fuses(self, which: str) -> bool:
        """Whether there is a kernel of a GEMM and all that follows it up to the next one."""
        fuses = getattr(self.grouped, which, None)
        return fuses is not None and fuses(Activation.parse(self.activation), self.layout)

    def before_activation(self, x: Tensor) -> list[Tensor]:
        pairs = (self.w_gate, self.b_gate), (self.w_up, self.b_up)
        return [self.grouped.rows([x], w, self.offsets, False, self.token, *given(b)) for w, b in pairs if w]


def into_experts(x: Tensor, call: Call) -> tuple[list[Tensor], Tensor]:
    """(results of the GEMMs before the activation, the activated hidden) of rows `call.token` of x, or of all."""
    if call.fuses("fuses_forward"):
        others = given(call.b_gate, call.b_up, True if call.layout == "interleaved" else None)
        weights = call.w_gate, call.w_up
        return call.grouped.gated(x, *weights, call.offsets, call.token, call.activation, *others)  # type: ignore[no-any-return]
    hidden = call.before_activation(x)
    return hidden, activated(hidden, call.activation, call.layout, x.dtype)


def given(*args: Any) -> tuple[Any, ...]:
    """`args` up to the last that is not None, so that a call without biases has no arguments for them."""
    kept = [i + 1 for i, a in enumerate(args) if a is not None]
    return args[: max(kept, default=0)]


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
    gemms: type[GroupedGemms] = GroupedGemms,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of x, gates, w_gate and w_up as one tensor [E, 2n, d], the gate's channels first, w_down, and biases.

    With `out = down(a) + b_down` and `dy` the gradient of y, the gate's gradient `dy . out` is `(dy @ w_down) . a` and
    `dy . b_down`: no expert's output is kept.
    """
    tokens, k = gates.shape
    token = order // k
    gate_of = gates.reshape(-1)[order].to(compute_dtype(x.dtype))
    hidden, grouped = gemms.of_backward(precision, hidden, (into_transposed, down_transposed))
    weights, biases = (w_gate, w_up, w_down), (b_gate, b_up, b_down)
    call = Call(*weights, *biases, activation, layout, offsets, token, grouped)
    d_rows, d_gate, d_into, d_down, d_biases = backward_of_rows(grad, x, gate_of, hidden, call)
    d_gates = d_gate.to(gates.dtype)[inverse_of(order)].view(gates.shape)
    d_x = _per_token(d_rows, order, offsets, gates.new_ones((), dtype=gate_of.dtype).expand(tokens, k)).sum(1)
    return d_x.to(x.dtype), d_gates, d_into, d_down, d_biases


def backward_of_rows(
    grad: Tensor, x: Tensor, gate_of: Tensor, hidden: list[Tensor], call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rows that experts read, of their gates `gate_of` [S], and of weights and biases as
    `moe_backward` has them."""
    grouped, offsets, token = call.grouped, call.offsets, call.token
    ups = [w for w in (call.w_gate, call.w_up) if w]
    hidden = hidden or call.before_activation(x)
    unrounded, grad = grad, grad.to(x.dtype)
    if call.fuses("fuses_backward"):
        d_hidden, a, d_gate = grouped.gradients(grad, call.w_down, hidden, gate_of, offsets, token, call.activation)
    else:
        d_hidden, a, d_gate = _gradients(_before_gates(grad, call), hidden, gate_of, x.dtype, call)

    added_grad = unrounded.to(x.dtype if call.b_down is None else call.b_down.dtype)
    d_biases, added = _bias_gradients(added_grad, d_hidden, gate_of, call)
    d_hidden = d_hidden.to(x.dtype)
    d_gate = d_gate if added is None else d_gate + added
    d_down = weights_gradient(grouped, [call.w_down], (grad, token), (a, None), offsets)
    d_into = weights_gradient(grouped, ups, (d_hidden, None), (x, token), offsets)
    parts = [d_hidden] if getattr(grouped, "side_by_side", False) else list(d_hidden.chunk(len(ups), 1))
    d_rows = grouped.rows(parts, [w for part in ups for w in part], offsets, True)
    return d_rows, d_gate, d_into, d_down, d_biases


def _bias_gradients(grad: Tensor, d_hidden: Tensor, gate_of: Tensor, call: Call) -> tuple[list[Tensor], Tensor | None]:
    """(gradients of the biases that are there; by row, what the last one adds to the gradients of the gate weights)"""
    found, added, offsets, token = list[Tensor](), None, call.offsets, call.token
    into, b_down = (call.b_gate, call.b_up), call.b_down
    if any(b is not None for b in into):
        widths = [b.shape[1] if b is not None else 0 for b in into]
        widths = [w or d_hidden.shape[1] - sum(widths) for w in widths]  # of a layout without a gate, what is left is 0
        sums = call.grouped.sums(d_hidden, offsets).split(widths, 1)
        found = [part.to(b.dtype, copy=True) for part, b in zip(sums, into, strict=True) if b is not None]
    if b_down is not None:
        rows = torch.arange(gate_of.shape[0], device=gate_of.device)
        expert = ends_until(offsets, rows).clamp(max=b_down.shape[0] - 1)
        added = ((grad if token is None else grad[token]).to(gate_of.dtype) * b_down[expert].to(gate_of.dtype)).sum(-1)
        added = torch.where(rows < offsets[-1], added, 0)
        found.append(call.grouped.sums(grad, offsets, token, gate_of).to(b_down.dtype))
    return found, added


def _before_gates(grad: Tensor, call: Call) -> Tensor:
    """The gradient of the activated hidden, by row, without the gate. In float16 it may leave the range where eager's,
    with the gate, does not: powers of two bring the rows to about 1 before they are multiplied, and give the result
    its size again in float32."""
    offsets, token = call.offsets, call.token
    if grad.dtype != torch.float16:
        return call.grouped.rows([grad], call.w_down, offsets, True, token)  # type: ignore[no-any-return]
    largest = grad.abs().amax(-1, keepdim=True).float()
    power = torch.where(largest > 0, largest, 1).log2().floor().exp2()
    d_act = call.grouped.rows([(grad / power).to(grad.dtype)], call.w_down, offsets, True, token)
    return d_act * (power if token is None else power[token])  # type: ignore[no-any-return]


def _gradients(
    d_act: Tensor, hidden: Sequence[Tensor], gate_of: Tensor, narrow: torch.dtype, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradients of the hidden, side by side, in `narrow` or the dtype of biases that are wider; the activated hidden
    times its gate weight, in `narrow`; gradients of the gate weights), by row. d_act: the gradient of the activated
    hidden, without the gate weight."""
    # Of wide biases the gradients are summed as exactly as biases were added.
    wide = next((b.dtype for b in (call.b_gate, call.b_up) if b is not None and b.dtype != narrow), narrow)
    dtype = gate_of.dtype
    here = (torch.arange(d_act.shape[0], device=d_act.device) < call.offsets[-1])[:, None]
    d_a = torch.where(here, d_act.to(dtype), 0)
    inner, *up = (torch.where(here, h.to(dtype), 0) for h in gate_and_up(hidden, call.layout))
    curve = Activation.parse(call.activation)
    f, slope = curve.of_gate(inner)
    factor, up_slope = curve.of_up(up[0]) if up else (None, None)
    a = f if factor is None else f * factor
    d_gate = (d_a * a).sum(-1)
    d_a = d_a * gate_of[:, None]
    parts = [d_a * slope] if factor is None else [d_a * slope * factor, d_a * f]
    parts[0] = passed_on(parts[0], slope, curve.selects)
    if up_slope is not None:
        parts[1] = passed_on(parts[1] * up_slope, up_slope, curve.selects)
    if call.layout == "interleaved":
        d_hidden = torch.stack([p.to(wide) for p in parts], -1).flatten(-2)
        return d_hidden, (a * gate_of[:, None]).to(narrow), d_gate
    if call.layout == "up_gate":
        parts.reverse()
    return torch.cat([p.to(wide) for p in parts], -1), (a * gate_of[:, None]).to(narrow), d_gate
