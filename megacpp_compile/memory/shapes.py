"""The fake mode in which a model runs on shapes alone: fake tensors, where torch's refuse what a device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten


def shapes_mode(rows: Callable[[torch.Tensor], int], saw: Callable[[Any, Sequence[Any]], None]) -> FakeTensorMode:
    """Fake tensors without unknown sizes.

    rows: called with a mask, says how many of its elements are taken for true where a model asks which are. Of numbers
    that are counted with a `minlength` none is taken to reach it.
    saw: called with every other op and its arguments.

    The fake kernel of grouped GEMMs takes bfloat16 alone, while a device takes float32 and float16 as well.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dispatch = mode.dispatch

    def empty(types: Any, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return dispatch(aten.empty.memory_format, types, (list(size),), {"dtype": dtype, "device": device})

    def answered(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.nonzero.default:
            mask = args[0]
            return empty(types, (rows(mask), mask.dim()), torch.int64, mask.device)
        if func is aten.bincount.default and (least := (kwargs or {}).get("minlength", (*args, 0, 0)[2])):
            return empty(types, (least,), torch.int64, args[0].device)
        if func is aten._grouped_mm.default and args[0].dtype in (torch.float32, torch.float16):
            given = {**dict(zip(("a", "b", "offs", "bias", "out_dtype"), args, strict=False)), **(kwargs or {})}
            a, b = args[:2]
            return empty(types, grouped_shape(a, b, given.get("offs")), given.get("out_dtype") or a.dtype, a.device)
        saw(func, args)
        return dispatch(func, types, args, kwargs)

    # Of the instance, as torch's higher-order operators know modes by their very class.
    mode.dispatch = answered  # type: ignore[method-assign]
    return mode


def grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> tuple[int, ...]:
    """The shape of `torch._grouped_mm(a, b, offs)`: a tensor of two dimensions holds all groups' rows or columns."""
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():
        groups = (a.shape[0],) if a.dim() == 3 or offs is None else (offs.shape[0],)
    return *groups, a.shape[-2], b.shape[-1]
