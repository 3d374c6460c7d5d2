"""Wrapper tensors with the traits of the real ones, whose packages need not be there."""

from __future__ import annotations

import enum
import importlib.util

import pytest
import torch
from torch.utils._pytree import tree_map_only

from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8


class DType(enum.Enum):
    """As Transformer Engine's."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Wrapper(torch.Tensor):
    """Says bfloat16, has no memory of its own, and widens itself for whatever op it is given to."""

    def __new__(cls, shape, **held):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        for name, value in held.items():
            setattr(made, name, value)
        return made

    def dequantize(self):
        from megacpp_compile.nn import fp8_wrappers

        held = fp8_wrappers.split(self)
        scale = held.scale.float()
        for dim, block in enumerate(held.block):
            if scale.shape[dim] not in (1, held.payload.shape[dim]):
                scale = scale.repeat_interleave(block, dim).narrow(dim, 0, held.payload.shape[dim])
        return (held.payload.float() * scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(Wrapper, lambda t: t.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):  # a tensor's would read it
        return type(self).__name__


def imitation(name, package="transformer_engine.pytorch.tensor"):
    return type(name, (Wrapper,), {"__module__": package})


Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor = map(
    imitation, ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor")
)


def te_tensor(values, dtype=torch.float8_e4m3fn):
    payload, scale = round_to_fp8(values.float(), dtype, whole=True)
    tag = DType.kFloat8E4M3 if dtype == torch.float8_e4m3fn else DType.kFloat8E5M2
    return Float8Tensor(values.shape, _data=payload.view(torch.uint8), _scale_inv=scale.view(1), _fp8_dtype=tag,
                        _transpose=None, _transpose_invalid=True)  # fmt: skip


def te_blocks(values, square):
    """Scales padded to multiples of four, as Transformer Engine's GEMM wants them."""
    rows, lanes = values.shape
    tiles = -(-rows // 128), -(-lanes // 128)
    scale = torch.rand(*tiles) / 100 + 0.01 if square else torch.rand(tiles[1], rows) / 100 + 0.01
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4), value=float("nan"))
    payload = (values.float() * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    made = Float8BlockwiseQTensor(values.shape, _rowwise_data=payload.view(torch.uint8), _rowwise_scale_inv=padded,
                                  _fp8_dtype=DType.kFloat8E4M3, _is_2D_scaled=square)  # fmt: skip
    return made, payload, scale


def torchao_tensor(values, per="row"):
    """The real one."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    from torchao.quantization import Float8Tensor, PerRow, PerTensor

    return Float8Tensor.from_hp(values, granularity=PerRow() if per == "row" else PerTensor())
