"""Writes that autograd does not see leave a frame as it came, with eager's gradients; all others are captured."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.frontend.hoisted_input_writes import ahead_of
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
        self.limit = 0.1

    def forward(self, x):
        y = self.write(self, self.first(x))
        return self.up(F.rms_norm(self.down(y), (4,), self.gain))


def after(write, y):
    """`y`, where the write is done."""
    return y


def unrecorded(write):
    """`write`, where no gradients are recorded."""

    def call(m, y):
        with torch.no_grad():
            write(m, y)
        return y

    return call


def by_a_function(m, y):
    torch.mul(y, 0.5, out=y)
    F.relu(y, inplace=True)


def gradient_hidden_in_new_memory(m, y):
    z = torch.zeros_like(y)
    z.data.copy_(y)
    return y + z


def weight_is_read_before(m, y):
    z = F.linear(y, m.down.weight)
    m.down.weight.data.mul_(0.5)
    return y + z.sum()


def draws(m, y):
    y = F.dropout(y, 0.0) + torch.rand_like(y) * 0
    m.down.weight.data.add_(torch.zeros_like(m.down.weight.data).uniform_(-0.0, 0.0))
    return y


def within_autocast(m, y):
    with torch.autocast("cpu", torch.bfloat16):
        m.down.weight.data.copy_(m.down.weight.data @ m.first.weight.data)
    return y


def what_it_reads_is_written(m, y):
    with torch.no_grad():
        m.mean.add_(1.0)
    m.down.weight.data.mul_(m.mean[0])
    m.mean.copy_(y.detach().mean((0,)))
    return y


HIDDEN = {
    "data_of_an_activation": lambda m, y: after(y.data.mul_(0.5), y),
    "detached_part": lambda m, y: after(y.detach()[..., :3].unflatten(0, (1, -1)).mul_(0.5).add_(1.0), y),
    "activation_without_gradients": unrecorded(lambda m, y: y.clamp_(-0.3, 0.3)),
    "by_a_function": unrecorded(by_a_function),
    "by_an_overload": unrecorded(lambda m, y: torch.ops.aten.mul_.Tensor(y, 0.5)),
    "gradient_hidden_in_new_memory": gradient_hidden_in_new_memory, "weight_is_read_before": weight_is_read_before,
    "draws": draws, "what_it_reads_is_written": what_it_reads_is_written, "within_autocast": within_autocast,
}  # fmt: skip


def row_of_a_weight(m, y):
    m.down.weight[1:3] *= 0.5


def by_a_number_of_the_model(m, y):
    m.down.weight.lerp_(m.up.weight[:4, :1].expand(4, 8), 0.25)
    m.down.weight[0].mul_(m.mean[:8].exp())


def two_weights(m, y):
    m.down.weight.data.clamp_(-0.1, 0.1)
    with torch.no_grad():
        m.up.weight.mul_(0.5)
    m.down.weight.detach().neg_()
    return y


def is_read_as_data(m, y):
    m.down.weight.data.mul_(0.5)
    return y * m.down.weight.data.abs().sum()


def one_after_the_other(m, y):
    m.down.weight.data.clamp_(-0.1, 0.1)
    y = y + F.linear(y, m.down.weight).sum()
    m.up.weight.data.clamp_(-0.1, 0.1)
    return y


def within_a_float(m, y):
    """As Gemma 3n clamps the coefficients of AltUp. The float is read behind the write, too."""
    m.down.weight.data.clamp_(-m.limit, m.limit)
    m.up.weight.data.mul_(1.0 - m.limit / 2)
    return y * (1.0 + m.limit)


EARLY = {
    "data_of_a_weight": lambda m, y: after(m.down.weight.data.clamp_(-0.1, 0.1), y),
    "weight_without_gradients": unrecorded(lambda m, y: m.down.weight.mul_(0.5)),
    "row_of_a_weight": unrecorded(row_of_a_weight),
    "normalised_weight": lambda m, y: after(m.down.weight.data.copy_(F.normalize(m.down.weight.data, dim=-1)), y),
    "by_a_number_of_the_model": unrecorded(by_a_number_of_the_model), "two_weights": two_weights,
    "is_read_as_data": is_read_as_data, "one_after_the_other": one_after_the_other, "within_a_float": within_a_float,
}  # fmt: skip


def compared(write, x, grad=True, dynamic=None):
    """The report of two steps, whose results have to be eager's."""
    torch._dynamo.reset()
    module = Writes(write)
    eager, step = copy.deepcopy(module), torch.compile(module, backend="megacpp", dynamic=dynamic)
    with megacpp_compile.record() as found, torch.set_grad_enabled(grad):
        for _ in range(2):
            error, which = largest_error(train(step, module, (x,)), train(eager, eager, (x,)))
            assert error <= 1e-5, which
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), eager.parameters(), strict=True))
    (frame,) = found.frames
    return found, frame


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", HIDDEN.values(), ids=HIDDEN)
def test_hidden_writes_fall_back(write):
    report, frame = compared(write, torch.randn(3, 8).requires_grad_())
    assert not frame.captured and "where autograd does not see it" in frame.reason, frame.outcome
    assert "test_hidden_writes.py" in frame.reason and not report.sites


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("write", EARLY.values(), ids=EARLY)
def test_writes_to_what_nothing_has_read_run_ahead(write, dynamic):
    """Under `dynamic=True` floats of the model are inputs of the frame."""
    report, frame = compared(write, torch.randn(3, 8).requires_grad_(), dynamic=dynamic)
    assert frame.captured and report.counts["down_norm_up"] == 1, frame.outcome


