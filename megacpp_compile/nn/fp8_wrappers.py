"""Opens tensors that report one dtype and hold another: as a payload and its scale.

A wrapper such as Transformer Engine's `Float8Tensor` reports bfloat16, has `data_ptr() == 0`, and keeps one byte an
element beside a scale. Code that trusts its dtype passes a null pointer to a kernel or widens it. `split` returns
payload and scale; dispatch by `storage_dtype`.

    split(weight, "layers.0.q_proj.weight")  ->  Split(payload float8_e4m3fn, scale float32, ...)
    register(MyTensor, lambda t: (t.bits.view(torch.float8_e4m3fn), t.scale))

These are known by name, so that neither package is imported: Transformer Engine's Float8Tensor,
Float8BlockwiseQTensor and MXFP8Tensor (transformer_engine/pytorch/tensor/storage/), torchao's Float8Tensor and
Float8TrainingTensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch.fakes import FakeTensor, is_fake
from megacpp_compile.errors import WrapperError

Splitter = Callable[[Any], tuple[Any, Any]]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclasses.dataclass(frozen=True)
class Split:
    """What a wrapper holds.

    Attributes:
        kind: package and class, "transformer_engine Float8Tensor".
        payload: the wrapper's shape, float8; a view of its memory.
        scale: `value = payload * scale`, of the payload's rank: dimension i has one entry for every `block[i]`
            elements. One number for all is a tensor of one element, to be `expand`ed where a shape is wanted.
        block: elements of each dimension that share a scale.
        logical: the dtype the wrapper reports.
    """

    kind: str
    payload: Tensor
    scale: Tensor
    block: tuple[int, ...]
    logical: torch.dtype

    @property
    def granularity(self) -> str:
        """ "tensor", "rows", or "blocks of 128 x 128"."""
        if self.scale.numel() == 1:
            return "tensor"
        whole = [b == n for b, n in zip(self.block, self.payload.shape, strict=True)]
        if whole[-1] and all(b == 1 for b in self.block[:-1]):
            return "rows"
        return "blocks of " + " x ".join(map(str, self.block))

    def __str__(self) -> str:
        dtype = str(self.payload.dtype).removeprefix("torch.")
        said = str(self.logical).removeprefix("torch.")
        return f"{self.kind}: {dtype}, {self.payload.numel()} bytes, scale of {self.granularity}, says {said}"


class _Problem(Exception):
    """Why a wrapper can't be split; `split` adds which one it is."""


def register(cls: type, split: Splitter) -> None:
    """Add a class of wrappers.

    split: wrapper -> (payload, scale); the payload is float8 and of the wrapper's shape, the scale as in `Split` or
    with one entry for each row.
    """
    _types[cls] = split


def unregister(cls: type) -> None:
    """Remove a class that was registered."""
    _types.pop(cls, None)


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a wrapper that `split` knows."""
    return _entry(value) is not None


def storage_dtype(tensor: Tensor, name: str = "") -> torch.dtype:
    """The dtype of the elements in memory: a wrapper's payload's, or the tensor's. Raises WrapperError as `split`."""
    return split(tensor, name).payload.dtype if is_wrapper(tensor) else tensor.dtype


def split(tensor: Tensor, name: str = "") -> Split:
    """The payload and scale that a wrapper holds. name: for messages.

    Raises WrapperError, which names the tensor, for a class that is not registered, and where payload or scale are
    missing, null pointers, or do not fit each other.
    """
    entry = _entry(tensor)
    if entry is None:
        raise WrapperError(name, type(tensor).__name__, "is no wrapper that is registered")
    cls, splitter = entry
    kind = f"{cls.__module__.split('.')[0]} {cls.__name__}"
    try:
        payload, scale = splitter(tensor)
        payload, scale = _checked(payload, scale, tensor.shape)
    except _Problem as problem:
        raise WrapperError(name, kind, str(problem)) from None
    block = tuple(
        1 if n == m else m if n == 1 else _block(m, n, kind, name)
        for n, m in zip(scale.shape, payload.shape, strict=True)
    )
    return Split(kind, payload, scale, block, tensor.dtype)


def found_in(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Split]]:
    """(name, `Split`) of each wrapper among named values, e.g. `model.named_parameters()`. Raises WrapperError as
    `split`."""
    for name, value in tensors:
        if is_wrapper(value):
            yield name, split(value, name)


# --- the registry

_types: dict[type, Splitter] = {}


