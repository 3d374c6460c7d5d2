"""`attention` on a CPU in chunks of queries (`_chunks`): half of the work where it is causal, less where a window hides
keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings.attention._chunks import attention_in_chunks, attention_in_chunks_backward

__all__ = ["attention", "attention_backward", "loses", "supports"]

# Keys from which chunks take no longer than scores in memory: where a query sees a fourth of them, half (causally, in
# documents), and all. Then of 16-bit operands, whose GEMMs a CPU may have instructions for.
LEAST = (512, 1024, 2048), (1024, 4096, 8192)


def supports(name: str, args: Sequence[Any]) -> str | None:
    backward = name == "attention_backward"
    words = (*args[17 if backward else 12 :], None)[0]
    if words is not None:
        return "dropout"
    q, k = args[1:3] if backward else args[:2]
    empty = any(isinstance(n, int) and n == 0 for n in (*q.shape, k.shape[2]))
    return "there is nothing to attend to" if empty else None


def loses(name: str, args: Sequence[Any]) -> str | None:
    if name == "attention_backward":  # whoever served forward has kept no scores
        return None
    q, k, *_ = args
    keys, narrow, half, every = hint(k.shape[2]), *LEAST[q.element_size() == 2]
    documents, left, right = args[6], args[9], args[10]
    least = every if documents is None and left is None and right is None else half
    if left is not None and 4 * (hint(left) + 1) <= keys:
        least = narrow
    return f"{keys} keys, fewer than {least}" if keys < least else None


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    documents: Tensor | None, scale: float, softcap: float, left: int | None, right: int | None, fill: float,
    words: Tensor | None = None, dropout: float = 0.0, prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    form = scale, softcap, left, right, fill, prefix
    found: tuple[Tensor, Tensor, Tensor] = attention_in_chunks(q, k, v, mask, bias, sinks, documents, *form)
    return found


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    documents: Tensor | None, out: Tensor, lse: Tensor, top: Tensor, scale: float, softcap: float, left: int | None,
    right: int | None, fill: float, bias_grad: bool, words: Tensor | None = None, dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = attention_in_chunks_backward(
        grad, q, k, v, mask, bias, sinks, documents, out, lse, top, scale, softcap, left, right, fill, bias_grad, prefix
    )
    return found
