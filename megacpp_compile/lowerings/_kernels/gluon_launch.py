"""Launching kernels again, Gluon's and those beside them, past what Triton looks up for every launch.

With some ten descriptors of tiles Triton takes 0.2 ms of the host for a launch: it checks each of them, and describes
each in words for its cache of compiled kernels. A call that differs from one before in no way that a kernel is compiled
for goes to what that one was compiled to.

Inductor does not know these kernels, so none of its workers compiles them. Threads of ours do, while it compiles the
graph that will launch them (`compile_ahead` in backends/static_launch.py): most of a compilation is in C++ and ptxas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_compile.lowerings._kernels.trace_options import ahead

# What a launch of a compiled kernel takes was looked up in these releases. Others launch every time as the first.
KNOWN = "3.6."
# Calls that are remembered.
MOST = 4096


class Tile(NamedTuple):
    """What Gluon's `TensorDescriptor` is made of. `base`: rows begin at multiples of 16 bytes."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"


@functools.cache
def tile_layout(tile: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Of a tile in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout.get_default_for(list(tile), numbers(dtype))


def numbers(dtype: torch.dtype) -> Any:
    """Gluon's name of float32, bfloat16 or e4m3."""
    from triton.experimental.gluon import language

    return {
        torch.float32: language.float32,
        torch.bfloat16: language.bfloat16,
        torch.float8_e4m3fn: language.float8e4nv,
    }[dtype]


def address(t: Tensor) -> int:
    """Where `t` begins. A tensor that is nowhere yet is told as aligned as its offset is: torch allocates in 512s."""
    return _offset(t) if ahead() else t.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Of each; there may be hundreds, which a launch waits for."""
    return list(map(_offset if ahead() else Tensor.data_ptr, tensors))


def _offset(t: Tensor) -> int:
    return int(t.storage_offset()) * t.element_size()


_compiled: dict[Any, Any] = {}
# The parameters of a kernel whose values a launch passes; others, and options, are constants of what is compiled.
_passed: dict[int, frozenset[str]] = {}
# Calls whose kernels were begun ahead.
_begun: dict[Any, Future[None]] = {}


def launch(kernel: Any, grid: tuple[int, ...], **args: Any) -> None:
    """`kernel[grid](**args)`, with descriptors for those that are `Tile`s."""
    if ahead():
        _begin(kernel, grid, args)
        return
    known = triton.__version__.startswith(KNOWN) and isinstance(kernel, triton.JITFunction)
    key = _key(kernel, args) if known else None
    if (compiled := _compiled.get(key)) is not None:
        compiled[(*grid, 1, 1)[:3]](*map(args.__getitem__, kernel.arg_names))
        return
    # Whatever of this kernel is being compiled is most likely this call's; what it failed with, the launch meets again.
    wait([job for begun, job in _begun.items() if begun[0] == id(kernel)])
    compiled = kernel[grid](**{name: _described(arg) for name, arg in args.items()})
    if known and compiled is not None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = compiled


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Where kernels are compiled ahead."""
    return ThreadPoolExecutor(threads, thread_name_prefix="megacpp-kernels")


def _begin(kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> None:
    """Has a thread compile the kernel for such a call, unless one does."""
    if not isinstance(kernel, triton.JITFunction) or (key := _key(kernel, args)) in _begun:
        return
    from megacpp_compile._torch.inductor import get_compile_threads

    if len(_begun) >= MOST:
        _begun.clear()
    nowhere = {name: _nowhere(arg) for name, arg in args.items()}
    _begun[key] = _pool(get_compile_threads()).submit(_warm, kernel, grid, nowhere, torch.cuda.current_device())


def _warm(kernel: Any, grid: tuple[int, ...], args: dict[str, Any], device: int) -> None:
    given = [args.pop(name) for name in kernel.arg_names]
    with torch.cuda.device(device):
        kernel.warmup(*given, grid=grid, **args)


class _Memory(NamedTuple):
    """What a description of tiles asks of the tensor that they are tiles of."""

    dtype: torch.dtype

    @staticmethod
    def data_ptr() -> int:
        return 0


def _nowhere(arg: Any) -> Any:
    """An argument as Triton's `warmup` takes it: of a tensor, taken for aligned, its dtype."""
    if isinstance(arg, Tile):
        return _described(arg._replace(base=_Memory(arg.base.dtype)))  # type: ignore[arg-type]
    return arg.dtype if isinstance(arg, Tensor) else arg


def _key(kernel: Any, args: dict[str, Any]) -> Any:
    """What a kernel is compiled for in a call, or more. How many rows there are changes with each step of expert
    parallelism."""
    if (passed := _passed.get(id(kernel))) is None:
        passed = _passed[id(kernel)] = frozenset(p.name for p in kernel.params if not p.is_constexpr)
    place = _offset if ahead() else Tensor.data_ptr
    key: list[Any] = [id(kernel), torch.cuda.current_device(), *args]
    for name, arg in args.items():  # of some thirty, at every launch: nothing is called that need not be
        if name not in passed:
            key.append(arg)
        elif isinstance(arg, Tensor):
            key.append((arg.dtype, place(arg) % 16))
        elif isinstance(arg, Tile):
            key.append((arg.base.dtype, place(arg.base) % 16, *arg.block_shape))
        elif type(arg) is int:
            key.append((int, arg == 1, arg % 16 == 0, arg.bit_length() > 31))
        else:
            key.append(float if isinstance(arg, float) else arg)
    return tuple(key)


def _described(arg: Any) -> Any:
    if not isinstance(arg, Tile):
        return arg
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(*arg)
