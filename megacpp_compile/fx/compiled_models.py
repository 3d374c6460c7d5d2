"""Which models are compiled, for what has to happen before."""

from __future__ import annotations

import gc
import weakref

from torch import nn

from megacpp_compile._torch import calls, dynamo
from megacpp_compile._torch.modules import compiled_call

# Model -> the object of the `torch.compile` that compiled a frame of it, as long as that lives.
_known: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()


def note_compiled() -> None:
    """Remember the model whose frame is being compiled: `torch.compile(model)` leaves no mark on `model`."""
    call = calls.current()
    if call is not None and call.module is not None:
        _known[call.module] = weakref.ref(call.context)


def compiled_part(model: nn.Module) -> tuple[str, str] | None:
    """(name, class) of the first module in `model` that is compiled: by `torch.compile` around it or a model that has
    been called since, by `Module.compile`, or by `megacpp_compile.compile`. None where none is."""
    for fqn, module in model.named_modules():
        marked = isinstance(module, dynamo.OptimizedModule) or compiled_call(module) is not None
        if marked or _still_compiled(module):
            return fqn, type(module).__name__
    return None


def _still_compiled(module: nn.Module) -> bool:
    """Whether the `torch.compile` that compiled `module` is still held by anybody but a cycle of its own."""
    context = _known.get(module)
    if context is not None and context() is not None:
        gc.collect()
    return context is not None and context() is not None
