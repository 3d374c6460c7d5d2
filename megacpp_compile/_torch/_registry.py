"""How a private symbol of torch is looked up, and what stands in its place where this torch lacks it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megacpp_compile.errors import TorchInternalsError

_logger = logging.getLogger("megacpp_compile")
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A row of the table.

    Attributes:
        name: "theme.name", what `megacpp_compile._torch` calls it; "theme." for torch's own name, without underscores
            before it; "" for what is read through another row, such as a key of a config, and for attributes of torch's
            objects, which Dynamo has to see as they are.
        path: where torch has it.
        use: what it is for, as a noun.
        without: what happens where it is missing, as a sentence.
        seen: first and last release of torch it was seen in; older ones lack it, newer ones are to be looked at.
        instead: makes what stands in for it; None where nothing can, and any use raises TorchInternalsError.
    """

    name: str
    path: str
    use: str
    without: str
    seen: str = "2.9-2.15"
    instead: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if self.name.endswith("."):
            object.__setattr__(self, "name", self.name + self.path.rpartition(".")[2].lstrip("_"))

    def get(self) -> Any:
        """The symbol, what stands in for it, or a `Missing`."""
        found = find(self.path, _NOTHING)
        if found is not _NOTHING:
            return found
        error = TorchInternalsError(self.path, torch.__version__, self.use, self.without)
        if release(torch.__version__) >= release(self.seen.partition("-")[0]):  # else nobody expects it there
            _warn_once(str(error))
        return self.instead() if self.instead is not None else Missing(error)


class Missing:
    """In the place of a symbol: any use raises `error`, but for asking whether it is there. A class derived from it
    cannot be instantiated."""

    def __init__(self, error: TorchInternalsError) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self._error

    __call__ = __enter__ = __exit__ = __getitem__ = __iter__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, which have answers
            raise AttributeError(name)
        raise self._error

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type("Missing", (), {"__new__": self._refuse}),)


def find(path: str, default: Any = None) -> Any:
    """What torch has at `path`, importing what holds it; `default` where it has nothing."""
    found: Any = torch
    root, *parts = path.split(".")
    for i, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join((root, *parts[: i + 1])))
            except ImportError:
                return default
    return found


def release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(number) for number in version.split(".")[:2])


def present(*symbols: Any) -> bool:
    """Whether this torch has all of them."""
    return not any(type(symbol) is Missing for symbol in symbols)


@functools.cache
def _warn_once(text: str) -> None:
    _logger.warning("%s", text)
