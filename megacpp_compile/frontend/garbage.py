"""Python's garbage collector while a frame is compiled.

A full collection looks at every object of the process, 0.65 million once torch and transformers are imported: some
0.5 s beside an H200, two or three times while a frame is compiled, whose graphs are what makes the collector begin.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

# Objects more than are freed, at which the young ones are looked at; Python's own 700 to 2000 are few for graphs.
_YOUNG = 20_000
_lock = threading.Lock()
_inside = 0
_given = gc.get_threshold()


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Young objects are collected inside, less often; old ones again once the last to enter has left, in whichever
    threads. A collector that the user has switched off stays so."""
    global _inside, _given
    with _lock:
        if _inside == 0:
            _given = gc.get_threshold()
            young, middle, _ = _given
            if young:
                gc.set_threshold(max(young, _YOUNG), middle, sys.maxsize >> 32)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_given)
