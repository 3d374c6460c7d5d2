"""AOTAutograd: tracing a module, its partitioners and settings, and the layers of `vmap`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megacpp_compile._torch._registry import find
from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._C._functorch import get_dynamic_layer_stack_depth as layers
    from torch._C._functorch import pop_dynamic_layer_stack_and_undo_to_depth as undo_to_layer
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_module, make_boxed_func
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
else:
    __getattr__ = theme(__name__)


def memory_budget() -> Any:
    """The part of what could be saved that AOTAutograd's partitioner may save, 1.0 for all of it."""
    return find("torch._functorch.config.activation_memory_budget", 1.0)
