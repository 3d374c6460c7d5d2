"""What semantic ops share: the dtype they compute in, and a body that autocast can't reach into."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.targets import CPU, by_xla, family


def compute_dtype(*of: Tensor | torch.dtype | None) -> torch.dtype:
    """What an op with such operands computes in: float32 for half precision, float64 where one is."""
    dtypes = (t.dtype if isinstance(t, Tensor) else t for t in of if t is not None)
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def wide(*tensors: Tensor) -> Any:
    """Operands as an op computes with them outside a compiled graph."""
    return [t.to(compute_dtype(t)) for t in tensors]


def no_autocast(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off for `like`'s device: an op's dtypes are fixed by the graph, whatever the caller's region says."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def serve(name: str, reference: ModuleType, *args: Any) -> Any:
    """What an op that models call themselves does outside of a lowered graph: what serves it in one. Ops that only
    passes write need no such thing: they are lowered before they run."""
    target = family({next(a for a in args if isinstance(a, Tensor)).device.type})
    if target is CPU:
        return getattr(reference, name)(*args)
    from megacpp_compile.lowerings._registry import choose

    return choose(getattr(torch.ops.megacpp, name).default, target.name, args).body(*args)


def ends_until(ends: Tensor, values: Tensor) -> Tensor:
    """How many of `ends` [E], ascending, are at most each of `values` [n]: int64 [n]."""
    if by_xla(ends.device):  # torch_xla has no `searchsorted` of its own, and would ask the host
        return (ends <= values[:, None]).sum(-1)
    return torch.searchsorted(ends, values, right=True)
