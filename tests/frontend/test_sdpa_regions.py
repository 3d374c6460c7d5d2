"""Attention under `sdpa_kernel`: the kernels that a frame allows are those that are compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacpp_compile import backend, record
from megacpp_compile._torch.attention import current_backends

FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


class Attention(nn.Module):
    """Heads behind RoPE, so that a pass fires in its frame; each attention allows what `regions` say, or anything."""

    def __init__(self, *regions):
        super().__init__()
        self.regions = regions
        self.qkv = nn.ModuleList(nn.Linear(16, 48, bias=False) for _ in regions)

    def forward(self, x, cos, sin):
        for region, qkv in zip(self.regions, self.qkv, strict=True):
            q, k, v = qkv(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
            x = x + self.attend(region, q, k, v).transpose(1, 2).flatten(2)
        return x

    def attend(self, region, q, k, v):
        if region is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(region[0], set_priority=region[1]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs():
    angles = torch.outer(torch.arange(8).float(), torch.tensor([1.0, 0.5, 0.2, 0.1])).repeat(1, 2)
    return torch.randn(2, 8, 16, requires_grad=True), angles.cos(), angles.sin()


def allowed():
    return current_backends(with_priority=True)


def fused(compiled, *args):
    """How many fused kernels run in a call of what is compiled already."""
    compiled(*args)
    with torch.profiler.profile() as seen:
        compiled(*args)
    return [e.name for e in seen.events()].count("aten::_scaled_dot_product_flash_attention_for_cpu")


@pytest.mark.end_to_end
@pytest.mark.parametrize(("regions", "flash"), [
    ([([MATH], False)], 0), ([([FLASH, MATH], True)], 1), ([([MATH], False), None, ([FLASH], True)], 2),
    ([([MATH], True), ([MATH], False)], 0),
], ids=["math", "flash first", "one after the other", "with and without an order"])  # fmt: skip
def test_the_compiled_kernel_is_one_that_is_allowed(no_kernels, regions, flash):
    model, (x, cos, sin), before = Attention(*regions), inputs(), allowed()
    with record() as report:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        out = compiled(x, cos, sin)
    assert report.counts["rope_qk"] == len(regions)
    assert fused(compiled, x, cos, sin) == flash
    torch._dynamo.reset()
    assert fused(torch.compile(model, backend="aot_eager"), x, cos, sin) == flash
    assert allowed() == before
    found = [row["kernel"] for row in report.frames[0].attention]
    assert (found.count("flash"), found.count("unfused")) == (flash, len(regions) - flash)
    wanted = model(x, cos, sin)
    torch.testing.assert_close(out, wanted)
    (mine,), (theirs,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, wanted))
    torch.testing.assert_close(mine, theirs)


def test_without_a_region_the_choice_is_that_around_the_call(no_kernels):
    model, args = Attention(None), inputs()
    with sdpa_kernel([MATH]):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert fused(compiled, *args) == 0
