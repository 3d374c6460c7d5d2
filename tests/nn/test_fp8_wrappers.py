"""What wrapper tensors hold, by class and by name, and what is said of those that hold nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megacpp_compile.errors import WrapperError
from megacpp_compile.nn import fp8_wrappers
from megacpp_compile.nn.fp8_wrappers import found_in, is_wrapper, split, storage_dtype
from tests.precision.wrapped import DType, MXFP8Tensor, Wrapper, imitation, te_blocks, te_tensor, torchao_tensor


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tensor_of_transformer_engine(dtype):
    values = torch.randn(6, 8)
    weight = te_tensor(values, dtype)
    assert (weight.dtype, weight.data_ptr()) == (torch.bfloat16, 0)
    held = split(weight, "w")
    assert held.payload.dtype == storage_dtype(weight) == dtype
    assert held.payload.data_ptr() == weight._data.data_ptr() and held.scale.data_ptr() == weight._scale_inv.data_ptr()
    assert (held.granularity, held.logical, held.scale.shape) == ("tensor", torch.bfloat16, (1, 1))
    assert torch.allclose(held.payload.float() * held.scale, values, rtol=0.15, atol=1e-2)
    assert str(held).startswith("transformer_engine Float8Tensor: float8_e") and "48 bytes, scale of tensor" in str(held)


def test_only_its_transpose():
    weight = te_tensor(torch.randn(6, 8))
    want = weight._data
    weight._transpose, weight._transpose_invalid, weight._data = want.t().contiguous(), False, None
    assert torch.equal(split(weight).payload.view(torch.uint8), want)
    weight._transpose_invalid = True
    with pytest.raises(WrapperError, match="has no payload"):
        split(weight, "w")


@pytest.mark.parametrize("square", [True, False], ids=["128x128", "1x128"])
def test_blocks_of_transformer_engine(square):
    """Padding is cut off and scales are turned, both as views."""
    weight, payload, scale = te_blocks(torch.randn(130, 200), square)
    held = split(weight)
    assert torch.equal(held.payload.view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(held.scale, scale if square else scale.t())
    assert held.scale.untyped_storage().data_ptr() == weight._rowwise_scale_inv.untyped_storage().data_ptr()
    assert held.block == ((128, 128) if square else (1, 128))
    assert held.granularity == ("blocks of 128 x 128" if square else "blocks of 1 x 128")


def test_mx_blocks_of_transformer_engine():
    bits = torch.randint(120, 130, (128, 4), dtype=torch.uint8)
    payload = torch.randn(5, 70).to(torch.float8_e4m3fn)
    weight = MXFP8Tensor((5, 70), _rowwise_data=payload.view(torch.uint8), _rowwise_scale_inv=bits, _fp8_dtype=DType.kFloat8E4M3)
    held = split(weight)
    assert held.block == (1, 32) and held.scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(held.scale.float(), 2.0 ** (bits[:5, :3].float() - 127))


@pytest.mark.parametrize("per", ["row", "tensor"])
def test_a_tensor_of_torchao(per):
    values = torch.randn(16, 32, dtype=torch.bfloat16)
    weight = torchao_tensor(values, per)
    held = split(weight, "w")
    assert held.kind == "torchao Float8Tensor" and held.granularity == ("rows" if per == "row" else "tensor")
    assert torch.equal((held.payload.float() * held.scale.float()).bfloat16(), weight.dequantize())


def test_a_training_tensor_of_torchao():
    made = imitation("Float8TrainingTensor", "torchao.float8.float8_training_tensor")
    payload = torch.randn(4, 8).to(torch.float8_e4m3fn)
    weight = made((4, 8), _data=payload, _scale=torch.tensor(4.0))
    assert split(weight).scale.item() == 0.25


class Own(Wrapper):
    pass


def test_a_class_of_the_users():
    weight = Own((4, 8), bits=torch.randint(0, 255, (4, 8), dtype=torch.uint8), rows=torch.ones(4))
    assert not is_wrapper(weight)
    with pytest.raises(WrapperError, match="is no wrapper that is registered"):
        split(weight)
    fp8_wrappers.register(Own, lambda t: (t.bits.view(torch.float8_e5m2), t.rows))
    try:
        assert split(weight).granularity == "rows" and storage_dtype(weight) == torch.float8_e5m2
        assert [name for name, _ in found_in([("a", weight), ("b", torch.ones(2)), ("c", 3)])] == ["a"]
    finally:
        fp8_wrappers.unregister(Own)
    assert not is_wrapper(weight)


def test_what_is_no_wrapper():
    for plain in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to(torch.float8_e4m3fn), 3, None,
                  imitation("Float8Tensor", "someone_else")((2,))):  # fmt: skip
        assert not is_wrapper(plain)
    assert storage_dtype(torch.ones(2, dtype=torch.bfloat16)) == torch.bfloat16


class NullTensor(torch.Tensor):
    """Elements, and nowhere to find them."""

    def data_ptr(self):
        return 0


@pytest.mark.parametrize(("held", "words"), [
    ({"_data": None}, "has no payload"), ({"_scale_inv": None}, "has no scale"),
    ({"_scale_inv": torch.ones(0)}, "scale is"),
    ({"_scale_inv": torch.ones(3)}, "its scale is (3,), for a payload (6, 8)"),
    ({"_data": torch.empty(0, dtype=torch.uint8)}, "its payload is (0,), and itself (6, 8)"),
    ({"_data": torch.ones(6, 8)}, "torch.float32, not bytes"),
    ({"_data": torch.ones(6, 8, dtype=torch.uint8).view(torch.float8_e4m3fn).as_subclass(NullTensor)}, "null pointer"),
    ({"_fp8_dtype": "fp4"}, "fp8 dtype is 'fp4'"),
], ids=str)
def test_a_wrapper_without_what_it_should_hold_is_named(held, words):
    weight = te_tensor(torch.randn(6, 8))
    for name, value in held.items():
        setattr(weight, name, value)
    with pytest.raises(WrapperError) as caught:
        split(weight, "layers.3.q_proj.weight")
    assert words in str(caught.value)
    assert str(caught.value).startswith("layers.3.q_proj.weight (transformer_engine Float8Tensor)")


@pytest.mark.end_to_end
def test_loads_neither_package():
    code = "import sys, megacpp_compile.nn.fp8_wrappers, megacpp_compile.precision.sentinel\n"
    code += "print([n for n in ('torchao', 'transformer_engine', 'triton') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_old_module_forwards_with_a_warning():
    from megacpp_compile.precision import wrappers

    with pytest.warns(FutureWarning, match="is now megacpp_compile.nn.fp8_wrappers.split"):
        assert wrappers.split is split
    with pytest.raises(AttributeError):
        wrappers.no_such_name  # noqa: B018
