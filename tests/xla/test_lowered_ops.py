"""What ops become for XLA, by the program itself: fixed shapes, as few products as there can be, no float64."""

from __future__ import annotations

import functools

import pytest
import torch

import megacpp_compile
from benchmarks.xla_programs import instructions
from megacpp_compile.lowerings.moe import reference as experts
from megacpp_compile.lowerings.moe import tpu_xla as blocks
from megacpp_compile.lowerings.ssd_scan import reference as scan
from megacpp_compile.lowerings.ssd_scan import tpu_xla as paired

TOKENS, WIDTH, HIDDEN, CHOICES = 24, 12, 20, 2


def program(tensors):
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def moe_step(module, device, count, skewed=False):
    """Outputs and gradients of forward and backward; with `skewed` every token goes to experts 0 and 1, or to none."""
    rand = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, grad, gates = rand(TOKENS, WIDTH), rand(TOKENS, WIDTH), rand(TOKENS, CHOICES)
    indices = rand(TOKENS, count).topk(CHOICES).indices
    if skewed:
        indices = torch.arange(CHOICES).repeat(TOKENS, 1)
        indices[::5] = -1
    up, gate, down = rand(count, HIDDEN, WIDTH), rand(count, HIDDEN, WIDTH), rand(count, WIDTH, HIDDEN)
    x, grad, gates, indices, up, gate, down = (t.to(device) for t in (x, grad, gates, indices, up, gate, down))
    y, hidden, order, offsets = module.moe(x, indices, gates, [gate], [up], [down], "silu", "pair", x.dtype)
    return y, *module.moe_backward(grad, x, gates, [gate], [up], [down], hidden, order, offsets, "silu", "pair")


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_experts(xla, skewed):
    for got, want in zip(
        moe_step(blocks, xla, 5, skewed), moe_step(experts, "cpu", 5, skewed), strict=True
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)


def test_experts_take_as_many_products_however_many_there_are(xla):
    few, many = (instructions(program(moe_step(blocks, xla, count))) for count in (3, 9))
    assert few["dot"] == many["dot"] == 9  # three forward, six backward


def test_rows_of_experts_are_few_more_than_there_are(xla):
    """Not every row by every expert: less than a block an expert on top, wherever the rows go."""
    for slots, count in ((4096, 8), (4096, 64), (98304, 64), (7, 5), (3, 64)):
        rows = blocks.block_rows(slots, count)
        padded = (slots + count * (rows - 1)) // rows * rows
        assert padded <= slots + count * (rows - 1) <= 3 * slots
        assert rows <= max(1, 2 * slots // count)


def test_a_capacity_has_fixed_shapes(xla):
    indices = torch.randn(TOKENS, 5, generator=torch.Generator().manual_seed(0)).topk(CHOICES).indices
    found = megacpp_compile.equal_split(indices.to(xla), 5, factor=0.5)
    assert "<=" not in program(found)  # how XLA writes a size that is not known
    want = megacpp_compile.equal_split(indices, 5, factor=0.5)
    assert want[1].sum() > 0
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got.cpu(), expected)


def scan_step(module, device):
    rand = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    b, t, h, p, g, n = 2, 40, 4, 6, 2, 5
    x, dt, a = rand(b, t, h, p), rand(b, t, h).exp(), -rand(h).exp()
    args = [v.to(device) for v in (x, dt, a, rand(b, t, g, n), rand(b, t, g, n), rand(h))]
    y, final, states = module.ssd_scan(*args, None, 16, torch.float32)
    dy, dfinal = (rand(*v.shape).to(device) for v in (y, final))
    return y, final, *module.ssd_scan_backward(dy, dfinal, *args, None, states, 16)[:-1]


def test_scan(xla):
    got = scan_step(paired, xla)
    assert "f64" not in program(got)
    for one, want in zip(got, scan_step(scan, "cpu"), strict=True):
        assert (one.cpu() - want).norm() / want.norm() < 1e-5
