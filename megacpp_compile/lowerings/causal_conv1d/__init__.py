"""`megacpp::causal_conv1d`: depthwise causal convolution over time, and the activation behind it.

    x          [b, t, c], channels last, in any strides
    weight     [c, k]     bias [c] or None     activation "" or "silu"
    returns    y [b, t, c] in `out_dtype`: y[b, t] = act(bias + sum over j of weight[:, j] * x[b, t - (k - 1) + j]),
               where x is 0 before time 0
    seq_idx    [b, t] integers or None: the document of each step, as in Mamba's kernels; a step sees those of its own
               document alone, taps elsewhere count as 0

y lies in memory as x does: channels adjacent, or time where that is what is adjacent in x. Computed in float32 (float64
if an operand is) and rounded once.
Saved for backward: x, weight, bias and seq_idx. The value before the activation is recomputed.
Source: Mamba, https://arxiv.org/abs/2312.00752, section 3.4; Mamba-2, https://arxiv.org/abs/2405.21060, section 7.
"""

from __future__ import annotations

from megacpp_compile.lowerings._op import define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.causal_conv1d import reference
from megacpp_compile.lowerings.causal_conv1d.layout import laid_out_as

# On XLA's CPU device it takes 6 ms forward and backward where a grouped convolution takes 2600 ([2, 512, 512], 4 taps,
# torch_xla 2.9).
REFERENCE_SERVES = {"tpu": "shifted products, which are one fusion to XLA, too"}

PREFERENCE = {"cpu": ("cpu_padded", "reference")}


@define_op(reference.causal_conv1d)
def causal_conv1d(x, weight, bias, activation, out_dtype, seq_idx=None):  # type: ignore[no-untyped-def]
    return laid_out_as(x, out_dtype)


@define_op(reference.causal_conv1d_backward)
def causal_conv1d_backward(grad, x, weight, bias, activation, seq_idx=None):  # type: ignore[no-untyped-def]
    d_bias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return laid_out_as(x, x.dtype), weight.new_empty(weight.shape), d_bias


differentiate(causal_conv1d, causal_conv1d_backward, of="x weight bias", results="y")

declare(
    {
        "megacpp::causal_conv1d": OpTraits(block_kind="mblock", tokens=1),
        "megacpp::causal_conv1d_backward": OpTraits(),
    }
)
