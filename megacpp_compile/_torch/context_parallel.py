"""Torch's context parallelism, under which each rank holds a part of every sequence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch.distributed.tensor.experimental._attention import _cp_options as options
    from torch.distributed.tensor.experimental._context_parallel._attention import _dispatch_mode as dispatch_mode
else:
    __getattr__ = theme(__name__)

_HOME = "torch.distributed.tensor.experimental"
# Where `_context_parallel_shard` lives and notes that sequences were sharded by it.
_SHARDS = f"{_HOME}._context_parallel._attention"
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def in_force() -> str:
    """What of torch splits sequences over several ranks while this runs, in words; "" where nothing does."""
    if _HOME not in sys.modules or not several_ranks():
        return ""
    if _is_of_torchs(F.scaled_dot_product_attention):
        return "torch's context_parallel is in force" if _several(F.scaled_dot_product_attention) else ""
    dispatcher = getattr(sys.modules["torch.distributed.tensor"].DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    if _is_of_torchs(handlers.get(_ATTENTION)):
        return "torch's context parallel attention is enabled"
    from megacpp_compile._torch import context_parallel  # its names are looked up there

    if _SHARDS in sys.modules and getattr(context_parallel.dispatch_mode, "name", "") == "MODULE_WRAPPER":
        return "torch's context parallel shards the sequences of this process"
    return ""


def mesh_in_force() -> tuple[dist.DeviceMesh, bool] | None:
    """The mesh of torch's `context_parallel` context and whether its ranks have a piece of the head and one of the tail
    each, as it balances their work; None where it is not known."""
    if not in_force() or not _is_of_torchs(F.scaled_dot_product_attention):
        return None
    meshes = _meshes(F.scaled_dot_product_attention)
    from megacpp_compile._torch import context_parallel  # its names are looked up there

    balanced = getattr(context_parallel.options, "enable_load_balance", None)
    return (meshes[0], balanced) if len(meshes) == 1 and isinstance(balanced, bool) else None


def several_ranks() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_of_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_HOME)


def _several(patched: Any) -> bool:
    """Whether the mesh in the closure of `patched` has several ranks; of one rank the sequence is whole."""
    sizes = [mesh.size() for mesh in _meshes(patched)]
    return not sizes or max(sizes) > 1


def _meshes(patched: Any) -> list[dist.DeviceMesh]:
    held = [cell.cell_contents for cell in getattr(patched, "__closure__", None) or ()]
    return [mesh for mesh in held if isinstance(mesh, dist.DeviceMesh)]
