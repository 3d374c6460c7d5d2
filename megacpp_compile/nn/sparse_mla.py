"""`megacpp_compile.sparse_mla`, the top-k sparse MLA that a model calls: the op, for tensors and for fp8 wrappers."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# Registers the op, here and not where it is called: Dynamo traces that.
import megacpp_compile.lowerings.sparse_mla  # noqa: F401
from megacpp_compile.nn.fp8_wrappers import is_wrapper, split


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    offset: int = 0,
    kv_scale: Tensor | None = None,
    fp8_gemms: bool = False,
    fp8_products: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its own top-k rows of the latent: (out [b, t, h, d_v] in q's dtype, lse [b, t, h]).

    Args:
        q: [b, t, h, d_qk], float32, float16 or bfloat16.
        kv: [b, s, 1, d_qk], rows all heads share, whose first d_v channels are the values: of q's dtype, an e4m3
            payload with `kv_scale`, or a wrapper that holds one.
        indices: [b, t, 1, k] int, the rows of each query; -1 is none.
        scale: of the scores; d_qk ** -0.5 by default.
        causal: a query sees rows up to `offset` + its own number.
        kv_scale: float32 that broadcasts to [b, s, 1, n], for whole rows or every 128 channels.
        fp8_gemms: with fp8 rows that have one scale each, lets a kernel round queries and probabilities to e4m3 where
            that is faster; otherwise rows are widened to q's dtype, and queries and probabilities stay as they are.
        fp8_products: the old name of `fp8_gemms`.

    Differentiable in q and kv, unless kv is fp8. Raises OperandError, WrapperError, and ForwardOnlyError in backward.
    The op, `torch.ops.megacpp.sparse_mla`, is described in `lowerings/sparse_mla`.
    """
    if fp8_products is not None:
        warnings.warn("sparse_mla's fp8_products= is now called fp8_gemms=", FutureWarning, stacklevel=2)
        fp8_gemms = fp8_products
    if is_wrapper(kv):
        held = split(kv, "kv")
        kv, kv_scale = held.payload, held.scale.to(torch.float32)
    return torch.ops.megacpp.sparse_mla(
        q, kv, indices, kv_scale, q.shape[-1] ** -0.5 if scale is None else scale, d_v, causal, offset, fp8_gemms
    )
