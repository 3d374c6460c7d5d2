"""`repeated_blocks="auto"`: frames are cut where that spares much and loses no site, and the report says why or why not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megacpp_compile import record
from megacpp_compile.frontend import worth_cutting
from tests.backends.test_stitched import blocks, compiled, step, why_whole
from tests.frontend.test_repeated_blocks import Layer, Norm, Stack, ids


def reported(model, *args, **options):
    """The report of `model` beside eager, over a step."""
    eager = copy.deepcopy(model)
    with record() as report:
        call = compiled(model, {"repeated_blocks": "auto", **options})
        for a, b in zip(step(call, model, *args), step(eager, eager, *args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return report


def stack(count):
    torch.manual_seed(2)
    return Stack([Layer(i, scale=0.1) for i in range(count)])


@pytest.fixture
def spared(monkeypatch):
    """A third of the calls suffices: half as many blocks would be cut if nothing stood against it."""
    monkeypatch.setattr(worth_cutting, "SPARED", worth_cutting.SPARED // 3)


def test_many_equal_blocks_are_cut(no_kernels):
    report = reported(stack(16), ids())
    assert blocks(report) == [("layers.0", 16)]
    (region,) = report.regions
    assert region.reason.startswith("compiled once, called 16 times (auto: ")
    assert region.reason.endswith(" calls to compile)")


@pytest.mark.parametrize("count", [3, 7, 8])
def test_where_little_is_spared_nothing_is_said(no_kernels, count):
    report = reported(stack(count), ids())
    assert not report.regions and len(report.frames) == 1 and not blocks(report)


def test_what_stands_against_it_is_said(no_kernels, spared):
    assert "verify" in why_whole(reported(stack(8), ids(), verify="each"))
    torch._dynamo.reset()
    assert "'sharding' and 'policy.peak_gib'" in why_whole(reported(stack(8), ids(), policy={"peak_gib": 4.0}))


def test_blocks_that_hand_on_much_are_one_graph(no_kernels, spared, monkeypatch):
    monkeypatch.setattr(worth_cutting, "HANDED_ON", 0.01)
    assert "of what they make" in why_whole(reported(stack(8), ids()))


class Overlapping(nn.Module):
    """Ends with the narrow side of down, norm and up, whose wide side is the next one's."""

    def __init__(self, number=0, dim=12, rank=6):
        super().__init__()
        self.up, self.down = nn.Linear(rank, dim, bias=False), nn.Linear(dim, rank, bias=False)
        self.narrow, self.wide = Norm(rank), Norm(dim)

    def forward(self, narrow, table):
        x = self.up(narrow)
        for _ in range(4):
            x = x + 0.1 * torch.tanh(self.wide(x))
        return self.narrow(self.down(x))


def test_sites_across_blocks_keep_a_frame_whole(no_kernels, spared):
    torch.manual_seed(2)
    model = Stack([Overlapping() for _ in range(8)], dim=6)
    report = reported(model, ids())
    assert why_whole(report) == "as one: down_norm_up fires across blocks"
    assert report.counts["down_norm_up"] == 7 and len(report.frames) == 1
