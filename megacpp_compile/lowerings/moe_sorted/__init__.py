"""`megacpp::moe_sorted`: experts over rows that lie in the order of experts already, without gates.

    x        [R, d], expert after expert      offsets [E] int32: where each expert's rows end, ascending
    w_gate, w_up, w_down, activation, layout, precision, b_gate ... down_scale: as `megacpp::moe` has them
    returns  y [R, d] in x's dtype, or in b_down's, `expert(x)` of each row's own expert, zero behind the last end;
             hidden: results of the GEMMs before the activation, with their biases [R, n], none without `keep_hidden`;
             behind them with `precision` the weights' scales, where the call does not have them

Rows behind the last end are padding: whatever they hold, also as a gradient, y and the gradient of x are zero there.
(`torch._grouped_mm` leaves such rows of its result unwritten.)
Saved for backward: x, weights, biases, offsets, `hidden` with `keep_hidden`, and the transposed payloads that it was
given.
Source: between the all-to-alls of expert parallelism, https://arxiv.org/abs/2006.16668.
"""

from __future__ import annotations

from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._kernels.grouped import dtype_of
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.moe import PARAMETERS, of_each, with_scales
from megacpp_compile.lowerings.moe._grouped import Float8Operands, empty_weight_gradients, experts_of
from megacpp_compile.lowerings.moe.reference import TIME_IN_FP8, check_precision, empty_hidden
from megacpp_compile.lowerings.moe_sorted import reference


@define_op(reference.moe_sorted, check=check_precision)
def moe_sorted(  # type: ignore[no-untyped-def]
    x, offsets, w_gate, w_up, w_down, activation, layout, keep_hidden=True, precision="",
    b_gate=None, b_up=None, b_down=None, *payloads,
):  # fmt: skip
    rows = x.shape[0]
    hidden = empty_hidden(x, rows, w_gate, w_up, b_gate, b_up) if keep_hidden else []
    if precision and Float8Operands.of(payloads) is None:
        widths = sum(w[0].shape[-2] for w in (w_gate, w_up) if w), w_down[0].shape[-2]
        hidden += [x.new_empty((experts_of(w_down), n), dtype=compute_dtype(x)) for n in widths]
    return x.new_empty((rows, w_down[0].shape[-2]), dtype=dtype_of(x, b_down)), hidden


@define_op(reference.moe_sorted_backward)
def moe_sorted_backward(  # type: ignore[no-untyped-def]
    grad, x, w_gate, w_up, w_down, hidden, offsets, activation, layout, precision="",
    b_gate=None, b_up=None, b_down=None, *transposed,
):  # fmt: skip
    d_into, d_down = empty_weight_gradients(x, w_gate, w_up, w_down)
    biases = [b.new_empty(b.shape) for b in (b_gate, b_up, b_down) if b is not None]
    return x.new_empty(x.shape), d_into, d_down, biases


differentiate(
    moe_sorted, moe_sorted_backward, of=f"x {PARAMETERS}", results="y hidden", keep=with_scales, split=of_each
)


def _flops(
    x: Tensor, offsets: Tensor, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor], activation: str,
    layout: str, keep_hidden: bool = True, precision: str = "", *_: Tensor | None,
) -> float:  # fmt: skip
    """As if there were no padding."""
    experts = len(w_down) if w_down[0].dim() == 2 else hint(w_down[0].shape[0])
    rows = elements(x) / hint(x.shape[1])
    share = TIME_IN_FP8 if precision else 1.0
    return share * 2 * rows * sum(map(elements, (*w_gate, *w_up, *w_down))) / experts


declare({"megacpp::moe_sorted": OpTraits(gemm=True, flops=_flops), "megacpp::moe_sorted_backward": OpTraits()})
