"""What Dynamo marks as staying in place, parameters and buffers, reaches Inductor: CUDA graphs copy everything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(32, 16), nn.RMSNorm(16), nn.Linear(16, 32)
        self.register_buffer("steps", torch.zeros(4, 32))

    def forward(self, x, scale=1.0):
        self.steps.copy_(self.steps + 1)
        return self.up(self.norm(self.down(x))) * scale + self.steps


@pytest.fixture
def static(monkeypatch):
    """How many inputs of each frame AOTAutograd was told to stay in place."""
    found, usual = [], aot_autograd._try_get_metadata_from_dynamo

    def spied(*args):
        found.append(len((result := usual(*args))[1]))
        return result

    monkeypatch.setattr(aot_autograd, "_try_get_metadata_from_dynamo", spied)
    torch._dynamo.reset()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True])
def test_parameters_and_buffers_stay_in_place(static, dynamic, no_kernels):
    counts = {}
    for backend in ("inductor", "megacpp"):
        torch._dynamo.reset()
        static.clear()
        model = Counts()
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        compiled(torch.randn(4, 32), 0.5).sum().backward()
        counts[backend] = static[-1]
    assert counts == {"inductor": 6, "megacpp": 6}
    assert model.steps.eq(1).all()


def test_a_tensor_that_the_graph_holds_is_no_obstacle(fresh, no_kernels):
    """A constant of the model's becomes the graph's own, under another name than Dynamo's."""

    class Holds(Counts):
        def forward(self, x):
            return super().forward(x) + torch.tensor([0.5, 1.5]).repeat(16)

    model, x = Holds(), torch.randn(4, 32)
    want = Counts.forward(model, x) + torch.tensor([0.5, 1.5]).repeat(16)
    model.steps.zero_()
    torch.testing.assert_close(torch.compile(model, backend="megacpp")(x), want)
