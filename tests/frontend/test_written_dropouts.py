"""A dropout whose result is written to: captured, and whoever reads its input sees the write where eager does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames import check


class Written(nn.Module):
    """A latent behind dropouts, to whose result the residual and a part of the input are added in place."""

    def __init__(self, *dropouts):
        super().__init__()
        self.dropouts = dropouts
        self.first, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def body(self, x):
        h = y = self.first(x)
        for dropout in self.dropouts:
            h = F.dropout(h, *dropout)
        h += x
        h[..., :3].mul_(2.0)
        return self.up(F.rms_norm(self.down(h), (4,), self.gain)), y * 1.0

    def forward(self, x):
        return self.body(x)


class Checkpointed(Written):
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("dropouts", [
    [(0.0, True)], [(0.4, False)], [(0.4, True)], [(0.4, True, True)], [(0.4, True), (0.0, True)],
], ids=["none", "off", "on", "in-place", "both"])  # fmt: skip
def test_a_dropout_that_is_written_to_is_captured(dropouts):
    assert check(Written(*dropouts), (torch.randn(3, 8),)).fired == {"down_norm_up": 1}


def test_a_checkpointed_dropout_that_is_written_to_is_captured():
    assert check(Checkpointed((0.0, True)), (torch.randn(3, 8),)).fired == {"down_norm_up": 1}
