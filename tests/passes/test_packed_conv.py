"""Causal convolutions of packed documents: taps masked by the documents' numbers become one op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import TOLERANCE, check, largest_error, train

from .contract import assert_fires, assert_refused_in_a_graph

NAME = "causal_conv1d"
CHANNELS, TAPS = 6, 4


class Mixer(nn.Module):
    """`body(x, weight [c, k], bias, seq_idx)` between two projections."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.inner, self.outer = nn.Linear(5, CHANNELS), nn.Linear(CHANNELS, 5)
        self.weight, self.bias = nn.Parameter(torch.randn(CHANNELS, 1, TAPS)), nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x, seq_idx):
        return self.outer(self.body(self.inner(x), self.weight[:, 0], self.bias, seq_idx))


def arguments(length=11, batch=2, integer=torch.int32):
    x = torch.randn(batch, length, 5, requires_grad=True)
    begins = (torch.arange(length) % 4 == 0) | (torch.arange(length) % 5 == 2)
    rows = torch.stack([begins.roll(i) for i in range(batch)])
    return x, rows.cumsum(-1).to(integer)


def multiplied(x, weight, bias, seq_idx):
    steps = x.shape[1]
    xp, ip = F.pad(x, (0, 0, TAPS - 1, 0)), F.pad(seq_idx, (TAPS - 1, 0), value=-1)
    y = bias
    for j in range(TAPS):
        same = (ip[:, j : j + steps] == seq_idx)[..., None]
        y = y + weight[:, j] * xp[:, j : j + steps] * same
    return F.silu(y)


def selected(x, weight, bias, seq_idx):
    """From the newest step back, which needs no mask; no activation."""
    y = x * weight[:, -1]
    for lag in range(1, TAPS):
        before = F.pad(x[:, :-lag], (0, 0, lag, 0))
        same = F.pad(seq_idx[:, :-lag], (lag, 0), value=-1) == seq_idx
        y = y + torch.where(same.unsqueeze(-1), before, 0.0) * weight[:, TAPS - 1 - lag]
    return y + bias


def summed(x, weight, bias, seq_idx):
    """By Python's `sum`, with masks as numbers, zeros joined in front, and no bias."""
    steps = x.shape[1]
    xp = torch.cat((x.new_zeros(x.shape[0], TAPS - 1, CHANNELS), x), 1)
    ip = torch.cat((seq_idx.new_full((x.shape[0], TAPS - 1), -1), seq_idx), 1)
    taps = (
        xp.narrow(1, j, steps) * (seq_idx == ip.narrow(1, j, steps)).to(x.dtype).unsqueeze(2) * weight[None, None, :, j]
        for j in range(TAPS)
    )
    y = sum(taps)
    return y * torch.sigmoid(y)


def time_last(x, weight, bias, seq_idx):
    x, steps = x.transpose(1, 2), x.shape[1]
    xp, ip = F.pad(x, (TAPS - 1, 0)), F.pad(seq_idx, (TAPS - 1, 0), value=-1)
    y = 0
    for j in range(TAPS):
        y = y + xp[..., j : j + steps] * (ip[:, j : j + steps] == seq_idx)[:, None] * weight[:, j, None]
    return F.silu(y).transpose(1, 2)


def with_a_residual(x, weight, bias, seq_idx):
    return x + selected(x, weight, bias, seq_idx)


def cleared(x, weight, bias, seq_idx):
    """Taps of other documents are set to 0."""
    y = x * weight[:, -1] + bias
    for lag in range(1, TAPS):
        other = F.pad(seq_idx[:, :-lag], (lag, 0), value=-1) != seq_idx
        y = y + F.pad(x[:, :-lag], (0, 0, lag, 0)).masked_fill(other[..., None], 0) * weight[:, TAPS - 1 - lag]
    return F.silu(y)


SPELLINGS = [multiplied, selected, summed, time_last, with_a_residual, cleared]


def operand(frames):
    (node,) = [n for n in frames.graph.graph.nodes if str(n.target) == "megacpp.causal_conv1d.default"]
    return node.args[5] if len(node.args) > 5 else None


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("body", SPELLINGS, ids=lambda f: f.__name__)
def test_fires(body, integer):
    frames = assert_fires(NAME, Mixer(body), arguments(integer=integer))
    assert operand(frames) is not None


