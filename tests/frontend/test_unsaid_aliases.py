"""Results that are their input, or a view of it, unsaid, and are written to: whoever reads the input sees the write where
eager does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames import check


class Written(nn.Module):
    """A latent behind functions, to whose result the residual is added in place, and a part of which is scaled."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions
        self.first, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def body(self, x):
        h = y = self.first(x)
        for function in self.functions:
            h = function(h)
        h += x
        h[..., :3].mul_(2.0)
        return self.up(F.rms_norm(self.down(h), (4,), self.gain)), y * 1.0

    def forward(self, x):
        return self.body(x)


class Checkpointed(Written):
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def dropout(*arguments):
    return lambda h: F.dropout(h, *arguments)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("functions", [
    [dropout(0.0, True)], [dropout(0.4, False)], [dropout(0.4, True)], [dropout(0.4, True, True)],
    [dropout(0.4, True), dropout(0.0, True)], [lambda h: h.type_as(h)], [lambda h: h.sum_to_size(3, 8), dropout(0.0)],
], ids=["none", "off", "on", "in-place", "both", "type_as", "sum_to_size"])  # fmt: skip
def test_writes_reach_what_they_reach_in_eager(functions):
    assert check(Written(*functions), (torch.randn(3, 8),)).fired == {"down_norm_up": 1}


def test_a_checkpointed_dropout_that_is_written_to_is_captured():
    assert check(Checkpointed(dropout(0.0, True)), (torch.randn(3, 8),)).fired == {"down_norm_up": 1}


VIEWS = [lambda h: torch.einsum("ij->ij", h), lambda h: torch.broadcast_tensors(h, h[:1])[0]]


@pytest.mark.parametrize("function", VIEWS, ids=["einsum", "broadcast_tensors"])
def test_a_view_that_is_written_to_is_not_captured(function):
    frames = check(Written(function), (torch.randn(3, 8),), captured=False)
    assert "copy it first" in frames.analyses[0].frame.reason and not frames.fired


def test_a_view_of_what_was_written_to_before_is_captured():
    def function(h):
        h += 1.0
        return torch.einsum("ij->ji", h).t().clone()

    assert check(Written(function), (torch.randn(3, 8),)).fired == {"down_norm_up": 1}
