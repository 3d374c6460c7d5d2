"""`megacpp::gated_rms_norm`: RMSNorm over groups of channels, and a SiLU or sigmoid gate before or behind it.

    y, z       [..., c]      weight [c] or None      group_size divides c
    returns    out [..., c] in `out_dtype`; rrms [..., c / group_size], the reciprocal root mean square of each group,
               float32 or better
    gate last  (`norm_before_gate`)  out = y * rrms(y) * weight * f(z)
    gate first                       out = h * rrms(h) * weight,  h = y * f(z)
    f          `activation`: "silu" or "sigmoid"

Computed in float32 (float64 for float64) and rounded once.
Saved for backward: y, z, weight, rrms. Gate and normed value are recomputed.
Source: Mamba-2, https://arxiv.org/abs/2405.21060, section 7.1 (gate first, grouped); RMSNorm, arXiv:1910.07467;
the sigmoid gate behind a norm of each head, Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.gated_rms_norm import reference

REFERENCE_SERVES = {"tpu": "pointwise code and sums over rows, which XLA fuses as they are"}
PREFERENCE = {"cpu": ("cpu_autograd", "reference")}


@define_op(reference.gated_rms_norm)
def gated_rms_norm(y, z, weight, eps, group_size, norm_before_gate, out_dtype, activation="silu"):  # type: ignore[no-untyped-def]
    reference.check(activation)
    rrms = y.new_empty((*y.shape[:-1], y.shape[-1] // group_size), dtype=compute_dtype(y, z))
    return y.new_empty(y.shape, dtype=out_dtype), rrms


@define_op(reference.gated_rms_norm_backward)
def gated_rms_norm_backward(grad, y, z, weight, rrms, group_size, norm_before_gate, activation="silu"):  # type: ignore[no-untyped-def]
    d_weight = rrms.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return y.new_empty(y.shape), z.new_empty(z.shape), d_weight


differentiate(gated_rms_norm, gated_rms_norm_backward, of="y z weight", results="out rrms")

declare({"megacpp::gated_rms_norm": OpTraits(), "megacpp::gated_rms_norm_backward": OpTraits()})
