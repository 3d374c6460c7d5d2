"""`megacpp::attention`: softmax(cap(scale * q k^T) + bias, masked) v, without scores in memory.

    q          [b, h, t, d]    float32, float16, bfloat16 (float64), any strides
    k, v       [b, g, s, d], [b, g, s, e]    of q's dtype; h is a multiple of g, each of which serves h / g heads
    mask       None, or bool that broadcasts to [b, h, t, s] in four dimensions: which keys a query sees. Scores of the
               others are `fill`: -inf, or a number so low that nothing is left of them beside others. A row without
               a key is what softmax makes of it: NaN under -inf, the mean of v under a number
    bias       None, or floating point that broadcasts to [b, h, t, s] in four dimensions: added to the scores
    documents  None, or integers [b or 1, s], t == s: a query sees the keys with its own number alone, as of documents
               that are packed into one row
    sinks      None, or [h]: logits of one more key for each head, whose value is 0 (gpt-oss; arXiv:2309.17453); or
               what broadcasts to [b, h, t] in three dimensions, as logits that each token has of its own
    scale      of the products;  softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118), 0
               for none
    left, right    query i sees keys i - left to i + right; None: all on that side. Causal attention has right = 0, or
               s - t where the queries are the last ones; a window of w tokens left = w - 1. By them, every query sees
               a key
    words      None, or int64 [s + b * h * t], random numbers that are not negative: by them probabilities are dropped,
               the same ones in backward (`_dropout`)
    prefix     None, or integers [b or 1], of use beside `right`: each query sees the keys before it, too, as those of a
               prompt that is read in both directions (arXiv:1910.10683), but for what the rest hides
    dropout    with which probability; the others are divided by 1 - dropout. lse is that of all
    returns    out [b, h, t, e] in v's dtype, laid out as q; lse [b, h, t], natural logarithm of the sum of exponentials
               of the scores less `top`; top [b, h, t], each row's largest score with a mask or a bias, under which
               scores may be too low for a number to hold their logarithm, too; else without elements, and 0

Computed in float32 (float64 for float64); kernels round probabilities to v's dtype before they multiply values.
Saved for backward: q, k, v, mask, bias, sinks, documents, words, prefix, out, lse, top.
Source: FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import hint, rows
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.attention import reference
from megacpp_compile.lowerings.attention._layout import empty_like_tokens

PREFERENCE = {
    "cuda": ("cuda_sdpa", "cuda_triton", "reference"),
    "cpu": ("cpu_sdpa", "cpu_autograd", "cpu_chunks", "reference"),
}
# XLA has no attention of its own: torch's op is two GEMMs and a softmax there, and the calls of torch_xla 2.9
# (`flash_attention`, `splash_attention`) are kernels in Pallas. They take no masks, biases, sinks or dropout, and make
# no log-sum-exp for another's backward.
REFERENCE_SERVES = {"tpu": "products and a softmax; torch_xla's own calls are Pallas kernels, which want a TPU and JAX"}


@define_op(reference.attention)
def attention(  # type: ignore[no-untyped-def]
    q, k, v, mask, bias, sinks, documents, scale, softcap, left, right, fill, words=None, dropout=0.0,
    prefix=None,
):  # fmt: skip
    b, h, t, _ = q.shape
    out = empty_like_tokens(q, h, t, v.shape[-1]).to(v.dtype)
    lse = q.new_empty((b, h, t), dtype=compute_dtype(q))
    return out, lse, lse.new_empty((b, h, t) if mask is not None or bias is not None else (0,))


@define_op(reference.attention_backward)
def attention_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, mask, bias, sinks, documents, out, lse, top, scale, softcap, left, right, fill, bias_grad,
    words=None, dropout=0.0, prefix=None,
):  # fmt: skip
    """Gradients of q, k, v, bias (empty without `bias_grad`) and sinks (empty without)."""
    dbias = bias.new_empty(bias.shape) if bias_grad else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(empty_like_tokens(x, *x.shape[1:]) for x in (q, k, v)), dbias, dsinks


differentiate(attention, attention_backward, of="q k v bias sinks", results="out lse top")


def _flops(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any, documents: Any, scale: float,
           softcap: float, left: int | None, right: int | None, *_: Any) -> float:  # fmt: skip
    """Each query by the keys it sees, and their probabilities by the values."""
    t, s = hint(q.shape[2]), hint(k.shape[2])
    seen = s if right is None else s / 2
    if left is not None:
        seen = min(seen, hint(left) + 1 if right is not None else s)
    return 2 * rows(q) * seen * (hint(q.shape[-1]) + hint(v.shape[-1])) if t else 0.0


declare(
    {
        "megacpp::attention": OpTraits(core=True, block_kind="ablock", flops=_flops, tokens=2),
        "megacpp::attention_backward": OpTraits(),
    }
)
