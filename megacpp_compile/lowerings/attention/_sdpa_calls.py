"""Which calls of `attention` the kernels behind torch's `scaled_dot_product_attention` serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile.fx.edit import same_size
from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings.attention._sdpa_choice import Layout, kernel_of


def objection(name: str, args: Sequence[Any]) -> str | None:
    """Why they cannot serve a call of `attention` or its backward, whatever the kernel, or None."""
    backward = name == "attention_backward"
    q, k, _, mask, bias, sinks, documents = args[1:8] if backward else args[:7]
    softcap, left, right = args[12:15] if backward else args[8:11]
    words, _, prefix = (*args[17 if backward else 12 :], None, None, None)[:3]
    if any(isinstance(n, int) and n == 0 for n in (*q.shape, k.shape[2])):
        return "there is nothing to attend to"
    for what, given in (("a mask as data", mask is not None), ("a bias", bias is not None), ("a softcap", softcap != 0),
                        ("sinks", sinks is not None), ("documents", documents is not None),
                        ("a window", left is not None), ("dropout", words is not None),
                        ("a prefix", prefix is not None)):  # fmt: skip
        if given:
            return f"{what}: torch's kernels take none"
    if right is not None and not (same_size(right, 0) and same_size(q.shape[2], k.shape[2])):
        return "queries that are not those of the same tokens as the keys"
    return None


def chosen(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> str:
    """The kernel that torch would take for such a call, as `kernel_of` calls it."""
    operands = (*map(_layout, (q, k, v)), None if mask is None else _layout(mask))
    return kernel_of(q.device.type, operands, 0.0, causal, not same_size(q.shape[1], k.shape[1]))


def _layout(t: Tensor) -> Layout:
    return tuple(map(hint, t.shape)), tuple(map(hint, t.stride())), t.dtype, True