def _entry(value: Any) -> tuple[type, Splitter] | None:
    cls = type(value)
    if not issubclass(cls, Tensor) or cls in (Tensor, torch.nn.Parameter, FakeTensor):
        return None
    for base in cls.__mro__:
        known = _types.get(base) or _NAMED.get((base.__module__.split(".")[0], base.__name__))
        if known is not None:
            return base, known
    return None


def _block(size: int, scales: int, kind: str, name: str) -> int:
    for block in (128, 32, 16, 64, 256):
        if -(-size // block) == scales:
            return block
    raise WrapperError(name, kind, f"{scales} scales for {size} elements are no blocks of a known size")


def _checked(payload: Any, scale: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    for what, t in (("payload", payload), ("scale", scale)):
        if t is None:
            raise _Problem(f"has no {what}")
        if torch.compiler.is_compiling():
            continue  # what a frame is traced with has no memory
        if not is_fake(t) and t.device.type != "meta" and t.numel() and t.data_ptr() == 0:
            raise _Problem(f"its {what} is a null pointer")
    if payload.dtype not in FP8:
        raise _Problem(f"its payload is {payload.dtype}, not float8")
    if payload.shape != shape:
        raise _Problem(f"its payload is {tuple(payload.shape)}, and itself {tuple(shape)}")
    if scale.numel() == 1:
        scale = scale.reshape((1,) * payload.dim())
    elif scale.dim() == 1 and payload.dim() == 2 and scale.shape[0] == payload.shape[0]:
        scale = scale.unsqueeze(-1)
    if scale.dim() != payload.dim() or scale.numel() == 0:
        raise _Problem(f"its scale is {tuple(scale.shape)}, for a payload {tuple(payload.shape)}")
    return payload, scale


# --- wrappers known by name


def _as_fp8(raw: Tensor | None, tag: Any) -> Tensor | None:
    """Bytes as what `tag` says they are: a torch dtype, or Transformer Engine's `DType`, whose names end in E4M3 or
    E5M2."""
    if raw is None or raw.dtype in FP8:
        return raw
    if raw.dtype != torch.uint8:
        raise _Problem(f"its payload is {raw.dtype}, not bytes")
    text = str(getattr(tag, "name", tag)).upper()
    dtype = torch.float8_e4m3fn if "E4M3" in text else torch.float8_e5m2 if "E5M2" in text else None
    if dtype is None:
        raise _Problem(f"its fp8 dtype is {tag!r}")
    return raw.view(dtype)


def _te_tensor(t: Any) -> tuple[Any, Any]:
    data = t._data
    transposed = getattr(t, "_transpose", None)
    invalid = getattr(t, "_transpose_invalid", False)
    if data is None and transposed is not None and not invalid and transposed.dim() == 2:
        data = transposed.t()
    return _as_fp8(data, t._fp8_dtype), t._scale_inv


def _te_blocks(t: Any) -> tuple[Any, Any]:
    """Scales of 128 x 128 blocks are [rows, columns], of 1 x 128 blocks [columns, rows]; both padded at the end."""
    data, scale = _as_fp8(t._rowwise_data, t._fp8_dtype), t._rowwise_scale_inv
    if data is None or scale is None:
        return data, scale
    if data.dim() != 2 or scale.dim() != 2:
        raise _Problem(f"blocks of a payload {tuple(data.shape)}")
    rows, columns = data.shape
    if t._is_2D_scaled:
        return data, scale[: -(-rows // 128), : -(-columns // 128)]
    return data, scale[: -(-columns // 128), :rows].t()


def _te_mx(t: Any) -> tuple[Any, Any]:
    """One power of two for 32 elements of a row, [rows, columns / 32], padded."""
    data, scale = _as_fp8(t._rowwise_data, t._fp8_dtype), t._rowwise_scale_inv
    if data is None or scale is None:
        return data, scale
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    rows = data.numel() // data.shape[-1]
    return data, scale[:rows, : -(-data.shape[-1] // 32)].unflatten(0, data.shape[:-1])


_NAMED: dict[tuple[str, str], Splitter] = {
    ("transformer_engine", "Float8Tensor"): _te_tensor,
    ("transformer_engine", "Float8BlockwiseQTensor"): _te_blocks,
    ("transformer_engine", "MXFP8Tensor"): _te_mx,
    ("torchao", "Float8Tensor"): lambda t: (t.qdata, t.scale),
    # Its scale is the factor that quantised the values.
    ("torchao", "Float8TrainingTensor"): lambda t: (t._data, None if t._scale is None else t._scale.reciprocal()),
}
