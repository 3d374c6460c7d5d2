"""`megacpp::index_scores`: how much each query wants each row, by which an indexer chooses the rows to attend to.

    q          [batch, queries, heads, channels]
    k          [batch, keys, channels], which all heads share
    weights    [batch, queries, heads]
    returns    [batch, queries, keys] in `out_dtype`: the sum over heads h of  weights_h * relu(scale * q_h k)

Computed in float32 (float64 for float64) and rounded once. Products of all heads are in memory on CPU and XLA alone.
Saved for backward: q, k and weights. A product that is not positive has no gradient.
Source: the lightning indexer of DeepSeek-V3.2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp), arXiv:2512.02556.
"""

from __future__ import annotations

from torch import Tensor

from megacpp_compile.lowerings._op import define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.index_scores import reference

REFERENCE_SERVES = {"tpu": "a GEMM and pointwise code in front of a sum, which XLA fuses as they are"}


@define_op(reference.index_scores)
def index_scores(q, k, weights, scale, out_dtype):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:2], k.shape[1]), dtype=out_dtype)


@define_op(reference.index_scores_backward)
def index_scores_backward(grad, q, k, weights, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), weights.new_empty(weights.shape)


differentiate(index_scores, index_scores_backward, of="q k weights", results="scores")


def _gemms(q: Tensor, k: Tensor, times: int) -> float:
    batch, queries, heads, channels = q.shape
    return float(2 * times * batch * queries * heads * channels * k.shape[1])


declare({
    "megacpp::index_scores": OpTraits(
        flops=lambda q, k, *_: _gemms(q, k, 1), block_kind="ablock", tokens=1
    ),
    "megacpp::index_scores_backward": OpTraits(flops=lambda _, q, k, *others: _gemms(q, k, 4), block_kind="ablock"),
})  # fmt: skip
