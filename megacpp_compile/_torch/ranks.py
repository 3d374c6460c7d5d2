"""Process groups: who is in one, and the store that all ranks of the default one share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.distributed.distributed_c10d import _resolve_process_group as group_named
else:
    __getattr__ = theme(__name__)


def shared_store() -> Any:
    """The store through which ranks of the default group tell each other what is no tensor; None where there is no such
    group, or it was made without one, or its other ranks are made up."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    from megacpp_compile._torch import ranks  # its names are looked up there

    return ranks.default_store()


def ranks_of(group: str) -> list[int]:
    """The ranks of the group that is called so; none where no group is."""
    from megacpp_compile._torch import ranks

    named: Any = ranks.group_named
    try:
        return list(dist.get_process_group_ranks(named(group)))
    except (LookupError, RuntimeError, ValueError):
        return []
