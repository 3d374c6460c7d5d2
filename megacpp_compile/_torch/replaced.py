"""Functions of torch's that are replaced while something runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megacpp_compile._torch._registry import find


class Replaced:
    """Attributes of something of torch's, each replaced by `around` it from the first to enter to the last to leave, in
    whichever threads. Those that this torch lacks are left out."""

    def __init__(self, where: str, names: tuple[str, ...], around: Callable[[Any], Any]) -> None:
        self.where, self.names, self.around = where, names, around
        self.inside, self.before, self.lock = 0, dict[str, Any](), threading.Lock()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        with self.lock:
            if self.inside == 0:
                there = find(self.where)
                self.before = {name: getattr(there, name) for name in self.names if hasattr(there, name)}
                for name, given in self.before.items():
                    setattr(there, name, self.around(given))
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    for name, given in self.before.items():
                        setattr(find(self.where), name, given)
