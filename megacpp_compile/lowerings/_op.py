"""What every semantic op needs of its host: a body that autocast can't reach into."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> Any:
    """Operands as an op computes with them outside a compiled graph: half precision in float32."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def no_autocast(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off for `like`'s device: an op's dtypes are fixed by the graph, whatever the caller's region says."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def ends_until(ends: Tensor, values: Tensor) -> Tensor:
    """How many of `ends` [E], ascending, are at most each of `values` [n]: int64 [n]."""
    if ends.device.type == "xla":  # which has no `searchsorted` of its own, and would ask the host
        return (ends <= values[:, None]).sum(-1)
    return torch.searchsorted(ends, values, right=True)
