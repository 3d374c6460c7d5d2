"""The kernel that casts by the scale of the past, against the formula."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings.fp8_linear import reference

from .agreement import DEVICE, OF_KERNELS, rarely
from .test_moe_float8 import rounding_to_nearest

pytestmark = OF_KERNELS

PASTS = {"known": (3.0, 1.0), "none": (0.0, 1e-6), "beyond": (0.5, 1.0)}


def cast(monkeypatch, x, past, transposed, straight=True):
    from megacpp_compile.lowerings._kernels.triton_delayed_cast import delayed_cast

    with rounding_to_nearest(monkeypatch):
        return delayed_cast(x, torch.tensor([past, 9.0], device=x.device), transposed, straight)


@pytest.mark.parametrize("past", ["known", rarely("none"), rarely("beyond")])
@pytest.mark.parametrize("shape", [(64, 128), *map(rarely, ((16, 16), (144, 208), (176, 336)))], ids=str)
def test_is_the_formula(rand, monkeypatch, shape, past):
    """Both orientations have the same bytes; a payload differs where the inverse of the scale crosses a tie."""
    largest, factor = PASTS[past]
    x = rand(*shape, dtype=torch.bfloat16).to(DEVICE) * factor
    payload, columns, scale, seen = cast(monkeypatch, x, largest, True)
    want, _, want_scale, want_seen = reference.fp8_quantize_delayed(
        x, torch.tensor([largest], device=x.device), "e4m3", False
    )
    assert torch.equal(payload.view(torch.uint8).t(), columns.view(torch.uint8))
    assert scale.item() == pytest.approx(want_scale.item(), rel=1e-6) and seen.item() == want_seen.item()
    assert (payload.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 1e-2
    assert (payload.float() - want.float()).norm() <= 1e-2 * want.float().norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_has_no_part_in_the_first_scale(rand, monkeypatch, bad):
    x = rand(16, 16, dtype=torch.float32).to(DEVICE)
    x[3, 5] = bad
    *_, scale, _ = cast(monkeypatch, x, 0.0, False)
    *_, want, _ = reference.fp8_quantize_delayed(x, torch.zeros(1, device=x.device), "e4m3", False)
    assert want.isfinite() and scale.item() == pytest.approx(want.item(), rel=1e-6) and want.item() != 1


def test_rows_alone(rand, monkeypatch):
    """Of a tensor that lies in a wider one, too."""
    x = rand(48, 96, dtype=torch.float32).to(DEVICE)[:, :80]
    payload, columns, *_ = cast(monkeypatch, x, 3.0, False)
    other, *_ = cast(monkeypatch, x.contiguous(), 3.0, True)
    assert columns is None and torch.equal(payload.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("transposed", [False, True], ids=["neither", "columns_alone"])
def test_without_rows(rand, monkeypatch, transposed):
    x = rand(48, 80, dtype=torch.bfloat16).to(DEVICE)
    payload, columns, scale, seen = cast(monkeypatch, x, 3.0, transposed, straight=False)
    _, other, *numbers = cast(monkeypatch, x, 3.0, True)
    assert payload is None and torch.equal(scale, numbers[0]) and torch.equal(seen, numbers[1])
    assert torch.equal(columns.view(torch.uint8), other.view(torch.uint8)) if transposed else columns is None


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter knows no NaN of float8")
def test_overflow_is_seen(rand, monkeypatch):
    """An infinite number becomes NaN in both orientations; a finite one beyond the past is saturated."""
    x = rand(32, 32, dtype=torch.bfloat16).to(DEVICE)
    x[3, 5], x[7, 1], x[9, 9] = float("inf"), float("nan"), 1e4
    payload, columns, scale, seen = cast(monkeypatch, x, 3.0, True)
    wide = payload.float()
    assert wide.isnan().nonzero().tolist() == [[3, 5], [7, 1]] and wide[9, 9] == 448
    assert torch.equal(columns.float().t().isnan(), wide.isnan()) and scale.isfinite() and not seen.isfinite()


def test_rows_that_are_no_fours(rand, monkeypatch):
    """Four are transposed at once: of others all bytes are written, too."""
    from megacpp_compile.lowerings.fp8_linear import cuda_scaled_mm

    x, largest = rand(3, 3, 16, dtype=torch.bfloat16).to(DEVICE), torch.tensor([3.0], device=DEVICE)
    with rounding_to_nearest(monkeypatch):
        payload, columns, *_ = cuda_scaled_mm.fp8_quantize_delayed(x, largest, "e4m3", True)
    assert not columns.float().isnan().any()
    assert torch.equal(columns.view(torch.uint8), payload.view(torch.uint8).flatten(0, 1).t())
