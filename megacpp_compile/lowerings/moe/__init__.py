"""`megacpp::moe`: routed experts, each token's choices weighted and summed.

    x        [T, d]      indices [T, k] integer, each choice's expert     gates [T, k], each choice's weight
    w_gate, w_up, w_down   of every expert [n, d], [n, d], [d, n]: one tensor with the experts in front, or a list of
             one per expert, which are read where they lie and never copied into one
    layout   "pair": down(f(gate(x)) * up(x));  "single": down(f(up(x))), w_gate empty;  "gate_up" and "up_gate": w_gate
             empty, w_up [2n, d] holds both in that order;  "interleaved": the same, row after row in turn, the gate's
             first
    activation  f: silu, gelu, gelu_tanh, relu, relu2 (its square), or with bounds and numbers, see `activation`
    b_gate, b_up, b_down  biases of all experts [E, n] in the order of the weights' rows, or None
    returns  y [T, d] in out_dtype, `sum_j gates[t, j] * expert[indices[t, j]](x[t])`;  hidden: results of the GEMMs
             before the activation, with their biases [T*k, n], rows in the order of experts, none without
             `keep_hidden`;  order [T*k]: the slots `t * k + j` sorted by expert;  offsets [E] int32: where each
             expert's slots end

precision  "", or "fp8_current": operands of the GEMMs by the weights are rounded to e4m3, with a scale for every row
             (see `_grouped`). The weights' scales then follow `hidden`: [E, channels] of those before the
             activation, the gate's first, and [E, d] of those behind it: float32, or float64 for float64
into8 ... down_scale  with a precision, casts of the weights that the call is to multiply (`_grouped.Float8Operands`);
             then `hidden` has no scales

x and weights share a dtype, in which GEMMs are rounded, the bias added; activation and weighted sum run in float32
(float64 for float64). Of 16 bits, biases may be in float32, as autocast leaves them: then what they are added to stays
in float32, hidden too, and so do their gradients. An index outside 0..E-1 is no expert's: its slot adds nothing, no
bias either, and gets no gradient. The same expert chosen twice by a token counts twice.
Saved for backward: x, gates, weights, biases, order, offsets, and `hidden` with `keep_hidden`; no expert's output, and
no payload but the transposed ones that it was given.
Source: https://arxiv.org/abs/1701.06538; with many small experts, https://arxiv.org/abs/2401.06066.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._op import define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.moe import reference
from megacpp_compile.lowerings.moe._grouped import empty_gradients, empty_kept, experts_of


@define_op(reference.moe, check=reference.check_precision)
def moe(  # type: ignore[no-untyped-def]
    x, indices, gates, w_gate, w_up, w_down, activation, layout, out_dtype, keep_hidden=True, precision="", *others
):
    slots = indices.shape[0] * indices.shape[1]
    hidden = empty_kept(x, slots, w_gate, w_up, w_down, keep_hidden, precision, *others)
    order = indices.new_empty(slots, dtype=torch.int64)
    offsets = indices.new_empty(experts_of(w_down), dtype=torch.int32)
    return x.new_empty((x.shape[0], w_down[0].shape[-2]), dtype=out_dtype), hidden, order, offsets


@define_op(reference.moe_backward)
def moe_backward(  # type: ignore[no-untyped-def]
    grad, x, gates, w_gate, w_up, w_down, hidden, order, offsets, activation, layout, precision="",
    b_gate=None, b_up=None, b_down=None, *transposed,
):  # fmt: skip
    others = empty_gradients(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return x.new_empty(x.shape), gates.new_empty(gates.shape), *others


def with_scales(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a call of an op of experts, by name, with the scales of casts that it was given behind `hidden`."""
    scales = [values[name] for name in ("into_scale", "down_scale") if values[name] is not None]
    return {**values, "hidden": [*values["hidden"], *scales]}


def of_each(values: dict[str, Any], *found: Any) -> Sequence[Any]:
    """What backward makes of `values`, with a gradient for each operand: of x and gates, w_gate, w_up, w_down, and
    b_gate, b_up, b_down. Those of separate weights are parts of one tensor, each of which lies together."""
    *of_rows, d_into, d_down, d_biases = found
    own = [values[name] for name in ("w_gate", "w_up", "w_down")]
    stacks = *(d_into.chunk(2, 1) if own[0] else (None, d_into)), d_down
    weights = [[stack] if ws and ws[0].dim() == 3 else list(stack.unbind(0)) if ws else []
               for ws, stack in zip(own, stacks, strict=True)]  # fmt: skip
    biases = iter(d_biases)
    return *of_rows, *weights, *(None if values[b] is None else next(biases) for b in ("b_gate", "b_up", "b_down"))


PARAMETERS = "w_gate w_up w_down b_gate b_up b_down"
differentiate(
    moe, moe_backward, of=f"x gates {PARAMETERS}", results="y hidden order offsets", keep=with_scales, split=of_each
)


def _flops(
    x: Tensor, indices: Tensor, gates: Tensor, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor],
    activation: str, layout: str, out_dtype: torch.dtype, keep_hidden: bool = True, precision: str = "",
    *_: Tensor | None,
) -> float:  # fmt: skip
    return flops_of_rows(elements(indices), w_gate, w_up, w_down, precision)


def flops_of_rows(
    rows: float, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor], precision: str
) -> float:
    """As if every expert were chosen equally often; that does not change the sum, as all are of one size."""
    share = reference.TIME_IN_FP8 if precision else 1.0
    return share * 2 * rows * sum(map(elements, (*w_gate, *w_up, *w_down))) / hint(experts_of(w_down))


declare({"megacpp::moe": OpTraits(gemm=True, flops=_flops, routed=1), "megacpp::moe_backward": OpTraits()})
