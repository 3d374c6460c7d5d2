"""Modes that see every op, and what gets a kernel past them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._C import DispatchKey
    from torch._C import _SetExcludeDispatchKeyGuard as set_excluded
    from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as set_runs_compiled
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as no_proxy_mode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode as proxy_mode
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils.checkpoint import _CachingTorchDispatchMode as SelectiveContext
else:
    __getattr__ = theme(__name__)
