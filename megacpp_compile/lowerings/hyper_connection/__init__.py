"""`megacpp::hyper_connection`: the input of a block from n residual streams, and how its output returns into them.

    streams       [..., n, d]
    weight        [m, n * d]; scale, base [m]       m = n, and n more with `post`, and n * n more with `init`
    logits        rrms * (streams joined @ weight^T), with rrms = rsqrt(mean(streams joined ^ 2) + norm_eps)
    affine        logits * scale + base, of which the first n, the next n, and the last n * n make
    pre           [..., n] = sigmoid(affine) * pre[0] + pre[1]
    returns       block [..., d] = sum_i pre_i * streams_i, in `out_dtype`;
                  post [..., n] = sigmoid(affine) * post[0] + post[1], or [..., 0];
                  mix [..., n, n], or [..., 0, 0]; logits [..., m]; rrms [...], all float32 or better
    mix           `init` of affine ("softmax" over columns of a row, "softmax_columns" over rows, "exp", "sigmoid",
                  "tanh", "linear") + eps[0], then for each of `axes`: mix / (mix.sum(axis) + eps[1]), Sinkhorn's steps;
                  "log" takes affine for the logarithm of the matrix and subtracts its logsumexp instead

Computed in float32 (float64 for float64); block is rounded once.
Saved for backward: operands, logits, rrms. Everything else is recomputed, Sinkhorn's steps among it.
Source: Hyper-Connections, https://arxiv.org/abs/2409.19606; mHC, https://arxiv.org/abs/2512.24880, section 4.
"""

from __future__ import annotations

from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.hyper_connection import reference

REFERENCE_SERVES = {"tpu": "pointwise code, a narrow GEMM and sums over rows, which XLA fuses as they are"}


@define_op(reference.hyper_connection, check=reference.check)
def hyper_connection(streams, weight, scale, base, norm_eps, pre, post, init, eps, axes, out_dtype):  # type: ignore[no-untyped-def]
    *outer, n, d = streams.shape
    new = streams.new_empty((), dtype=compute_dtype(streams, weight, scale, base)).new_empty
    square = (n, n) if init else (0, 0)
    return (
        streams.new_empty((*outer, d), dtype=out_dtype),
        new((*outer, n if post else 0)),
        new((*outer, *square)),
        new((*outer, weight.shape[0])),
        new(outer),
    )


@define_op(reference.hyper_connection_backward)
def hyper_connection_backward(  # type: ignore[no-untyped-def]
    grad, grad_post, grad_mix, streams, weight, scale, base, logits, rrms, pre, post, init, eps, axes
):
    return tuple(t.new_empty(t.shape) for t in (streams, weight, scale, base))


differentiate(
    hyper_connection, hyper_connection_backward, of="streams weight scale base",
    results="block of_post of_mix logits rrms",
)  # fmt: skip

declare({"megacpp::hyper_connection": OpTraits(), "megacpp::hyper_connection_backward": OpTraits()})
