"""The base of passes over Inductor's graphs: they run behind the user's; their cache key covers every source file."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch import fx

from megacpp_compile._torch.inductor import CustomGraphPass


@functools.cache
def source_hash() -> str:
    """Digest of every source file of this package: part of the cache key of what it compiles."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class GraphPass(CustomGraphPass):
    """before: a pass, or several, that the user has given for the same place in Inductor's pipeline; they run first.

    A subclass defines `run`, and where it takes more than `before` also `key`, its part of the cache key, and
    `__reduce__`, as keys are pickled.
    """

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def run(self, graph: fx.Graph) -> None:
        raise NotImplementedError

    def key(self) -> tuple[Any, ...]:
        return ()

    def __reduce__(self) -> Any:
        return type(self), (self.before,)

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in self._earlier():
            earlier(graph)
        self.run(graph)

    def uuid(self) -> Any:
        inner = tuple(p.uuid() if hasattr(p, "uuid") else repr(p) for p in self._earlier())
        return (type(self).__name__, source_hash(), *self.key(), inner)

    def _earlier(self) -> tuple[Any, ...]:
        if self.before is None:
            return ()
        return tuple(self.before) if isinstance(self.before, (list, tuple)) else (self.before,)
