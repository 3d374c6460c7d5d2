"""Dynamo: its settings, exceptions, sources, guards and registry of backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megacpp_compile._torch._registry import find
from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._dynamo import OptimizedModule, config
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.backends.torchxla import openxla_eval_boxed
    from torch._dynamo.exc import InvalidBackend, RestartAnalysis, TensorifyScalarRestartAnalysis, Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, TensorProperty, TensorPropertySource
    from torch._dynamo.trace_rules import check as skips
    from torch._dynamo.utils import counters, graph_break_reasons
    from torch.fx.traceback import _get_memory_budget_annotation as memory_budget_of
else:
    __getattr__ = theme(__name__)


def frame_compiler() -> Callable[..., Any] | None:
    """What Dynamo calls to compile a frame; None where that, or what `set_frame_compiler` is for, is not there."""
    needed = ("torch._dynamo.config.capture_dynamic_output_shape_ops",
              "torch._dynamo.exc.TensorifyScalarRestartAnalysis")  # fmt: skip
    if any(find(path) is None for path in needed):
        return None
    return find("torch._dynamo.convert_frame._compile")  # type: ignore[no-any-return]


def set_frame_compiler(compiler: Callable[..., Any]) -> None:
    """Have Dynamo call `compiler` instead."""
    find("torch._dynamo.convert_frame")._compile = compiler
