"""Which of its arguments a Triton kernel writes to, as torch reads it off the kernel.

Torch makes Triton's IR of a kernel for that, some 30 ms, and makes it anew for every call of a graph: a hundred casts
to float8 by one kernel took three seconds of a compilation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from megacpp_compile._torch._registry import find
from megacpp_compile._torch.fakes import FakeTensor

_WHERE = "torch._higher_order_ops.triton_kernel_wrap"
# As releases of torch have called the function, the newest first.
_READERS = ("identify_accessed_tensors", "identify_mutated_tensors")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)


@contextlib.contextmanager
def kernels_read_once() -> Iterator[None]:
    """What is compiled inside has a kernel read once for all its calls with arguments of the same types, sizes and
    constants; without effect on a torch that reads kernels elsewhere. From the first to enter to the last to leave, in
    whichever threads."""
    with _lock:
        _replaced.enter()
    try:
        yield
    finally:
        with _lock:
            _replaced.leave()


class _Replaced:
    """How many are inside, and torch's own functions while any is."""

    def __init__(self) -> None:
        self.inside, self.before = 0, dict[str, Any]()

    def enter(self) -> None:
        module = find(_WHERE)
        if self.inside == 0:
            self.before = {name: getattr(module, name) for name in _READERS if hasattr(module, name)}
            for name, read in self.before.items():
                setattr(module, name, _remembering(read))
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        if self.inside == 0:
            for name, read in self.before.items():
                setattr(find(_WHERE), name, read)


_lock, _replaced = threading.Lock(), _Replaced()


def _remembering(read: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, tuple[Any, Any]] = {}

    def reading(kernel: Any, kwargs: dict[str, Any], *more: Any, **named: Any) -> Any:
        key = None if any((*more, *named.values())) else _key(kernel, kwargs)  # descriptors have shapes of their own
        if key is None:
            return read(kernel, kwargs, *more, **named)
        if key not in known:
            known[key] = kernel, read(kernel, kwargs, *more, **named)  # kept, so that no other has its id
        return known[key][1]

    return reading


def _key(kernel: Any, kwargs: Mapping[str, Any]) -> Any:
    """All that torch makes the kernel's IR of; None for arguments that are not known here."""
    found = []
    for name, value in kwargs.items():
        if isinstance(value, FakeTensor):
            of: Any = "tensor", value.dtype
        elif isinstance(value, torch.Tensor):
            return None  # its address counts
        elif hasattr(value, "get_dtype"):
            of = "tensor", value.get_dtype()
        elif isinstance(value, _SYMBOLIC):
            of = "symbolic"  # torch has the same number for all
        else:
            of = type(value), value
        found.append((name, of))
    try:
        hash(key := (id(kernel), tuple(found)))
    except TypeError:
        return None
    return key
