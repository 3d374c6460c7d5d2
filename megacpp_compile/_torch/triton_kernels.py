"""How Inductor takes Triton kernels that it did not write: which arguments they write to, and when they are compiled.

To read off a kernel what it writes to, torch makes Triton's IR of it, some 30 ms, and makes it anew for every call of a
graph: a hundred casts to float8 by one kernel took three seconds of a compilation.

Inductor's own kernels are handed to its compile workers as soon as their source is written. Those of others wait until
the code around them is written and loaded, though they are the ones that take longest.
"""

from __future__ import annotations

import ast
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from megacpp_compile._torch.fakes import FakeTensor
from megacpp_compile._torch.replaced import Replaced

_WHERE = "torch._higher_order_ops.triton_kernel_wrap"
# As releases of torch have called the function, the newest first.
_READERS = ("identify_accessed_tensors", "identify_mutated_tensors")
_WRAPPER = "torch._inductor.codegen.wrapper.PythonWrapperCodegen"
# How the definition of a kernel begins, and what only those of others have in it.
_COMPILES, _BY_OTHERS = "async_compile.triton(", "@triton_heuristics.user_autotune("
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)
_logger = logging.getLogger(__name__)


def kernels_read_once() -> contextlib.AbstractContextManager[None]:
    """What is compiled inside has a kernel read once for all its calls with arguments of the same types, sizes and
    constants; without effect on a torch that reads kernels elsewhere."""
    return _readers.replaced()


def kernels_begun_when_written() -> contextlib.AbstractContextManager[None]:
    """What is compiled inside has each Triton kernel that Inductor did not write handed to its compile workers as soon
    as its source is written; without effect where there are no workers."""
    return _definitions.replaced()


def _beginning(define: Callable[..., Any]) -> Callable[..., Any]:
    def defining(wrapper: Any, kernel_name: str, kernel_body: str, *more: Any, **named: Any) -> Any:
        defined = define(wrapper, kernel_name, kernel_body, *more, **named)
        try:
            _begin(kernel_body)
        except Exception as error:  # it is compiled where the code is loaded, and what is wrong is said then
            _logger.info("kernel %s was not begun ahead: %s: %s", kernel_name, type(error).__name__, error)
        return defined

    return defining


def _begin(body: str) -> None:
    """Hand the kernel that the call in `body` compiles to the workers, where that call will find it."""
    from megacpp_compile._torch.inductor import AsyncCompile

    if not body.startswith(_COMPILES) or _BY_OTHERS not in body or not AsyncCompile.use_process_pool():
        return
    # As `IndentedBuffer.splice` writes lines into the module: kernels are found by their source.
    lines = (line if line.strip() else "" for line in body.split("\n"))
    call = ast.parse("\n".join(lines).strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    name, source = map(ast.literal_eval, call.args[:2])
    AsyncCompile().triton(name, source)


_readers = Replaced(_WHERE, _READERS, lambda read: _remembering(read))
_definitions = Replaced(_WRAPPER, ("define_kernel",), _beginning)


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
    """All that torch makes the kernel's IR of; None for arguments that are not known here. torch wraps a kernel for
    which warps are chosen into an autotuner of one choice, and reads both."""
    found, configs = [], getattr(kernel, "configs", ())
    for name, value in {**kwargs, **(configs[0].kwargs if configs else {})}.items():
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
        hash(key := (id(kernel.fn if configs else kernel), tuple(found)))
    except TypeError:
        return None
    return key
