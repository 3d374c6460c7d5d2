"""`megacpp::fp8_linear` and `fp8_quantize`: registration, the formats, gradients, what is kept."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings.fp8_linear import cuda_scaled_mm, fp8_linear, fp8_linear_backward, fp8_quantize
from megacpp_compile.passes.linear import GRADIENT

from . import relative_error, saved_by
from .cases import CASES

# Half a unit in the last of 3 and 2 bits of mantissa, at most.
ROUNDING = {"e4m3": 2**-4, "e5m2": 2**-3}


@pytest.mark.parametrize("format", ROUNDING)
def test_quantize(rand, format):
    x = rand(7, 33, dtype=torch.float32) * 3e-3
    payload, scale_inv = fp8_quantize(x, format)
    assert payload.float().abs().max() == torch.finfo(payload.dtype).max
    exact = x.double() / scale_inv.double()
    smallest = torch.finfo(payload.dtype).tiny
    assert ((payload.double() - exact).abs() <= ROUNDING[format] * exact.abs() + smallest * ROUNDING[format]).all()


def test_quantize_zeros_and_extremes():
    for x in (torch.zeros(4, 16), torch.full((4, 16), 3e38), torch.full((4, 16), 1e-38)):
        payload, scale_inv = fp8_quantize(x, "e4m3")
        assert payload.float().isfinite().all() and scale_inv.isfinite() and scale_inv > 0
        assert relative_error(payload.double() * scale_inv.double(), x.double()) < 2**-3


def operands(rand, outer=(3, 16), k=64, n=48, bias=True, grad_format="e4m3"):
    x, w = (rand(*shape, k, dtype=torch.bfloat16, grad=True) for shape in (outer, (n,)))
    b = [rand(n, dtype=torch.bfloat16, grad=True)] if bias else []
    with torch.no_grad():
        return x, [w], *fp8_quantize(x, "e4m3"), *fp8_quantize(w, "e4m3"), b, grad_format, torch.bfloat16


def widened(payload, scale_inv):
    return payload.double() * scale_inv.double()


@pytest.mark.parametrize(("bias", "grad_format"), [(True, "e4m3"), (False, "e4m3"), (False, "e5m2")])
def test_is_the_formula(rand, bias, grad_format):
    x, (w,), x8, sx, w8, sw, b, *rest = operands(rand, bias=bias, grad_format=grad_format)
    (y,) = fp8_linear(x, [w], x8, sx, w8, sw, b, *rest)
    grad = rand(*y.shape, dtype=torch.bfloat16)
    got = [y, *torch.autograd.grad(y, [x, w, *b], grad)]
    wx, ww, wg = widened(x8, sx), widened(w8, sw), widened(*fp8_quantize(grad, grad_format))
    want = [wx @ ww.t() + (b[0].double() if bias else 0), wg @ ww, wg.flatten(0, -2).t() @ wx.flatten(0, -2)]
    want += [grad.double().flatten(0, -2).sum(0)] if bias else []
    assert [t.dtype for t in got] == [torch.bfloat16] * len(got)
    assert max(relative_error(g, wide) for g, wide in zip(got, want, strict=True)) < 2**-8


def test_near_the_linear_it_replaces(rand):
    """Within what three bits of mantissa cost: two operands of each GEMM, rounded by 2.7 % or so."""
    x, (w,), *quantised = operands(rand, outer=(64,), k=256, n=128, bias=False)
    grad = rand(64, 128, dtype=torch.bfloat16)
    (y,) = fp8_linear(x, [w], *quantised)
    got = [y, *torch.autograd.grad(y, [x, w], grad)]
    plain = torch.nn.functional.linear(x.double(), w.double())
    want = [plain, *torch.autograd.grad(plain, [x, w], grad.double())]
    assert max(map(relative_error, got, want)) < 0.05


@pytest.mark.parametrize("freedom", [3, None])
def test_gradients_are_nearer_than_in_e5m2(rand, freedom):
    """Why the recipe rounds them to e4m3: scaled by their largest they need no more range, and have a bit more of
    mantissa. Of Student's t distribution, where the largest is 13 to 130 times the root of their mean square, and of the
    normal one, where it is 4. The errors are 0.64 of what they would be (0.60 to 0.71 in 400 draws)."""
    x, (w,), *quantised, _, dtype = operands(rand, outer=(256,), k=64, n=128, bias=False)
    grad = rand(256, 128)
    if freedom is not None:
        grad = grad / rand(freedom, 256, 128).square().mean(0).sqrt()
    want = [grad @ w.double(), grad.t() @ x.double()]
    errors = {}
    for format in (GRADIENT, "e5m2"):
        (y,) = fp8_linear(x, [w], *quantised, format, dtype)
        errors[format] = [*map(relative_error, torch.autograd.grad(y, [x, w], grad.bfloat16()), want)]
    near, far = errors.values()
    assert all(a < 0.8 * b for a, b in zip(near, far, strict=True)), errors


def test_saved_for_backward(rand):
    """The payload of x, a byte an element, and two scales; not x. The weight is alive anyway."""
    args = operands(rand, outer=(64,), k=256, n=128, bias=False)
    x, (w,), x8, x_scale, w8, w_scale, *_ = args
    assert saved_by(fp8_linear, *args) == {t.untyped_storage().data_ptr() for t in (w, x8, x_scale, w_scale)}
    assert x8.element_size() == 1 and x_scale.numel() == w_scale.numel() == 1


@pytest.mark.parametrize("biased", [True, False])
def test_linears_that_share_an_input(rand, biased):
    x, (w,), *quantised, b, grad_format, dtype = operands(rand, n=64, bias=biased)
    parts = [t.detach().clone().requires_grad_() for t in w.split([48, 16])]
    biases = [t.detach().clone().requires_grad_() for t in b[0].split([48, 16])] if biased else []
    got = fp8_linear(x, parts, *quantised, biases, grad_format, dtype)
    (want,) = fp8_linear(x, [w], *quantised, b, grad_format, dtype)
    assert all(y.is_contiguous() for y in got) and torch.equal(torch.cat(got, -1), want)
    grad = rand(*want.shape, dtype=torch.bfloat16)
    x_grad, *of_parts = torch.autograd.grad(got, [x, *parts, *biases], list(grad.split([48, 16], -1)))
    x_want, *of_whole = torch.autograd.grad(want, [x, w, *b], grad)
    assert torch.equal(x_grad, x_want)
    halves = [torch.cat(of_parts[i : i + 2]) for i in range(0, len(of_parts), 2)]
    assert all(map(torch.equal, halves, of_whole))


def test_a_linear_without_a_loss_has_no_gradient(rand):
    x, (w,), *rest = operands(rand, n=64, bias=False)
    parts = [t.detach().clone().requires_grad_() for t in w.split([48, 16])]
    first, _ = fp8_linear(x, parts, *rest)
    first.float().square().sum().backward()
    assert parts[1].grad is None and parts[0].grad.abs().sum() > 0


@pytest.mark.parametrize("lowering", [fp8_linear_backward, cuda_scaled_mm.fp8_linear_backward], ids=["op", "cuda"])
def test_weights_gradients_in_float32(rand, lowering):
    """What the GEMM has summed, which without is rounded to the weights' dtype; all else to the bit. A CPU's
    `torch._scaled_mm` computes for cuBLASLt, and what casts to e5m2 is ATen."""
    x, weights, x8, sx, _, sw, _, format, dtype = operands(rand, bias=False)
    format = format if lowering is fp8_linear_backward else "e5m2"
    grad = rand(*x.shape[:-1], 48, dtype=torch.bfloat16)
    with torch.no_grad():
        args = [grad], x8, sx, weights, sw, format, dtype, None, False
        (dx, narrow, seen), (wide_dx, wide, wide_seen) = lowering(*args), lowering(*args, torch.float32)
        want = widened(*fp8_quantize(grad, format)).flatten(0, -2).t() @ widened(x8, sx).flatten(0, -2)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(wide.bfloat16(), narrow) and torch.equal(dx, wide_dx) and torch.equal(seen, wide_seen)
    assert relative_error(wide, want) < 1e-6 < 1e-3 < relative_error(narrow, want)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="there from torch 2.10 on")
def test_a_leaf_has_its_gradient_as_the_gemm_writes_it(rand):
    for asked in (None, torch.float32):
        x, (w,), *quantised = operands(rand, bias=False)
        w.grad_dtype = torch.float32
        (y,) = fp8_linear(x, [w], *quantised, None, None, None, asked)
        y.float().square().sum().backward()
        assert w.grad.dtype == torch.float32
        assert torch.equal(w.grad, w.grad.bfloat16().float()) == (asked is None)


@pytest.mark.parametrize("label", CASES["fp8_linear"])
def test_the_device_that_is_asked_is_the_operands(rand, label):
    """Which of the arguments are tensors and which lists differs between forward and backward."""
    for name in ("fp8_linear", "fp8_linear_backward"):
        args = CASES[name][label](rand, torch.bfloat16)
        assert cuda_scaled_mm.supports(name, args) == "cpu has no float8 GEMMs"


def test_no_rows(rand):
    """Cast without a kernel, which would have nothing to do: the scale is 1."""
    x = rand(2, 0, 32)
    casts = (cuda_scaled_mm.fp8_quantize_transposed(x, "e4m3"),
             cuda_scaled_mm.fp8_quantize_delayed(x, torch.zeros(1), "e4m3", True)[:3])
    for payload, columns, scale in casts:
        assert (payload.shape, columns.shape, scale.item()) == (x.shape, (32, 0), 1)
