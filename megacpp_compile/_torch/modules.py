"""What a module calls in the place of its `forward`, once it is compiled in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megacpp_compile._torch.symbols import SYMBOLS


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What it was compiled to, None for a module that runs in eager."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module` call that; None for eager. Raises TorchInternalsError."""
    if call is not None and not hasattr(type(module), "_compiled_call_impl"):
        SYMBOLS["torch.nn.Module._compiled_call_impl"].get()()
    module._compiled_call_impl = call


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """What it calls while it is not compiled: `forward` between its hooks."""
    return module._call_impl
