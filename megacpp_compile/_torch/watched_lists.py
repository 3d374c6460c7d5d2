"""Lists of Dynamo's that tell before anything reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def watch_entries(variable: Any, read: Callable[[], None]) -> None:
    """Call `read` before anything looks at the entries of a list, or at how many these are."""
    if not isinstance(variable.items, Watched):
        variable.items = Watched(variable.items, read)


class Watched(list[Any]):
    """A list that tells before it is read. Appending is no reading."""

    def __init__(self, entries: list[Any], read: Callable[[], None]) -> None:
        super().__init__(entries)
        self._read = read


def _telling(name: str) -> Callable[..., Any]:
    method = getattr(list, name, None)  # a list has no `__radd__`

    def told(self: Watched, *args: Any) -> Any:
        self._read()
        return method(self, *args) if method is not None else NotImplemented

    return told


for _name in ("__iter__", "__len__", "__getitem__", "__reversed__", "__contains__", "__add__", "__radd__", "__mul__",
              "__rmul__", "__iadd__", "__imul__", "__setitem__", "__delitem__", "__eq__", "copy", "count", "index",
              "insert", "pop", "remove", "reverse", "sort", "clear", "extend"):  # fmt: skip
    setattr(Watched, _name, _telling(_name))
