"""Dynamo's translation of bytecode, watched instruction by instruction; what it holds for values is in `variables`."""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megacpp_compile._torch import iterators, variables
from megacpp_compile._torch._registry import find

_PATHS = {
    "Translator": "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
    "SideEffects": "torch._dynamo.side_effects.SideEffects",
    "MutationType": "torch._dynamo.variables.base.MutationType",
    "TorchDynamoException": "torch._dynamo.exc.TorchDynamoException",
    "TorchRuntimeError": "torch._dynamo.exc.TorchRuntimeError",
}
_METHODS = ("Translator.__init__", "Translator.step", "SideEffects.check_allowed_side_effect",
            "MutationType.__init__", "TensorVariable.call_method", "TensorVariable.unpack_var_sequence",
            "Iterator.__init__")  # fmt: skip
_LISTS = "torch._dynamo.variables.lists.CommonListMethodsVariable"
_FUNCTIONS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable"
# Functions that a list is given to, or that give a tuple of parts; the latter are methods, too.
_JOINS, _CUTS = ("stack", "cat", "concat", "concatenate"), ("unbind", "split", "chunk")
_READS = ("item", "tolist")
# What of a frame's grows with effects that are replayed behind its graph.
_GROWING = ("random_calls", "debug_locals", "tensor_hooks", "save_for_backward")
_MANY = 8
_BORN = "_megacpp_born"
_clock = itertools.count()


