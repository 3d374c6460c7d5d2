"""What every semantic op needs of its host: a body that autocast can't reach into."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def no_autocast(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off for `like`'s device: an op's dtypes are fixed by the graph, whatever the caller's region says."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