@pytest.mark.parametrize("body", SPELLINGS[:3], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(body, dtype):
    x, seq_idx = arguments()
    args = (x.detach().to(dtype).requires_grad_(), seq_idx)
    assert operand(check(Mixer(body).to(dtype), args)) is not None


@pytest.mark.parametrize("everything", [False, True], ids=["marked", "all"])
def test_dynamic(everything):
    module = Mixer(multiplied)

    def args(length):
        made = arguments(length)
        if not everything:
            for t in made:
                torch._dynamo.mark_dynamic(t, 1)
        return made

    frames = check(module, args(11), dynamic=True if everything else None)
    assert operand(frames) is not None
    for length in (17, 9):
        torch.manual_seed(length)
        want = train(module, module, arguments(length))
        torch.manual_seed(length)
        error, which = largest_error(train(frames.compiled, module, args(length)), want)
        assert error <= TOLERANCE[torch.float32], (length, which, error)
    assert len(frames.graphs) == 1


class FromOffsets(Mixer):
    """The documents' numbers made of their offsets, one row of tokens."""

    def forward(self, x, cu):
        numbers = torch.searchsorted(cu[1:], torch.arange(x.shape[1]), right=True)
        return super().forward(x, numbers[None])


def test_numbers_made_of_offsets():
    x, _ = arguments(12, batch=1)
    frames = assert_fires(NAME, FromOffsets(multiplied), (x, torch.tensor([0, 4, 4, 9, 12])))
    assert operand(frames) is not None


@pytest.mark.parametrize("lengths", [(4, 5, 2), (11,)], ids=str)
def test_a_loop_over_documents_is_a_convolution_of_each(lengths):
    def body(x, weight, bias, seq_idx):
        def conv(part):
            y = F.conv1d(part.transpose(1, 2), weight[:, None], bias, padding=TAPS - 1, groups=CHANNELS)
            return F.silu(y[..., : part.shape[1]]).transpose(1, 2)

        return torch.cat([conv(part) for part in x.split(lengths, 1)], 1)

    assert_fires(NAME, Mixer(body), arguments(), count=len(lengths))


# --- refused


def selected_without(x, weight, seq_idx):
    y = x * weight[:, -1]
    for lag in (1, 3):
        same = F.pad(seq_idx[:, :-lag], (lag, 0), value=-1) == seq_idx
        y = y + F.pad(x[:, :-lag], (0, 0, lag, 0)) * same[..., None] * weight[:, TAPS - 1 - lag]
    return y


def unmasked_lag(x, weight, bias, seq_idx):
    return selected_without(x, weight, seq_idx) + F.pad(x[:, :-2], (0, 0, 2, 0)) * weight[:, 1]


def masked_by_the_neighbour(x, weight, bias, seq_idx):
    """Every lag by whether the step before is of the same document: documents of two steps differ."""
    same = (F.pad(seq_idx[:, :-1], (1, 0), value=-1) == seq_idx)[..., None]
    y = x * weight[:, -1]
    for lag in range(1, TAPS):
        y = y + F.pad(x[:, :-lag], (0, 0, lag, 0)) * same * weight[:, TAPS - 1 - lag]
    return y


def weights_reversed(x, weight, bias, seq_idx):
    y = x * weight[:, 0]
    for lag in range(1, TAPS):
        same = F.pad(seq_idx[:, :-lag], (lag, 0), value=-1) == seq_idx
        y = y + F.pad(x[:, :-lag], (0, 0, lag, 0)) * same[..., None] * weight[:, lag]
    return y


def other_documents(x, weight, bias, seq_idx):
    """What `masked_fill` leaves is what is of other documents."""
    y = x * weight[:, -1]
    for lag in range(1, TAPS):
        same = F.pad(seq_idx[:, :-lag], (lag, 0), value=-1) == seq_idx
        y = y + F.pad(x[:, :-lag], (0, 0, lag, 0)).masked_fill(same[..., None], 0) * weight[:, TAPS - 1 - lag]
    return y


def padded_with_ones(x, weight, bias, seq_idx):
    y = x * weight[:, -1]
    for lag in range(1, TAPS):
        same = F.pad(seq_idx[:, :-lag], (lag, 0), value=1) == seq_idx
        y = y + F.pad(x[:, :-lag], (0, 0, lag, 0), value=1.0) * same[..., None] * weight[:, TAPS - 1 - lag]
    return y


def rolled(x, weight, bias, seq_idx):
    """The first document sees the last one where their numbers agree."""
    y = x * weight[:, -1]
    for lag in range(1, TAPS):
        same = seq_idx.roll(lag, 1) == seq_idx
        y = y + x.roll(lag, 1) * same[..., None] * weight[:, TAPS - 1 - lag]
    return y


REFUSED = [unmasked_lag, masked_by_the_neighbour, weights_reversed, other_documents, padded_with_ones]


@pytest.mark.parametrize("body", REFUSED, ids=lambda f: f.__name__)
def test_refused(body):
    assert_refused_in_a_graph(NAME, "documents", Mixer(body), arguments())


def test_what_is_no_delay_stays_plain():
    frames = check(Mixer(rolled), arguments())
    assert not frames.counts[NAME]