def test_memory_that_inputs_share_is_one():
    """A view of the weight, an input of its own, is read before the weight is written: where the frame is compiled so,
    and where it was compiled for others."""
    found = []

    def forward(x, weight, part):
        z = x @ part.t()
        weight.data.mul_(0.5)
        return z.sum() * (x @ weight.t())

    def backend(gm, example_inputs):
        found.append(ahead_of(gm))
        return found[-1].adapt(found[-1].gm.forward)

    x, weight, other = torch.randn(3, 8), torch.randn(4, 8).requires_grad_(), torch.randn(2, 8)
    for parts in ((weight, other), (other, weight)):
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend=backend)
        for part in parts:
            again = weight.detach().clone().requires_grad_()
            want = forward(x, again, again.detach()[:2] if part is weight else part)
            torch.testing.assert_close(compiled(x, weight, weight.detach()[:2] if part is weight else part), want)
            assert torch.equal(weight, again)
    assert [one.writes is None for one in found] == [True, False]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", HIDDEN.values(), ids=HIDDEN)
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


def moved_to_where_it_is(m, y):
    """As mixtures of experts do that may have put some of them on the CPU."""
    m.down.to(y.device)
    m.up.to(device=y.device, dtype=y.dtype)
    return y


OTHERS = {
    "running_mean": running_mean, "new_memory": new_memory, "seen": seen, "moved_to_where_it_is": moved_to_where_it_is,
    "detached_copy": lambda m, y: y * y.detach().clone().clamp_(-0.3, 0.3),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", OTHERS.values(), ids=OTHERS)
def test_other_writes_are_captured(write):
    report, frame = compared(write, torch.randn(3, 8).requires_grad_())
    assert frame.captured and report.counts["down_norm_up"] == 1, frame.outcome


def set_to(made):
    def write(m, y):
        m.down.weight.data = made(m.down.weight, y)
        return y

    return write


MADE = {
    "negated": lambda weight, y: -weight.data, "copied": lambda weight, y: weight.to(y.device, copy=True),
    "turned": lambda weight, y: weight.data.flip(0),
}  # fmt: skip


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_other_memory_is_no_idle_write(made):
    """A weight set to what was made of it is written to."""
    report, frame = compared(set_to(made), torch.randn(3, 8).requires_grad_())
    assert not frame.captured and not report.sites
