"""Causal convolutions of packed documents: taps masked by the documents' numbers become one op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check, check_graph

from .conditions import assert_serves, op_of, sampled
from .contract import assert_fires, assert_refused

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


def behind(seq_idx, lag, value=-1):
    """The documents' numbers `lag` steps before."""
    return F.pad(seq_idx[:, :-lag], (lag, 0), value=value)


def delayed(x, lag, value=0.0):
    return F.pad(x[:, :-lag], (0, 0, lag, 0), value=value)


def by_lags(tap, first=-1, weight_of=lambda lag: TAPS - 1 - lag):
    """The newest step, which needs no mask, and what `tap(x, seq_idx, lag)` lets through of the others."""

    def body(x, weight, bias, seq_idx):
        y = x * weight[:, first]
        for lag in range(1, TAPS):
            y = y + tap(x, seq_idx, lag) * weight[:, weight_of(lag)]
        return y

    return body


def same(seq_idx, lag, value=-1):
    return (behind(seq_idx, lag, value) == seq_idx)[..., None]


def multiplied(x, weight, bias, seq_idx):
    steps = x.shape[1]
    xp, ip = F.pad(x, (0, 0, TAPS - 1, 0)), F.pad(seq_idx, (TAPS - 1, 0), value=-1)
    y = bias
    for j in range(TAPS):
        same = (ip[:, j : j + steps] == seq_idx)[..., None]
        y = y + weight[:, j] * xp[:, j : j + steps] * same
    return F.silu(y)


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


_selected = by_lags(lambda x, seq_idx, lag: torch.where(same(seq_idx, lag), delayed(x, lag), 0.0))
_cleared = by_lags(lambda x, seq_idx, lag: delayed(x, lag).masked_fill((behind(seq_idx, lag) != seq_idx)[..., None], 0))
SPELLINGS = {
    "multiplied": multiplied, "summed": summed, "time_last": time_last,
    # no activation
    "selected": lambda x, weight, bias, seq_idx: _selected(x, weight, bias, seq_idx) + bias,
    "with_a_residual": lambda x, weight, bias, seq_idx: x + (_selected(x, weight, bias, seq_idx) + bias),
    # taps of other documents are set to 0
    "cleared": lambda x, weight, bias, seq_idx: F.silu(_cleared(x, weight, bias, seq_idx) + bias),
}


def operand(frames):
    return (*op_of(frames, NAME).args[5:], None)[0]


@sampled(5, "integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("form", SPELLINGS)
def test_fires(form, integer):
    assert operand(assert_fires(NAME, Mixer(SPELLINGS[form]), arguments(integer=integer))) is not None


@sampled(3, "form", ["multiplied", "selected", "summed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(form, dtype):
    x, seq_idx = arguments()
    args = (x.detach().to(dtype).requires_grad_(), seq_idx)
    assert operand(check_graph(Mixer(SPELLINGS[form]).to(dtype), args)) is not None


@pytest.mark.parametrize("everything", [False, True], ids=["marked", "all"])
def test_dynamic(everything):
    module = Mixer(multiplied)

    def args(length):
        made = arguments(length)
        for t in () if everything else made:
            torch._dynamo.mark_dynamic(t, 1)
        return made

    frames = check(module, args(11), dynamic=True if everything else None)
    assert operand(frames) is not None
    assert_serves(frames, module, args(17), args(9))


class FromOffsets(Mixer):
    """The documents' numbers made of their offsets, one row of tokens."""

    def forward(self, x, cu):
        numbers = torch.searchsorted(cu[1:], torch.arange(x.shape[1]), right=True)
        return super().forward(x, numbers[None])


def test_numbers_made_of_offsets():
    x, _ = arguments(12, batch=1)
    assert operand(assert_fires(NAME, FromOffsets(multiplied), (x, torch.tensor([0, 4, 4, 9, 12])))) is not None


@pytest.mark.parametrize("lengths", [(4, 5, 2), (11,)], ids=str)
def test_a_loop_over_documents_is_a_convolution_of_each(lengths):
    def body(x, weight, bias, seq_idx):
        def conv(part):
            y = F.conv1d(part.transpose(1, 2), weight[:, None], bias, padding=TAPS - 1, groups=CHANNELS)
            return F.silu(y[..., : part.shape[1]]).transpose(1, 2)

        return torch.cat([conv(part) for part in x.split(lengths, 1)], 1)

    assert_fires(NAME, Mixer(body), arguments(), count=len(lengths))


REFUSED = {
    "unmasked_lag": by_lags(lambda x, ids, lag: delayed(x, lag) * same(ids, lag) if lag != 2 else delayed(x, lag)),
    # every lag by whether the step before is of the same document: documents of two steps differ
    "masked_by_the_neighbour": by_lags(lambda x, seq_idx, lag: delayed(x, lag) * same(seq_idx, 1)),
    "weights_reversed": by_lags(lambda x, seq_idx, lag: delayed(x, lag) * same(seq_idx, lag), 0, lambda lag: lag),
    # what `masked_fill` leaves is what is of other documents
    "other_documents": by_lags(lambda x, seq_idx, lag: delayed(x, lag).masked_fill(same(seq_idx, lag), 0)),
    # in place of the documents' numbers, each step's position in its document
    "by_positions": by_lags(lambda x, positions, lag: delayed(x, lag) * (positions >= lag)[..., None]),
    "by_positions_cleared": by_lags(lambda x, positions, lag: delayed(x, lag).masked_fill((positions < lag)[..., None], 0)),
    "padded_with_ones": by_lags(lambda x, seq_idx, lag: delayed(x, lag, 1.0) * same(seq_idx, lag, 1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    assert_refused(NAME, "documents", Mixer(REFUSED[case]), arguments())


def test_steps_at_the_beginning_are_no_documents():
    """Masked by a position that no input says."""
    fixed = by_lags(lambda x, ids, lag: delayed(x, lag) * (torch.arange(x.shape[1])[None] >= lag)[..., None])
    assert "documents" not in check_graph(Mixer(fixed), arguments()).tags(NAME)


@pytest.mark.parametrize("told", ["positions", "flags"])
def test_numbers_made_of_where_documents_begin(told):
    """As `position_ids` of packed rows have it, and flags of first tokens."""

    class Made(Mixer):
        def forward(self, x, told):
            begins = told if told.dtype is torch.bool else told == 0
            return super().forward(x, begins.cumsum(-1))

    x, _ = arguments(12)
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1]]).expand(2, -1)
    frames = assert_fires(NAME, Made(multiplied), (x, positions if told == "positions" else positions == 0))
    assert operand(frames) is not None


def test_what_is_no_delay_stays_plain():
    """The first document sees the last one where their numbers agree."""
    rolled = by_lags(lambda x, seq_idx, lag: x.roll(lag, 1) * (seq_idx.roll(lag, 1) == seq_idx)[..., None])
    assert not check_graph(Mixer(rolled), arguments()).counts[NAME]