class Watcher(Protocol):
    """What is told of a frame's translation."""

    def step(self, translator: Any, proceed: Callable[[], bool]) -> bool:
        """In the place of one instruction of `translator`, which `proceed` does; returns what that does."""

    def read(self, translator: Any, variable: Any, proceed: Callable[[], Any]) -> Any:
        """In the place of reading the numbers of a tensor."""

    def append(self, variable: Any, added: Any, proceed: Callable[[], Any]) -> Any:
        """In the place of appending `added` to a list."""

    def changes(self, born: int) -> None:
        """A value of Python's is changed, or an iterator goes on, that was made at the time `born` (`now`), or before
        the frame (-1)."""

    def call(self, translator: Any, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """In the place of calling one of torch's own functions that join lists, or cut tensors into parts."""


class Together:
    """Several watchers, the first around the others."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def step(self, translator: Any, proceed: Callable[[], bool]) -> bool:
        return bool(self._around(lambda w, go_on: w.step(translator, go_on), proceed))

    def read(self, translator: Any, variable: Any, proceed: Callable[[], Any]) -> Any:
        return self._around(lambda w, go_on: w.read(translator, variable, go_on), proceed)

    def append(self, variable: Any, added: Any, proceed: Callable[[], Any]) -> Any:
        return self._around(lambda w, go_on: w.append(variable, added, go_on), proceed)

    def call(self, translator: Any, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        return self._around(lambda w, go_on: w.call(translator, function, args, kwargs, go_on), proceed)

    def changes(self, born: int) -> None:
        for watcher in self._watchers:
            watcher.changes(born)

    def _around(self, part: Callable[[Watcher, Callable[[], Any]], Any], proceed: Callable[[], Any]) -> Any:
        for watcher in reversed(self._watchers):
            proceed = functools.partial(part, watcher, proceed)
        return proceed()


def together(*watchers: Watcher | None) -> Watcher | None:
    """One watcher for those of `watchers` that there are."""
    given = [w for w in watchers if w is not None]
    return Together(*given) if len(given) > 1 else given[0] if given else None


_watcher: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("megacpp_translation", default=None)
_left: contextvars.ContextVar[list[tuple[BaseException | None, Any]] | None]
_left = contextvars.ContextVar("megacpp_left", default=None)


def install() -> bool:
    """Let translations be watched; False where Dynamo is built otherwise, and nothing is done."""
    parts = {name: find(path) for name, path in {**_PATHS, **variables.PATHS, **iterators.PATHS}.items()}
    if any(part is None for part in parts.values()):
        return False
    for method in _METHODS:
        cls, _, name = method.partition(".")
        if name not in vars(parts[cls]):
            return False
    translator, effects, mutation = parts["Translator"], parts["SideEffects"], parts["MutationType"]
    step, check = translator.step, effects.check_allowed_side_effect
    init, begin = mutation.__init__, translator.__init__
    tensors, call = parts["TensorVariable"], parts["TensorVariable"].call_method
    unpack, iterator_class = tensors.unpack_var_sequence, parts["Iterator"]
    start = iterator_class.__init__
    skip = find("torch._dynamo.exc.SkipFrame", ())
    if hasattr(step, "__wrapped__"):
        return True

    @functools.wraps(step)
    def watched_step(self: Any) -> Any:
        watcher = _watcher.get()
        if watcher is not None:
            _look_nothing_up(self.output)
        try:
            return step(self) if watcher is None else watcher.step(self, lambda: step(self))
        except skip as error:
            if (left := _left.get()) is not None and "graph break" in str(error):
                left.append((error.__cause__, self.frame_summary()))
            raise

    @functools.wraps(begin)
    def stamped_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, _BORN, now())
        begin(self, *args, **kwargs)

    @functools.wraps(check)
    def watched_check(self: Any, item: Any) -> Any:
        if (watcher := _watcher.get()) is not None:
            watcher.changes(getattr(item.mutation_type, _BORN, -1))
        return check(self, item)

    @functools.wraps(call)
    def watched_call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        watcher = _watcher.get()
        if watcher is not None and name in _CUTS:
            whole = [self, *args]
            return watcher.call(tx, getattr(torch, name), whole, kwargs, lambda: call(self, tx, name, args, kwargs))
        if watcher is None or name not in _READS:
            return call(self, tx, name, args, kwargs)
        return watcher.read(tx, self, lambda: call(self, tx, name, args, kwargs))

    @functools.wraps(unpack)
    def watched_unpack(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """What iterating over a tensor goes by."""
        watcher, rows = _watcher.get(), functools.partial(unpack, self, tx, *args, **kwargs)
        if watcher is None or args or kwargs or type(self) is not tensors:
            return rows()
        made = watcher.call(tx, torch.unbind, [self], {}, rows)
        return made if isinstance(made, list) else made.items

    @functools.wraps(init)
    def stamped_init(self: Any, typ: Any) -> None:
        init(self, typ)
        if typ.name == "New":
            setattr(self, _BORN, now())

    @functools.wraps(start)
    def stamped_start(self: Any, *args: Any, **kwargs: Any) -> None:
        born = kwargs.pop(_BORN, None)  # of what it is a clone of
        start(self, *args, **kwargs)
        setattr(self, _BORN, now() if born is None else born)  # not each has a `mutation_type`

    def advanced(iterator: Any) -> None:
        if (watcher := _watcher.get()) is not None:
            stamped = iterator if iterator.mutation_type is None else iterator.mutation_type
            watcher.changes(getattr(stamped, _BORN, -1))

    if not iterators.install(advanced):
        return False
    if (lists := find(_LISTS)) is not None and "call_method" in vars(lists):
        lists.call_method = _watched_appends(lists.call_method)
    if (functions := find(_FUNCTIONS)) is not None and "call_function" in vars(functions):
        functions.call_function = _watched_functions(functions.call_function)
    translator.step, effects.check_allowed_side_effect = watched_step, watched_check
    mutation.__init__, translator.__init__, tensors.call_method = stamped_init, stamped_begin, watched_call
    iterator_class.__init__, tensors.unpack_var_sequence = stamped_start, watched_unpack
    return True


def _look_nothing_up(frame: Any) -> None:
    """Where many sizes of a frame are known at run time only, its values are made without torch's cache of shapes: each
    expert's rows are a number of their own, so that nothing is found there. Backends get a mode of their own."""
    mode, numbers = getattr(frame, "fake_mode", None), getattr(getattr(frame, "shape_env", None), "counter", {})
    if getattr(mode, "cache_enabled", False) and numbers.get("create_unbacked_symbol", 0) >= _MANY:
        mode.cache_enabled = False  # type: ignore[union-attr]


def _watched_appends(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a method of Dynamo's lists that calls theirs, with appending left to the watcher."""

    @functools.wraps(call)
    def watched(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        watcher = _watcher.get()
        if watcher is None or name != "append" or len(args) != 1 or kwargs:
            return call(self, tx, name, args, kwargs)
        return watcher.append(self, args[0], lambda: call(self, tx, name, args, kwargs))

    return watched


def _watched_functions(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a method of Dynamo's that calls torch's own functions, with `_JOINS` and `_CUTS` left to the watcher."""

    @functools.wraps(call)
    def watched(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        watcher = _watcher.get()
        if watcher is None or getattr(self.value, "__name__", "") not in _JOINS + _CUTS:
            return call(self, tx, args, kwargs)
        return watcher.call(tx, self.value, args, kwargs, lambda: call(self, tx, args, kwargs))

    return watched


def is_failure(error: Exception) -> bool:
    """Whether translation raises `error` because what it ran on fakes has failed, rather than to find its way."""
    own, failed = find(_PATHS["TorchDynamoException"]), find(_PATHS["TorchRuntimeError"])
    return not isinstance(error, own) or isinstance(error, failed)


class noting_skips(AbstractContextManager[list[tuple[BaseException | None, Any]]]):
    """A list of what made Dynamo leave frames to Python without an error, as torch 2.9 does at a graph break in a loop:
    the error that broke the graph, or None for a branch on data, and the line (a `FrameSummary`)."""

    def __enter__(self) -> list[tuple[BaseException | None, Any]]:
        found: list[tuple[BaseException | None, Any]] = []
        self._token = _left.set(found)
        return found

    def __exit__(self, *_: object) -> None:
        _left.reset(self._token)


class watching(AbstractContextManager[None]):
    """Tell `watcher` of translations in this thread."""

    def __init__(self, watcher: Watcher | None) -> None:
        self._watcher = watcher

    def __enter__(self) -> None:
        self._token = _watcher.set(self._watcher)

    def __exit__(self, *_: object) -> None:
        _watcher.reset(self._token)


def now() -> int:
    """The time, in values made."""
    return next(_clock)


def born(translator: Any) -> int:
    """When `translator` was made."""
    return int(getattr(translator, _BORN, -1))


def hands_on(translator: Any) -> bool:
    """Whether `translator` is in Dynamo's own spelling of `enumerate`, `zip` and the like, whose entries go on to a
    loop."""
    return f"{os.sep}polyfills{os.sep}" in str(translator.f_code.co_filename)


def inlined(translator: Any, op: Any) -> bool:
    """Whether what is translated goes to the frame's own graph, or to ones that the higher-order `op` calls."""
    tracer = translator.output.current_tracer
    while tracer.parent is not None and tracer.source_target is op:
        tracer = tracer.parent
    return tracer.parent is None


def list_born(variable: Any) -> int:
    """When a list of the frame's own was made; -1 for any other."""
    own = variables.python_type(variable) is list and hasattr(variable, "items")
    return int(getattr(variable.mutation_type, _BORN, -1)) if own else -1


def callee(translator: Any, inst: Any) -> Any:
    """The function or class of torch's or of Python's that a call instruction is about to call; None for any other."""
    given = inst.arg or 0
    for variable in translator.stack[-given - 2 : -given or None]:
        held = vars(variables.realized(variable)) if hasattr(variable, "realize") else {}
        found = held.get("value", held.get("fn"))
        if callable(found):
            return found
    return None


def go_to(translator: Any, instruction: Any) -> None:
    """Let `translator` go on with this instruction of its function."""
    places = (i for i, inst in enumerate(translator.instructions) if inst is instruction)
    translator.instruction_pointer = next(places)


def reading(translator: Any) -> AbstractContextManager[None]:
    """Let numbers that are known at run time only be read from tensors. The frame's fake mode lets it from then on, as
    the graph is traced again with it."""
    translator.output.fake_mode.allow_scalar_outputs = True
    patch: AbstractContextManager[None] = find("torch._dynamo.config").patch(capture_scalar_outputs=True)
    return patch


def effects(translator: Any) -> tuple[Any, ...]:
    """What a piece of code has changed of the frame's state, but for values, where this is not as it was before."""
    holders = (translator, translator.output, translator.output.side_effects)
    grown = [len(getattr(holder, name, ())) for name in _GROWING for holder in holders]
    kinds = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return (len(translator.block_stack), torch.is_grad_enabled(), *kinds, *grown)
