"""`attention` on a CPU over few keys: scores in memory, which autograd differentiates and Inductor fuses. A backward
that makes them anew takes longer. GEMMs are in the operands' dtype, as in plain code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.attention import cpu_chunks, reference
from megacpp_compile.lowerings.attention._dropout import dropped, factors
from megacpp_compile.lowerings.attention._layout import laid_out
from megacpp_compile.lowerings.attention._sinks import of_rows

# Where the op comes late, as under a policy, its backward is the other's.
from megacpp_compile.lowerings.attention.cpu_chunks import attention_backward

__all__ = ["AHEAD", "attention", "attention_backward", "loses", "supports"]

AHEAD = True


def supports(name: str, args: Sequence[Any]) -> str | None:
    return cpu_chunks.supports(name, args) if name == "attention_backward" else None


def loses(name: str, args: Sequence[Any]) -> str | None:
    given = args if name == "attention" else (*args[1:8], *args[11:16], *args[17:])
    if cpu_chunks.supports("attention", given) or cpu_chunks.loses("attention", given):
        return None
    return f"{hint(given[1].shape[2])} keys, which chunks take less time for"


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    documents: Tensor | None, scale: float, softcap: float, left: int | None, right: int | None, fill: float,
    words: Tensor | None = None, dropout: float = 0.0, prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(q)
    scores, *_ = reference.scores_of(q, k, mask, bias, documents, scale, softcap, left, right, fill, prefix)
    top = scores.detach().amax(-1)  # of which nothing depends
    if sinks is not None:
        top = top.maximum(of_rows(sinks.detach()).to(dtype))
    total = (scores.detach() - top.unsqueeze(-1)).exp().sum(-1)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = (scores - top.unsqueeze(-1)).exp()
        more = (of_rows(sinks) - top).exp()
        weights, total = weights / (weights.sum(-1) + more).unsqueeze(-1), total + more.detach()
    weights = dropped(weights, factors(words, dropout, weights)).to(v.dtype)
    out = laid_out((reference.grouped(weights, v.shape[1]) @ v.unsqueeze(2)).flatten(1, 2), q)
    lse = total.log()  # which no graph computes that does not read it
    return (out, lse + top, top.new_empty(0)) if mask is None and bias is None else (out, lse, top)
