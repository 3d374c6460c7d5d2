"""Torch's global modes around code that runs a graph's own switches: whatever happens in between, none stays on; and a
trace by `make_fx` that is under way, paused and resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from megacpp_compile._torch import autocast, dispatch, dynamo, functorch
from megacpp_compile._torch.symbols import SYMBOLS

Result = TypeVar("Result")


def in_own_thread(run: Callable[[], Result]) -> Result:
    """`run()`, or what it raises, by a thread that has neither this one's modes, nor its count of autograd's nodes, nor
    the pool that its allocations go to while CUDA graphs are warmed up."""
    with ThreadPoolExecutor(1, "megacpp") as alone:
        return alone.submit(run).result()


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    """(kind, whether autocast is on, its dtype) of each kind of device that has it."""
    kinds = autocast.supported_devices()
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Grad mode, functorch's stack and autocast are afterwards what they were before, also after an error."""
    layers, grad = functorch.layers(), torch.is_grad_enabled()
    switched = autocast_state()
    cache, depth = torch.is_autocast_cache_enabled(), _autocast_depth()
    try:
        yield
    finally:
        if functorch.layers() > layers:
            functorch.undo_to_layer(layers)
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in switched:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
        # A depth left too high would keep eager's cache of cast weights for good, past every optimizer step.
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """How many autocast regions are open; torch only tells while changing it."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


# Modes of the trace that is paused: those that see functions, the outermost last, and the one that records ops.
_paused: ContextVar[tuple[list[Any], Any]] = ContextVar("megacpp_paused_trace")


@contextlib.contextmanager
def trace_paused() -> Iterator[None]:
    """The trace by `make_fx` that is under way records nothing inside, where Dynamo may compile frames: by itself it
    refuses to, and would translate the modes of the trace as if they were the model's. Raises TorchInternalsError."""
    functions = [dispatch.pop_function_mode() for _ in dispatch.function_modes()]
    token = _paused.set((functions, dispatch.proxy_mode()))
    try:
        with dispatch.no_proxy_mode(), _dynamo_compiles(True):
            yield
    finally:
        _paused.reset(token)
        for mode in reversed(functions):
            dispatch.push_function_mode(mode)


@contextlib.contextmanager
def trace_resumed() -> Iterator[None]:
    """Inside `trace_paused`, the trace records again."""
    functions, proxies = _paused.get()
    for mode in reversed(functions):
        dispatch.push_function_mode(mode)
    try:
        with proxies, _dynamo_compiles(False):
            yield
    finally:
        for _ in functions:
            dispatch.pop_function_mode()


def _dynamo_compiles(while_traced: bool) -> contextlib.AbstractContextManager[None]:
    if not hasattr(dynamo.config, "force_compile_during_fx_trace"):
        SYMBOLS["torch._dynamo.config.force_compile_during_fx_trace"].get()()
    return dynamo.config.patch(force_compile_during_fx_trace=while_traced)
