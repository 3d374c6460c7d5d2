"""AOTAutograd: tracing a module, its partitioners and settings, and the layers of `vmap`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import SymFloat
from torch.fx import GraphModule

from megacpp_compile._torch._registry import find
from megacpp_compile._torch._theme import theme
from megacpp_compile._torch.guards import TracingContext

if TYPE_CHECKING:
    from torch import _functionalize_has_data_mutation as is_written_to  # type: ignore[attr-defined]
    from torch import _functionalize_has_metadata_mutation as has_changed_metadata
    from torch import _functionalize_was_inductor_storage_resized as has_resized_storage
    from torch import _functionalize_was_storage_changed as has_changed_storage
    from torch._C._functorch import get_dynamic_layer_stack_depth as layers
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._C._functorch import pop_dynamic_layer_stack_and_undo_to_depth as undo_to_layer
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_module, make_boxed_func
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
else:
    __getattr__ = theme(__name__)


def memory_budget() -> Any:
    """The part of what could be saved that AOTAutograd's partitioner may save, 1.0 for all of it."""
    return find("torch._functorch.config.activation_memory_budget", 1.0)


def backward_with_forward() -> contextlib.AbstractContextManager[Any]:
    """What is compiled for training inside has its backward lowered too, instead of when that first runs; without
    effect on a torch that has no such setting. Every compiler in it has to call `keep_saved_tensors`."""
    if not lowers_backward_with_forward():
        return contextlib.nullcontext()
    return find("torch._functorch.config").patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def lowers_backward_with_forward() -> bool:
    """Whether torch has the setting that `backward_with_forward` makes."""
    return find("torch._functorch.config.force_non_lazy_backward_lowering") is not None


@contextlib.contextmanager
def floats_of_the_frame() -> Iterator[None]:
    """Of the graphs that are compiled inside, the first says which floats of the frame are numbers. Others are traced
    on the way, as of what a pattern of Inductor's puts in a match's place; to AOTAutograd a float that such a graph
    does not read is one that is no input, and the frame would not compile."""
    module = find("torch._functorch._aot_autograd.graph_compile")
    fix = getattr(module, "_apply_tensorify_python_scalars", None)
    if fix is None:
        yield
        return
    seen: list[GraphModule] = []

    def of_first(graph: GraphModule) -> None:
        if not seen or any(isinstance(n.meta.get("val"), SymFloat) for n in graph.graph.nodes):
            seen.append(graph)
            fix(graph)

    module._apply_tensorify_python_scalars = of_first
    try:
        yield
    finally:
        module._apply_tensorify_python_scalars = fix


def keep_saved_tensors() -> None:
    """Have a backward that is lowered with its forward leave the tensors saved for it as they are, so that it may run
    again (`retain_graph=True`). One that is lowered at its first run asks how it is called instead."""
    metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    if find("torch._functorch.config.force_non_lazy_backward_lowering") and hasattr(metadata, "bw_donated_idxs"):
        metadata.bw_donated_idxs = []
