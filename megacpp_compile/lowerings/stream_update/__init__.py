"""`megacpp::stream_update`: n residual streams, mixed, with the output of a block added to each.

    streams    [..., n, d]      block [..., d]      post [..., n]      mix [..., n, n]
    returns    new [..., n, d] in `out_dtype`: new_i = sum_j mix_ij * streams_j + post_i * block

Computed in float32 (float64 for float64) and rounded once.
Saved for backward: the operands.
Source: Hyper-Connections, https://arxiv.org/abs/2409.19606, eq. 2; mHC, https://arxiv.org/abs/2512.24880, eq. 3.
"""

from __future__ import annotations

from megacpp_compile.lowerings._op import define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.stream_update import reference

REFERENCE_SERVES = {"tpu": "products with n x n matrices and pointwise code, which XLA fuses as they are"}


@define_op(reference.stream_update, check=reference.check)
def stream_update(streams, block, post, mix, out_dtype):  # type: ignore[no-untyped-def]
    return streams.new_empty(streams.shape, dtype=out_dtype)


@define_op(reference.stream_update_backward)
def stream_update_backward(grad, streams, block, post, mix):  # type: ignore[no-untyped-def]
    return tuple(t.new_empty(t.shape) for t in (streams, block, post, mix))


differentiate(stream_update, stream_update_backward, of="streams block post mix", results="new")

declare({"megacpp::stream_update": OpTraits(), "megacpp::stream_update_backward": OpTraits()})
