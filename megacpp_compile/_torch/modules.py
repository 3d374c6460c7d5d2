"""What a module calls in the place of its `forward`, once it is compiled in place, and where wrappers keep a module
or its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from megacpp_compile._torch._theme import theme
from megacpp_compile._torch.symbols import SYMBOLS

if TYPE_CHECKING:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        _CHECKPOINT_WRAPPED_MODULE as checkpoint_wrapped,
    )
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE as fsdp_wrapped
    from torch.fx._lazy_graph_module import _make_graph_module as lazy_graph_module
else:
    __getattr__ = theme(__name__)

# The attribute of `OptimizedModule` that holds what was compiled; torch has no constant for it.
COMPILED = "_orig_mod"


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What it was compiled to, None for a module that runs in eager."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module` call that; None for eager. Raises TorchInternalsError."""
    if call is not None and not hasattr(type(module), "_compiled_call_impl"):
        SYMBOLS["torch.nn.Module._compiled_call_impl"].get()()
    module._compiled_call_impl = call


def sharded_parameters(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    """(FSDP2's record, the parameter as the optimizer has it) of every parameter in `model` that `fully_shard` has
    cut. The record stays where that parameter is replaced."""
    for module in model.modules():
        if (state_of := getattr(module, "_get_fsdp_state", None)) is None:
            continue
        state = state_of()
        groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on
        groups = [state._fsdp_param_group] if groups is None else groups
        for group in groups:
            for record in group.fsdp_params if group is not None else ():
                yield record, record.sharded_param


def gathered_parameter(record: Any) -> nn.Parameter | None:
    """What a forward reads in the place of the parameter of such a record, the same tensor every time; None before the
    first."""
    return getattr(record, "unsharded_param", None)


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """What it calls while it is not compiled: `forward` between its hooks."""
    return module._call_impl
