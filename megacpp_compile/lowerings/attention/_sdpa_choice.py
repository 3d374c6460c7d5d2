"""Which kernel torch's `scaled_dot_product_attention` would take in a compiled graph: it is asked, on fake operands."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megacpp_compile._torch.attention import current_backends
from megacpp_compile._torch.dispatch import TorchDispatchMode
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.modes import in_own_thread

# How an operator's name begins -> the family of kernels, as in `report.kernels`.
_KERNELS = {
    "aten._scaled_dot_product_flash": "flash",
    "aten._scaled_dot_product_efficient": "efficient",
    "aten._scaled_dot_product_cudnn": "cudnn",
    "aten._scaled_dot_product_fused": "other",
}
UNFUSED, UNKNOWN = "unfused", "?"

# (shape, strides, dtype, whether it asks for a gradient) of a tensor.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


def kernel_of(device: str, operands: tuple[Layout | None, ...], dropout: float, causal: bool, grouped: bool) -> str:
    """"flash", "efficient", "cudnn", "unfused" where it multiplies all scores out, "?" where nobody here can tell.

    operands: of queries, keys, values and the mask or None.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        return UNKNOWN
    allowed = tuple(b.name for b in current_backends(with_priority=True))
    return _asked(device, operands, dropout, causal, grouped, allowed)


@functools.lru_cache(maxsize=256)
def _asked(
    device: str, operands: tuple[Layout | None, ...], dropout: float, causal: bool, grouped: bool,
    allowed: tuple[str, ...],
) -> str:  # fmt: skip
    """`kernel_of` under what `torch.nn.attention.sdpa_kernel` and its like allow now."""

    def ask() -> str:
        watch = _Watch()
        try:
            with FakeTensorMode():
                q, k, v, mask = (None if one is None else _tensor(device, *one) for one in operands)
                assert q is not None and k is not None and v is not None
                with watch:
                    scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)
        except Exception:  # what torch refuses is its own error, when the graph is compiled
            return UNKNOWN
        return watch.found

    # What is saved for backward goes by the count of autograd's nodes, and must not depend on who was asked before.
    return in_own_thread(ask)


def _tensor(device: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, grad: bool) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).requires_grad_(grad)


class _Watch(TorchDispatchMode):
    """Notes the kernel among the operators that run; without one, the scores are multiplied out."""

    def __init__(self) -> None:
        super().__init__()
        self.found = UNFUSED

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, kernel in _KERNELS.items():
            if str(func).startswith(name):
                self.found = kernel
        return func(*args, **(kwargs or {}))
