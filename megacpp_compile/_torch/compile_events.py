"""What torch says while it compiles: when the phases that it times begin and end, which kernel's compiler it waits for,
and what it has a C++ compiler make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from megacpp_compile._torch._registry import find
from megacpp_compile._torch.replaced import Replaced

_LOGGER = "torch._dynamo.utils.ChromiumEventLogger"
_WORKERS = "torch._inductor.async_compile.AsyncCompile"
_COMPILER = "torch._inductor.cpp_builder.CppBuilder"
_INSTRUCTIONS = "torch._inductor.cpu_vec_isa.VecISA"

Span = Callable[[str], contextlib.AbstractContextManager[None]]


class Events:
    """Whom to tell.

    begins, ends: called with the name of a phase, of torch's `dynamo_timed`, in whichever thread it is.
    waits: makes of a kernel's name a context in which this thread waits for the worker that compiles it.
    builds: makes a context of what this thread has a C++ compiler make in it: a "kernel", "headers" of torch's or
        their "key", or a "probe" of the processor's instructions, which runs there, too.
    """

    def __init__(self, begins: Callable[[str], None], ends: Callable[[str], None], waits: Span, builds: Span) -> None:
        self.begins, self.ends, self.waits, self.builds = begins, ends, waits, builds
        self._replaced = (
            Replaced(_LOGGER, ("log_event_start",), self._starting),
            Replaced(_LOGGER, ("log_event_end",), self._ending),
            Replaced(_WORKERS, ("wait",), self._waiting),
            Replaced(_COMPILER, ("build",), self._building),
            Replaced(_INSTRUCTIONS, ("check_build",), self._probing),
        )

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """They are told of what is compiled inside, as far as this torch has the functions that say it."""
        with contextlib.ExitStack() as stack:
            for replaced in self._replaced:
                stack.enter_context(replaced.replaced())
            yield

    def _starting(self, log: Callable[..., Any]) -> Callable[..., Any]:
        def log_event_start(logger: Any, event_name: str, *more: Any, **named: Any) -> Any:
            self.begins(event_name)
            return log(logger, event_name, *more, **named)

        return log_event_start

    def _ending(self, log: Callable[..., Any]) -> Callable[..., Any]:
        def log_event_end(logger: Any, event_name: str, *more: Any, **named: Any) -> Any:
            self.ends(event_name)
            return log(logger, event_name, *more, **named)

        return log_event_end

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        codes: Any = find("torch._inductor.codecache.CodeCacheFuture", Future)
        waits = self.waits

        class Awaited(codes):  # type: ignore[misc]
            def __init__(self, name: str, future: Any) -> None:
                self.name, self.future = name, future

            def result(self, *args: Any, **named: Any) -> Any:
                with waits(self.name):
                    return self.future.result(*args, **named)

        def waiting(workers: Any, scope: dict[str, Any], *more: Any, **named: Any) -> Any:
            scope.update({name: Awaited(name, f) for name, f in scope.items() if isinstance(f, (Future, codes))})
            return wait(workers, scope, *more, **named)

        return waiting

    def _building(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def building(builder: Any, *more: Any, **named: Any) -> Any:
            known = ("headers", "_precompiling"), ("key", "_preprocessing")
            with self.builds(next((what for what, flag in known if getattr(builder, flag, False)), "kernel")):
                return build(builder, *more, **named)

        return building

    def _probing(self, check: Callable[..., Any]) -> Callable[..., Any]:
        def probing(isa: Any, *more: Any, **named: Any) -> Any:
            with self.builds("probe"):
                return check(isa, *more, **named)

        return probing
