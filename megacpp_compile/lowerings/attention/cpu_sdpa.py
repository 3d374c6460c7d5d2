"""`attention` on CPU by the flash kernel behind torch's `scaled_dot_product_attention`: attention to all keys, or
causal from the first one on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings.attention._layout import laid_out
from megacpp_compile.lowerings.attention._sdpa_calls import chosen, objection

__all__ = ["attention", "attention_backward", "loses", "supports"]

# A query that is no number has a zero for a result where its keys do not fill the widest vector of a CPU, 16 numbers of
# float32 (torch 2.13).
FEWEST_KEYS = 16
# Of 16-bit operands its backward takes up to three times as long as plain code's below so many.
FEWEST_OF_HALF = 2048


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if reason := objection(name, args):
        return reason
    (q, k, v), right = (args[1:4], args[14]) if name == "attention_backward" else (args[:3], args[10])
    if isinstance(k.shape[2], int) and k.shape[2] < FEWEST_KEYS:
        return f"{k.shape[2]} keys: torch's kernel loses queries that are no numbers among fewer than {FEWEST_KEYS}"
    kernel = chosen(q, k, v, right is not None)
    return None if kernel == "flash" else f"torch would take its kernel {kernel!r}"


def loses(name: str, args: Sequence[Any]) -> str | None:
    k = args[2 if name == "attention_backward" else 1]
    keys = hint(k.shape[2])
    few = k.element_size() == 2 and keys < FEWEST_OF_HALF
    return f"{keys} keys of 16 bits: slow below {FEWEST_OF_HALF}" if few else None


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
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, right is not None, scale=scale)
    return laid_out(out, q), lse.contiguous(), lse.new_empty(0)


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
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, right is not None, scale=scale
    )
    return laid_out(dq, q), laid_out(dk, k), laid_out(dv, v), q.new_empty(0), q.new_empty(0)
