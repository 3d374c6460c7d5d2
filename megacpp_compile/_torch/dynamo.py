"""Dynamo: its settings, exceptions, sources, guards and registry of backends."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from megacpp_compile._torch._registry import find, present
from megacpp_compile._torch._theme import theme
from megacpp_compile._torch.symbols import SYMBOLS

if TYPE_CHECKING:
    from torch._dynamo import OptimizedModule, config, eval_frame, graph_break, mark_static_address
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as BundledCallable
    from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable as GraphCallable
    from torch._dynamo.aot_compile_types import SerializableCallable
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.backends.torchxla import openxla_eval_boxed
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.exc import InvalidBackend, RestartAnalysis, TensorifyScalarRestartAnalysis, Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext
    from torch._dynamo.source import AttrSource, TensorProperty, TensorPropertySource
    from torch._dynamo.symbolic_convert import TensorifyState
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


def left_to_python() -> Any:
    """What Dynamo is told of a frame that runs in Python, with all that it calls, in this call of it and not in others;
    None where it cannot be told."""
    answer = find("torch._dynamo.types.ConvertFrameReturn")
    if answer is None or "apply_to_code" not in inspect.signature(answer).parameters:
        return None
    skip = answer().frame_exec_strategy  # of the frame, not of what it calls
    return answer(frame_exec_strategy=type(skip)(skip.cur_action, skip.cur_action), apply_to_code=False)


class _Reopened(dict[str, Any]):
    """Dynamo's table of backends, where `open_to` does not count as taken."""

    open_to: str = ""

    def __contains__(self, name: object) -> bool:
        return name != self.open_to and super().__contains__(name)


def registers_again(backend: Any) -> None:
    """Register `backend`, and let it be registered again. Dynamo looks a name up, imports what the entry point names,
    and only then asks whether the name is taken, without a lock: threads whose first use of a backend is at once all
    come to register it, and have looked up by then what registers, so that only the table itself can let them."""
    registry = find("torch._dynamo.backends.registry")
    known = find("torch._dynamo.backends.registry._COMPILER_FNS")
    if not isinstance(known, dict) or isinstance(known, _Reopened):
        return
    backend._tags = ()  # what else registering does
    reopened = _Reopened({**known, backend.__name__: backend})
    reopened.open_to = backend.__name__
    registry._COMPILER_FNS = reopened


def failed_guard(given: Mapping[str, Any]) -> str:
    """The guard that fails for a frame, as Dynamo says it, of what the frame was compiled to before the code whose
    guards hold the longest; "" where there is none. given: the arguments of Dynamo's compilation of it."""
    reason = find("torch._dynamo.guards.get_guard_fail_reason")
    values: dict[str, Any] = given.get("locals") or {}
    known = [entry for entry in _earlier(given) if hasattr(entry.guard_manager, "check_verbose")]
    if reason is None or not known:
        return ""
    nearest = max(known, key=lambda entry: entry.guard_manager.check_verbose(values).num_guards_executed)
    backend = {"backend": None} if "backend" in inspect.signature(reason).parameters else {}
    found = reason(nearest.guard_manager, nearest.code, values, nearest.compile_id, skip_logging=True, **backend)
    return str(found)


def _same(value: Any) -> Any:
    return value


def guard_of(source: Any, holds: Callable[[Any], bool], says: str) -> Any:
    """A guard, for `install_guard`, that `holds` of what `source` finds. says: it, in a reason to compile again."""

    def create(builder: Any, guard: Any) -> None:
        # What is behind an accessor is asked at each call; up to torch 2.12 guards on tensors of modules are not, where
        # no module's dictionary has changed.
        kind = builder.get_guard_manager_type(guard.originating_source, None)
        held = builder.get_guard_manager(guard).lambda_manager(_same, says, None, kind)
        try:
            held.add_lambda_guard(holds, [says], guard.user_stack)
        except TypeError:  # up to torch 2.12
            held.add_lambda_guard(holds, [says])

    return source.make_guard(create)


def _earlier(given: Mapping[str, Any]) -> Iterable[Any]:
    """What a frame was compiled to before; until torch 2.12 each has the next one."""
    entries = given.get("cache_entries_for_reasons") or given.get("cache_entries")
    if entries is not None:
        return entries  # type: ignore[no-any-return]
    one, found = given.get("cache_entry"), []
    while one is not None:
        found.append(one)
        one = getattr(one, "next", None)
    return found


def aot_compiler(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """What compiles `fn` as one graph for inputs (args, kwargs), without running it. settings: of `torch.compile`.
    Raises TorchInternalsError where torch has no such thing."""
    import torch

    if not present(switch := SYMBOLS["torch._dynamo.config.enable_aot_compile"].get()):
        switch()
    with find("torch._dynamo.config").patch(enable_aot_compile=True):
        compiled: Any = torch.compile(fn, fullgraph=True, **settings)
    return compiled.aot_compile  # type: ignore[no-any-return]


def check_when_given(backends: Sequence[Any], check: Callable[..., Any]) -> None:
    """Have `torch.compile(model, backend=...)`, for one of `backends`, call `check` with the keyword arguments that it
    keeps for the backend, `mode` and `options`. Where Dynamo is built otherwise, nothing is done."""
    original = find("torch._dynamo.eval_frame.get_compiler_fn")
    if original is None:
        return

    @functools.wraps(original)
    def get_compiler_fn(compiler_fn: Any) -> Any:
        if any(getattr(compiler_fn, "compiler_fn", None) is backend for backend in backends):
            check(**getattr(compiler_fn, "kwargs", {}))
        return original(compiler_fn)

    find("torch._dynamo.eval_frame").get_compiler_fn = get_compiler_fn


def unwrapped(error: Exception, raised_in: FrameType) -> Exception:
    """`error` as Dynamo lets a backend raise it, where it would wrap any other in BackendCompilerFailed: an instance of
    the error's own class, with its message and attributes, whose traceback goes from the user's call to the frame
    `raised_in`. With TORCHDYNAMO_VERBOSE=1 it is whole."""
    shorten, config = find("torch._dynamo.exc.ShortenTraceback"), find("torch._dynamo.config")
    if shorten is None or isinstance(error, shorten):
        return error
    of: Any = type(error)
    cls: Any = _shortened(of, shorten)
    short: Exception = cls.__new__(cls, *error.args)
    shorten.__init__(short, *error.args, first_useful_frame=raised_in)  # the error's own takes other arguments
    short.__dict__.update(error.__dict__, meant=error)
    return short.with_traceback(error.__traceback__ if getattr(config, "verbose", False) else None)


@functools.cache
def _shortened(cls: type[Exception], shorten: type[Exception]) -> type[Exception]:
    # Dynamo adds to the arguments and attributes of what it lets pass: the error that was meant says what it said.
    told = {
        "__str__": lambda self: str(self.meant),
        "__reduce__": lambda self: self.meant.__reduce__(),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls, shorten), told)
