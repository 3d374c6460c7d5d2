"""`megacpp::linear_fp8_weight`: registration, what it computes and how far off that is, its gradients."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings._gemm import block_scaled
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.lowerings.linear_fp8_weight import cuda_triton, linear_fp8_weight, reference

from . import addresses, relative_error, saved_by
from .cases import CASES
from .fp8_cases import block_scaled_as_torch_has_it, operands

assert semantic_ops()


def weight_of(payload, scale):
    for dim, size in enumerate(payload.shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return payload.double() * scale


@pytest.mark.parametrize("label", ["tensor", "rows", "blocks", "blocks_of_rows", "flat"])
def test_is_the_linear_up_to_the_rounding_of_x(rand, label):
    """x and the output's gradient keep 4 bits, and the weight all it has."""
    x, payload, scale, bias, dtype = CASES["linear_fp8_weight"][label](rand, torch.float64)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    got = linear_fp8_weight(x, payload, scale, bias, dtype)
    want = torch.nn.functional.linear(x, weight_of(payload, scale), bias)
    assert 1e-4 < relative_error(got, want) < 4e-2
    seed = rand(*got.shape)
    for a, b, bound in zip(*(torch.autograd.grad(y, (x, bias), seed) for y in (got, want)), (4e-2, 1e-12), strict=True):
        assert relative_error(a, b) < bound


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_exact_where_nothing_is_rounded(rand, per):
    """Numbers that e4m3 has, and whose largest is its largest."""
    _, payload, scale, _, _ = operands(rand, torch.float64, per=per)
    x = torch.tensor([448.0, -2, 0, 1, 16, 0.5, 3, -7]).double().repeat(5, 4).requires_grad_()
    got = linear_fp8_weight(x, payload, scale, None, torch.float64)
    assert relative_error(got, x @ weight_of(payload, scale).t()) < 1e-12
    seed = torch.tensor([448.0, -2, 0, 1, 16, 0.5]).double().repeat(5, 8) / scale.double().t()
    (d_x,) = torch.autograd.grad(got, x, seed)
    assert relative_error(d_x, seed @ weight_of(payload, scale)) < 1e-12


def test_keeps_the_payload_alone(rand):
    x, payload, scale, bias, dtype = operands(rand, torch.float32)
    kept = saved_by(lambda: linear_fp8_weight(x.requires_grad_(), payload, scale, bias, dtype))
    assert kept == addresses(payload, scale)


def test_block_scales_on_hopper(rand, monkeypatch):
    """The forward's GEMM takes the payload as it lies; what it can't take, and backward, is the reference's."""
    monkeypatch.setattr(cuda_triton, "no_block_scales", lambda device: "")
    monkeypatch.setattr(block_scaled.torch, "_scaled_mm", block_scaled_as_torch_has_it)
    args = operands(rand, torch.bfloat16, outer=(2, 16), n=256, k=384, per="block")
    assert cuda_triton.supports("linear_fp8_weight", args) is None
    got, want = cuda_triton.linear_fp8_weight(*args), reference.linear_fp8_weight(*args)
    assert got.dtype == want.dtype and relative_error(got, want) < 2**-8
    for changed, words in (({"outer": (3,)}, "3 rows"), ({"n": 144}, "weight (144, 384)")):
        other = operands(rand, torch.bfloat16, **{"outer": (2, 16), "n": 256, "k": 384, "per": "block", **changed})
        assert words in cuda_triton.supports("linear_fp8_weight", other)
    assert "backward" in cuda_triton.supports("linear_fp8_weight_backward", (got, *args[1:3], torch.bfloat16))


def test_operands_that_mean_nothing(rand):
    x, payload, scale, bias, dtype = operands(rand, torch.float32)
    for wrong, words in (((x[..., :3], payload, scale), "x is (2, 5, 3)"),
                         ((x, payload.view(torch.uint8), scale), "torch.uint8"),
                         ((x, payload, scale.view(1)), "scale is (1,)")):
        with pytest.raises(OperandError) as caught:
            linear_fp8_weight(*wrong, bias, dtype)
        assert words in str(caught.value)


def test_what_fp8_gemms_do_not_serve(rand):
    op = torch.ops.megacpp.linear_fp8_weight.default
    for label, dtype, why in (("blocks", torch.float32, "128 x 128"), ("odd_sizes", torch.float32, "multiples of 16"),
                              ("tensor", torch.float64, "float64"), ("rows", torch.float32, "bfloat16")):  # fmt: skip
        choice = choose(op, "cuda", CASES["linear_fp8_weight"][label](rand, dtype))
        assert choice.effective == "reference" and why in choice.reason
    assert choose(op, "cuda", CASES["linear_fp8_weight"]["rows"](rand, torch.bfloat16)).effective == "cuda_triton"
