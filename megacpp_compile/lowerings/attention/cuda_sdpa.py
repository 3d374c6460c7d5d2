"""`attention` on CUDA by the kernels that torch's `scaled_dot_product_attention` chooses: cuDNN's or FlashAttention-2.

They serve attention to all keys, or causal from the first one on, in half precision; which of the two is torch's own
choice, asked on fake operands of the same layout. Of rows that do not begin at multiples of 16 bytes cuDNN computes
something else, or fails (torch 2.11, H100): such operands are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.lowerings.attention._layout import in_whole_rows
from megacpp_compile.lowerings.attention._sdpa_calls import chosen, objection

__all__ = ["attention", "attention_backward", "loses", "supports"]

# Keys from which these kernels are quicker than those in Triton (H100; 64 keys: 1.2 times the time).
MIN_KEYS = 128


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why none of the kernels can serve this call, or None."""
    if reason := objection(name, args):
        return reason
    (q, k, v), right = (args[1:4], args[14]) if name == "attention_backward" else (args[:3], args[10])
    for channels in (q.shape[3], v.shape[3]):
        if not statically_known_true(channels % 8 == 0):
            return f"{channels} channels a head: they come in eights"
    if q.device.type != "cuda":
        return "operands on another device"
    q, k, v = map(in_whole_rows, (q, k, v))
    kernel = chosen(q, k, v, right is not None)
    return None if kernel in ("cudnn", "flash") else f"torch would take its kernel {kernel!r}"


def loses(name: str, args: Sequence[Any]) -> str | None:
    """Why another lowering is quicker, or None."""
    keys = args[2 if name == "attention_backward" else 1].shape[2]
    return f"{keys} keys: of use from {MIN_KEYS}" if isinstance(keys, int) and keys < MIN_KEYS else None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    fill: float,
    words: Tensor | None = None,
    dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    causal = right is not None
    q, k, v = map(in_whole_rows, (q, k, v))
    if chosen(q, k, v, causal) == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        lse = lse.view(q.shape[:3])
    else:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return out, lse, lse.new_empty(0)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    fill: float,
    bias_grad: bool,
    words: Tensor | None = None,
    dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    causal, no_seed = right is not None, q.new_empty((), dtype=torch.int64)
    tokens, keys = q.shape[2], k.shape[2]
    grad, q, k, v, out = map(in_whole_rows, (grad, q, k, v, out))
    if chosen(q, k, v, causal) == "cudnn":
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), no_seed, no_seed, None, None, None, tokens, keys, 0.0, causal,
            scale=scale,
        )  # fmt: skip
    else:
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, tokens, keys, 0.0, causal, no_seed, no_seed, scale=scale
        )
    return (*grads, q.new_empty(0), q.new_empty(0))
