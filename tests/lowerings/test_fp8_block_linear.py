"""`megacpp::fp8_block_linear`: registration, tiles, gradients, what is kept, and the operands cuBLASLt is given."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megacpp_compile.lowerings._gemm import block_scaled
from megacpp_compile.lowerings.fp8_block_linear import (
    cuda_scaled_mm,
    fp8_block_linear,
    fp8_quantize_tiles,
    reference,
)

from . import relative_error, saved_by
from .fp8_cases import block_scaled_as_torch_has_it

E4M3 = torch.float8_e4m3fn


def blocks(x, rows, channels):
    """Each tile's own (slice, largest magnitude), one after the other."""
    for r in range(0, x.shape[0], rows):
        for k in range(0, x.shape[1], channels):
            yield (slice(r, r + rows), slice(k, k + channels)), x[r : r + rows, k : k + channels].abs().max()


def widened(x, rows, channels):
    """What x becomes, tile by tile in float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for where, largest in blocks(x.float(), rows, channels):
        scale = (largest / 448).double() if largest else torch.tensor(1.0, dtype=torch.float64)
        out[where] = (x[where].float() / scale.float()).to(E4M3).double() * scale
    return out


@pytest.mark.parametrize("rows", [1, 128])
def test_quantize(rand, rows):
    x = rand(200, 300, dtype=torch.float32) * torch.logspace(-20, 20, 300)
    x[:128, :128] = 0
    payload, scale = fp8_quantize_tiles(x, rows)
    assert scale.shape == (-(-200 // rows), 3) and payload.shape == x.shape and payload.dtype == E4M3
    for number, (where, largest) in enumerate(blocks(x, rows, 128)):
        own = scale.flatten()[number]
        assert payload[where].float().abs().max() == (448 if largest else 0)
        assert own == (largest / 448 if largest else 1)


def operands(rand, outer=(2, 128), k=256, n=384, bias=True):
    x, w = (rand(*shape, k, dtype=torch.bfloat16, grad=True) for shape in (outer, (n,)))
    b = rand(n, dtype=torch.bfloat16, grad=True) if bias else None
    with torch.no_grad():
        return x, w, *fp8_quantize_tiles(x, 1), *fp8_quantize_tiles(w, 128), b, torch.bfloat16


@pytest.mark.parametrize("sizes", [{}, {"outer": (3, 50), "k": 200, "n": 72, "bias": False}], ids=["whole", "ragged"])
def test_is_the_formula(rand, sizes):
    x, w, *quantised, b, dtype = operands(rand, **sizes)
    y = fp8_block_linear(x, w, *quantised, b, dtype)
    grad = rand(*y.shape, dtype=torch.bfloat16)
    got = [y, *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], grad)]
    rows, weight, g = widened(x.detach().flatten(0, -2), 1, 128), widened(w.detach(), 128, 128), grad.flatten(0, -2)
    want = [rows @ weight.t() + (b.detach().double() if b is not None else 0), widened(g, 1, 128) @ weight,
            widened(g, 128, 1).t() @ widened(rows, 128, 1)]
    want = [want[0].view_as(y), want[1].view_as(x), want[2], *([g.double().sum(0)] if b is not None else [])]
    errors = [relative_error(a, wide) for a, wide in zip(got, want, strict=True)]
    assert [t.dtype for t in got] == [torch.bfloat16] * len(got)
    # x is rounded twice for the weight's gradient, and a second rounding may fall to the other side of a tie.
    assert max(errors) < 2**-8, errors


def test_follows_what_one_scale_cannot(rand):
    """A channel a thousand times larger than the others costs its own block's accuracy alone."""
    x = rand(128, 512, dtype=torch.float32)
    x[:, 0] *= 1e5
    payload, scale = fp8_quantize_tiles(x, 1)
    near = relative_error(reference.widened_by_tiles(payload, scale, 1, 128, torch.float32)[:, 128:], x[:, 128:])
    assert near < 0.03
    whole = (x / (x.abs().max() / 448)).to(E4M3).float() * (x.abs().max() / 448)
    assert relative_error(whole[:, 128:], x[:, 128:]) > 5 * near


def test_saved_for_backward(rand):
    """The payload of x, a byte an element, and scales; not x. The weight is alive anyway."""
    args = operands(rand, bias=False)
    _, w, x8, x_scale, _, w_scale, *_ = args
    assert saved_by(fp8_block_linear, *args) == {t.untyped_storage().data_ptr() for t in (w, x8, x_scale, w_scale)}
    assert x8.element_size() == 1 and x_scale.numel() * 128 == x8.numel()


@pytest.mark.parametrize("k, n, wide", [(512, 256, False), (256, 512, True), (384, 128, False)])
def test_operands_of_the_gemms(rand, monkeypatch, k, n, wide):
    monkeypatch.setattr(block_scaled.torch, "_scaled_mm", block_scaled_as_torch_has_it)
    args = operands(rand, k=k, n=n)
    with torch.no_grad():
        got = [cuda_scaled_mm.fp8_block_linear(*args)]
        want = [reference.fp8_block_linear(*args)]
        x, w, x8, x_scale, _, w_scale, *_ = args
        back = rand(*x.shape[:-1], n, dtype=torch.bfloat16), x8, x_scale, w, w_scale, x.dtype
        back += (torch.float32,) if wide else ()
        got += cuda_scaled_mm.fp8_block_linear_backward(*back)
        want += reference.fp8_block_linear_backward(*back)
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]
    assert max(map(relative_error, got, want)) < 2**-8
    assert got[2].dtype == (torch.float32 if wide else torch.bfloat16)
    assert not wide or relative_error(got[2], want[2]) < 1e-6


def test_products_are_tried_before_they_are_used(monkeypatch):
    """Where torch has them, and right; where it refuses; where they come out otherwise. Under fake tensors, too, as the
    question is asked while a graph is compiled."""
    device, taken = torch.device("cpu"), block_scaled_as_torch_has_it

    def refuses(*args, **kwargs):
        raise RuntimeError("no such scales\nand more")

    for product, said in ((taken, ""), (refuses, "no such scales"), (lambda *a, **k: 2 * taken(*a, **k), "wrong")):
        monkeypatch.setattr(block_scaled.torch, "_scaled_mm", product)
        block_scaled.failing.cache_clear()
        with FakeTensorMode():
            found = block_scaled.failing(device)
        assert said in found and bool(said) == bool(found) and "more" not in found
    block_scaled.failing.cache_clear()


def test_what_the_lowering_takes(monkeypatch):
    assert "cpu has no float8" in cuda_scaled_mm.supports("fp8_quantize_tiles", (torch.ones(2, 2), 1))
    monkeypatch.setattr(cuda_scaled_mm, "no_block_scales", lambda device: "")
    x8, w = torch.empty(128, 200, device="meta"), torch.empty(256, 200, device="meta")
    assert "multiples of 128" in cuda_scaled_mm.supports("fp8_block_linear", (x8, w, x8, None, None, None, None, x8.dtype))


@pytest.mark.parametrize("capability, cuda, said", [((8, 9), "13.0", "Hopper"), ((10, 0), "13.0", "Hopper"), ((9, 0), "12.8", "12.9"), ((9, 0), "13.0", ""), ((9, 0), "12.10", "")])  # fmt: skip
def test_which_devices_have_block_scales(monkeypatch, capability, cuda, said):
    from megacpp_compile.lowerings._gemm import float8_support

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(block_scaled, "failing", lambda device: "")
    found = float8_support.no_block_scales(torch.device("cuda"))
    assert said in found and bool(said) == bool(found)
