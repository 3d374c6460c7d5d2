"""Launching kernels again, Gluon's and those beside them, past what Triton looks up for every launch.

With some ten descriptors of tiles Triton takes 0.2 ms of the host for a launch: it checks each of them, and describes
each in words for its cache of compiled kernels. A call that differs from one before in no way that a kernel is compiled
for goes to what that one was compiled to: to the function in C that Triton made for it, with addresses for tensors,
about which Triton would ask CUDA one by one.

Inductor does not know these kernels, so none of its workers compiles them. Threads of ours do, while it compiles the
graph that will launch them (`compile_ahead` in backends/static_launch.py): most of a compilation is in C++ and ptxas.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
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


_compiled: dict[Any, tuple[Any, _Direct | None]] = {}
_plans: dict[Any, _Plan] = {}
# Calls whose kernels were begun ahead.
_begun: dict[Any, Future[None]] = {}


def launch(kernel: Any, grid: tuple[int, ...], **args: Any) -> None:
    """`kernel[grid](**args)`, with descriptors for those that are `Tile`s."""
    if ahead():
        _begin(kernel, grid, args)
        return
    known = triton.__version__.startswith(KNOWN) and isinstance(kernel, triton.JITFunction)
    key, values = _key(kernel, args) if known else (None, [])
    if (found := _compiled.get(key)) is not None:
        compiled, direct = found
        if direct is None or not direct.run(grid, values):
            compiled[(*grid, 1, 1)[:3]](*map(args.__getitem__, kernel.arg_names))
        return
    # Whatever of this kernel is being compiled is most likely this call's; what it failed with, the launch meets again.
    wait([job for begun, job in _begun.items() if begun[0] == id(kernel)])
    compiled = kernel[grid](**{name: _described(arg) for name, arg in args.items()})
    if known and compiled is not None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = compiled, _direct(compiled)


class _Direct:
    """A compiled kernel, as Triton's launcher of it in C is called: grid, stream, function and what Triton keeps of the
    kernel, no hooks, and then each argument in order, with None in the place of constants, and a descriptor, sizes and
    strides in that of tiles."""

    def __init__(self, compiled: Any, call: Callable[..., None]) -> None:
        from triton.backends.nvidia import driver

        runtime, run = triton.knobs.runtime, compiled.run
        self.call, self.function, self.packed = call, compiled.function, compiled.packed_metadata
        self.how = run.launch_cooperative_grid, run.launch_pdl
        self.hooks = runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls
        self.stream = triton.runtime.driver.active.get_current_stream
        self.describe = triton.runtime.driver.active.utils.fill_tma_descriptor
        self.kinds = [
            (m["swizzle"], m["elem_size"], driver.TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], m["block_size"])
            for m in compiled.metadata.tensordesc_meta or ()
        ]

    def run(self, grid: tuple[int, ...], values: list[Any]) -> bool:
        """Launch it, unless somebody listens to launches, as Triton's profiler does."""
        if self.hooks[0] or self.hooks[1]:
            return False
        if self.kinds:
            flat: list[Any] = []
            kinds = iter(self.kinds)
            for value in values:
                if type(value) is Tile:
                    base, shape, strides = value.base.data_ptr(), value.shape, value.strides
                    flat += self.describe(base, *next(kinds), shape, strides, value.padding == "nan"), *shape, *strides
                else:
                    flat.append(value)
            values = flat
        x, y, z = (*grid, 1, 1)[:3]
        stream = self.stream(torch.cuda.current_device())
        self.call(x, y, z, stream, self.function, *self.how, None, None, self.packed, None, None, None, *values)
        return True


def _direct(compiled: Any) -> _Direct | None:
    """None where Triton's launcher does more than this release's does for kernels of ours."""
    try:
        run = compiled.run
        call = run.launch
        if tiles := compiled.metadata.tensordesc_meta:
            call = inspect.getclosurevars(call).nonlocals["launcher"]
        plain = not run.global_scratch_size and not run.profile_scratch_size
        plain = plain and all(kind is not None and not kind["fp4_padded"] for kind in tiles or ())
        return _Direct(compiled, call) if plain else None
    except (AttributeError, KeyError, TypeError):
        return None


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Where kernels are compiled ahead."""
    return ThreadPoolExecutor(threads, thread_name_prefix="megacpp-kernels")


def _begin(kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> None:
    """Has a thread compile the kernel for such a call, unless one does."""
    if not isinstance(kernel, triton.JITFunction) or (key := _key(kernel, args)[0]) in _begun:
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


class _Plan(NamedTuple):
    """What is read of calls with arguments of the same names. constants: what is compiled in, and options, of such a
    call; passed: the kernel's arguments in order, None where it is a constant."""

    number: int
    constants: Callable[[dict[str, Any]], Any]
    passed: tuple[str | None, ...]


def _plan(kernel: Any, names: tuple[str, ...]) -> _Plan:
    passed = {p.name for p in kernel.params if not p.is_constexpr}
    constants = [name for name in names if name not in passed]
    # Two names at least, for which it gives a tuple; that of a constant twice does no harm.
    read = operator.itemgetter(*constants, *constants[:1]) if constants else lambda args: ()
    given = [name for name in kernel.arg_names if name in names]
    return _Plan(len(_plans), read, tuple(name if name in passed else None for name in given))


def _key(kernel: Any, args: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """(what a kernel is compiled for in a call, or more; its arguments, with addresses for tensors and None for
    constants). How many rows there are changes with each step of expert parallelism."""
    if (plan := _plans.get(which := (id(kernel), *args))) is None:
        plan = _plans[which] = _plan(kernel, tuple(args))
    place = _offset if ahead() else Tensor.data_ptr
    key: list[Any] = [id(kernel), plan.number, torch.cuda.current_device(), plan.constants(args)]
    values: list[Any] = []
    for name in plan.passed:  # of some thirty, at every launch: nothing is called that need not be
        if name is None:
            values.append(None)
            continue
        value = arg = args[name]
        if type(arg) is int:
            key.append((int, arg == 1, arg % 16 == 0, arg.bit_length() > 31))
        elif type(arg) is Tile:
            key.append((arg.base.dtype, place(arg.base) % 16, *arg.block_shape))
        elif isinstance(arg, Tensor):
            value = place(arg)
            key.append((arg.dtype, value % 16))
        else:
            key.append(float if isinstance(arg, float) else arg)
        values.append(value)
    return tuple(key), values


def _described(arg: Any) -> Any:
    if not isinstance(arg, Tile):
        return arg
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(*arg)
