"""Transformer Engine's `DotProductAttention` as a backend of `attention` on CUDA, by name: `backend="te"`.

It chooses among kernels of its own, cuDNN's and FlashAttention's among them, and falls to an unfused one without a word
where none of them serves; `observed_attention` and `megacpp doctor` see which. In a graph it would break it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.nn.attention.bodies import Lack

_DTYPES = (torch.bfloat16, torch.float16)


def lacks(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None = None
) -> Lack:
    """Why it cannot serve a call, as (tag, reason), or None."""
    if q.device.type != "cuda":
        return "device", f"Transformer Engine runs on CUDA devices, not on {q.device.type}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "no-te", "the package transformer_engine is not installed"
    if torch.compiler.is_compiling():
        return "graph-break", "its module breaks a graph"
    if q.dtype not in _DTYPES:
        return "dtype", f"it computes in bfloat16 and float16, not in {str(q.dtype).removeprefix('torch.')}"
    if doc_ids is not None:
        return "doc-ids", "documents are packed rows to it, which these are not"
    if window is not None and not causal:
        return "window", "a window is of causal attention"
    if causal and q.shape[2] != k.shape[2]:
        return "shape", f"{q.shape[2]} queries and {k.shape[2]} keys under a causal mask"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None, scale: float, causal: bool, window: int | None = None
) -> Tensor:
    """Attention by the module; arguments as in `bodies`."""
    heads, groups = q.shape[1], k.shape[1]
    module = _module(heads, groups, q.shape[-1], v.shape[-1], float(scale), causal, softcap or 0.0, window)
    out = module(*(t.transpose(1, 2) for t in (q, k, v)))
    out = out[0] if isinstance(out, tuple) else out
    return out.view(q.shape[0], q.shape[2], heads, v.shape[-1]).transpose(1, 2)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _module(
    heads: int, groups: int, keys: int, values: int, scale: float, causal: bool, softcap: float, window: int | None
) -> Any:
    engine = importlib.import_module("transformer_engine.pytorch")
    more: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    more |= {"softcap": softcap} if softcap else {}
    return engine.DotProductAttention(
        heads, (keys, values), num_gqa_groups=groups, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal" if causal else "no_mask", softmax_scale=scale, **more,
    )  # fmt: skip
