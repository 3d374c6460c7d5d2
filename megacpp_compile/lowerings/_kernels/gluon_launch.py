"""Launching kernels again, Gluon's and those beside them, past what Triton looks up for every launch.

With some ten descriptors of tiles Triton takes 0.2 ms of the host for a launch: it checks each of them, and describes
each in words for its cache of compiled kernels. A call that differs from one before in no way that a kernel is compiled
for goes to what that one was compiled to.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# What a launch of a compiled kernel takes was looked up in these releases. Others launch every time as the first.
KNOWN = "3.6."
# Calls that are remembered. Each length of a sequence is one for each kernel.
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


_compiled: dict[Any, Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], **args: Any) -> None:
    """`kernel[grid](**args)`, with descriptors for those that are `Tile`s."""
    known = triton.__version__.startswith(KNOWN) and isinstance(kernel, triton.JITFunction)
    key = (id(kernel), torch.cuda.current_device(), *args, *map(_kind, args.values())) if known else None
    if (compiled := _compiled.get(key)) is not None:
        compiled[(*grid, 1, 1)[:3]](*(args[name] for name in kernel.arg_names))
        return
    compiled = kernel[grid](**{name: _described(arg) for name, arg in args.items()})
    if known and compiled is not None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = compiled


def _kind(arg: Any) -> Any:
    """What of an argument a kernel is compiled for, or more: of a number all of it."""
    if isinstance(arg, Tile):
        return arg.base.dtype, arg.base.data_ptr() % 16, *arg.block_shape
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16
    return float if isinstance(arg, float) else arg


def _described(arg: Any) -> Any:
    if not isinstance(arg, Tile):
        return arg
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(*arg)
