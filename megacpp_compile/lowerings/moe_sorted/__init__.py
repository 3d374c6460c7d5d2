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

from megacpp_compile.fx.sizes import rows
from megacpp_compile.lowerings._kernels.grouped import dtype_of
from megacpp_compile.lowerings._op import define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.moe import PARAMETERS, flops_of_rows, of_each, with_scales
from megacpp_compile.lowerings.moe._grouped import empty_gradients, empty_kept
from megacpp_compile.lowerings.moe.reference import check_precision
from megacpp_compile.lowerings.moe_sorted import reference


@define_op(reference.moe_sorted, check=check_precision)
def moe_sorted(  # type: ignore[no-untyped-def]
    x, offsets, w_gate, w_up, w_down, activation, layout, keep_hidden=True, precision="",
    b_gate=None, b_up=None, b_down=None, *payloads,
):  # fmt: skip
    biases = b_gate, b_up, b_down
    hidden = empty_kept(x, x.shape[0], w_gate, w_up, w_down, keep_hidden, precision, *biases, *payloads)
    return x.new_empty((x.shape[0], w_down[0].shape[-2]), dtype=dtype_of(x, b_down)), hidden


@define_op(reference.moe_sorted_backward)
def moe_sorted_backward(  # type: ignore[no-untyped-def]
    grad, x, w_gate, w_up, w_down, hidden, offsets, activation, layout, precision="",
    b_gate=None, b_up=None, b_down=None, *transposed,
):  # fmt: skip
    return x.new_empty(x.shape), *empty_gradients(x, w_gate, w_up, w_down, b_gate, b_up, b_down)


differentiate(
    moe_sorted, moe_sorted_backward, of=f"x {PARAMETERS}", results="y hidden", keep=with_scales, split=of_each
)


def _flops(
    x: Tensor, offsets: Tensor, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor], activation: str,
    layout: str, keep_hidden: bool = True, precision: str = "", *_: Tensor | None,
) -> float:  # fmt: skip
    """As if there were no padding."""
    return flops_of_rows(rows(x), w_gate, w_up, w_down, precision)


declare({"megacpp::moe_sorted": OpTraits(gemm=True, flops=_flops), "megacpp::moe_sorted_backward": OpTraits()})
