"""Writes that autograd does not see leave a frame as it came, with eager's gradients; all others are captured."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from tests.frames import largest_error, train

pytestmark = pytest.mark.usefixtures("no_kernels")


class Writes(nn.Module):
    """A latent between its projections, behind `write(self, y)` of what the first linear makes."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.write(self, self.first(x))
        return self.up(F.rms_norm(self.down(y), (4,), self.gain))


def data_of_a_weight(m, y):
    m.down.weight.data.clamp_(-0.1, 0.1)
    return y


def weight_without_gradients(m, y):
    with torch.no_grad():
        m.down.weight.mul_(0.5)
    return y


def row_of_a_weight(m, y):
    with torch.no_grad():
        m.down.weight[1:3] *= 0.5
    return y


def data_of_an_activation(m, y):
    y.data.mul_(0.5)
    return y


def detached_part(m, y):
    y.detach()[..., :3].unflatten(0, (1, -1)).mul_(0.5).add_(1.0)
    return y


def activation_without_gradients(m, y):
    with torch.no_grad():
        y.clamp_(-0.3, 0.3)
    return y


def by_a_function(m, y):
    with torch.no_grad():
        torch.mul(y, 0.5, out=y)
        F.relu(y, inplace=True)
    return y


def by_an_overload(m, y):
    with torch.no_grad():
        torch.ops.aten.mul_.Tensor(y, 0.5)
    return y


def gradient_hidden_in_new_memory(m, y):
    z = torch.zeros_like(y)
    z.data.copy_(y)
    return y + z


HIDDEN = [
    data_of_a_weight, weight_without_gradients, row_of_a_weight, data_of_an_activation, detached_part,
    activation_without_gradients, by_a_function, by_an_overload, gradient_hidden_in_new_memory,
]  # fmt: skip


def compared(write, x, grad=True):
    """The report of two steps, whose results have to be eager's."""
    torch._dynamo.reset()
    module = Writes(write)
    eager, step = copy.deepcopy(module), torch.compile(module, backend="megacpp")
    with megacpp_compile.record() as found, torch.set_grad_enabled(grad):
        for _ in range(2):
            error, which = largest_error(train(step, module, (x,)), train(eager, eager, (x,)))
            assert error <= 1e-5, which
    (frame,) = found.frames
    return found, frame


@pytest.mark.parametrize("write", HIDDEN, ids=lambda f: f.__name__)
def test_hidden_writes_fall_back(write):
    report, frame = compared(write, torch.randn(3, 8).requires_grad_())
    assert not frame.captured and "where autograd does not see it" in frame.reason, frame.outcome
    assert "test_hidden_writes.py" in frame.reason and not report.sites


@pytest.mark.parametrize("write", HIDDEN, ids=lambda f: f.__name__)
def test_without_gradients_nothing_is_hidden(write):
    report, frame = compared(write, torch.randn(3, 8), grad=False)
    assert frame.captured and report.counts["down_norm_up"] == 1


def running_mean(m, y):
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean((0,)), alpha=0.1)
    return y - m.mean


def new_memory(m, y):
    with torch.no_grad():
        scale = torch.zeros_like(y)
        scale[..., :3].copy_(y[..., :3])
        scale.clamp_(-0.3, 0.3)
    return y * scale


def seen(m, y):
    z = torch.empty_like(y)
    z[..., :4], z[..., 4:] = y[..., 4:], y[..., :4]
    z.mul_(0.5)
    return F.relu(z + 1, inplace=True)


def detached_copy(m, y):
    return y * y.detach().clone().clamp_(-0.3, 0.3)


@pytest.mark.parametrize("write", [running_mean, new_memory, seen, detached_copy], ids=lambda f: f.__name__)
def test_other_writes_are_captured(write):
    report, frame = compared(write, torch.randn(3, 8).requires_grad_())
    assert frame.captured and report.counts["down_norm_up"] == 1, frame.outcome
