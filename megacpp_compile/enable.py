"""`enable()`: megacpp compiles what Inductor would, where a trainer owns the call of `torch.compile`.

Trainers name their backends in an enumeration of torch's own (accelerate's `DynamoBackend`, and so Hugging Face's
`TrainingArguments`), or call `torch.compile(model)` without one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from megacpp_compile.backend import checked_options, mode_patches

__all__ = ["Enabled", "enable"]


class Enabled:
    """What `enable` returns; a context manager that, when left, disables again and goes on with what it replaced."""

    def __init__(self, options: Mapping[str, Any], outer: Enabled | None) -> None:
        self.options, self._outer, self._ended = options, outer, False
        self._turn_on()

    def _turn_on(self) -> None:
        self._replaced, self._on = torch.compile, True

        @functools.wraps(self._replaced)
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            return self._replaced(model, *args, **self._redirected(kwargs))

        self._compile = torch.compile = compile

    def _redirected(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        mode, inductor = kwargs.get("mode"), kwargs.get("options")
        both = mode is not None and inductor is not None  # torch's own error
        if not self._on or both or kwargs.get("backend", "inductor") != "inductor":
            return kwargs
        patches = {**self.options.get("inductor", {}), **mode_patches(mode), **(inductor or {})}
        options = {**self.options, **({"inductor": patches} if patches else {})}
        return {**kwargs, "backend": "megacpp", "mode": None, "options": options or None}

    def disable(self) -> None:
        """Leave `torch.compile` as it was; models compiled meanwhile stay compiled. A second call does nothing."""
        self._turn_off()
        self._ended = True

    def _turn_off(self) -> None:
        global _current
        self._on = False  # for who has replaced it since, and calls this one
        if torch.compile is self._compile:
            torch.compile = self._replaced
        _current = None if _current is self else _current

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        global _current
        outer, was_on = self._outer, self._on
        self.disable()
        if outer is not None and not outer._ended and was_on and _current is None:
            outer._turn_on()
            _current = outer


def enable(options: Mapping[str, Any] | None = None) -> Enabled:
    """From here on, `torch.compile` and `nn.Module.compile` without a backend, or with `"inductor"`, mean `"megacpp"`.

    options: fields of `Config`, for all of them. Inductor's own options and modes given to a call still count. Calls
    that name another backend, and what is compiled already, stay as they are. Called again, it replaces the earlier
    options, as a context manager until that is left. Raises the errors of `Config.from_options`.

        megacpp_compile.enable({"policy": "selective"})
        Trainer(model, TrainingArguments(torch_compile=True, ...)).train()
    """
    global _current
    checked_options(options)
    outer = _current
    if outer is not None:
        outer._turn_off()
    _current = Enabled(dict(options or {}), outer)
    return _current


_current: Enabled | None = None
