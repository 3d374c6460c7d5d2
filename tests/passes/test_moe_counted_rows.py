"""Experts that read every token's row and add to it by numbers that count up, as Meta's Llama 4 has them: rows gathered
at `arange`, once for each expert, times scores that are zero but for the chosen, and scattered onto the shared expert's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import largest_error, run, train
from tests.lowerings import relative_error

from .contract import assert_dynamic, assert_fires
from .experts import DIM, EXPERTS, HIDDEN

NAME, TOKENS = "moe", 12
AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Layer(nn.Module):
    """`body(self, x, scores)` with scores [T, E] that are minus infinity but for the chosen."""

    def __init__(self, body, choices: int = 1, returned: bool = False):
        super().__init__()
        self.body, self.choices, self.returned = body, choices, returned
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / 3) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / 3)
        self.router, self.shared = nn.Linear(DIM, EXPERTS, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        x = x.reshape(-1, x.shape[-1])
        scores = self.router(x)
        values, indices = torch.topk(scores, self.choices, dim=1)
        scores = torch.full_like(scores, float("-inf")).scatter_(1, indices, values)
        return self.body(self, x, scores)

    def experts(self, rows):
        rows = rows.view(EXPERTS, -1, DIM)
        hidden = F.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3)
        return torch.bmm(hidden, self.w2).view(-1, DIM)


def everyone(x):
    """[E * T], the numbers of all rows for the first expert, then for the next."""
    return torch.arange(x.shape[0], device=x.device).view(1, -1).expand(EXPERTS, -1).reshape(-1)


def scattered(out, index, rows):
    return out.scatter_add(0, index, rows.to(out.dtype))


def gathered_and_scattered(m, x, scores, numbers=everyone, back=None, onto=lambda m, x: m.shared(x), add=scattered):
    index = numbers(x).reshape(-1, 1).expand(-1, DIM)
    rows = torch.gather(x, 0, index) * torch.sigmoid(scores.transpose(0, 1)).reshape(-1, 1)
    index = index if back is None else back(x).reshape(-1, 1).expand(-1, DIM)
    return add(onto(m, x), index, m.experts(rows))


def weighted_by(m, x, scores):
    """All rows, gathered by their numbers, times `scores` [E, T]."""
    out = m.shared(x)
    return scattered(out, everyone(x)[:, None].expand(-1, DIM), m.experts(x[everyone(x)] * scores.reshape(-1, 1)))


def as_transformers(m, x, scores):
    """As its Llama 4 was at first; scores are returned, in the model's dtype, and experts add in place."""
    scores = torch.sigmoid(scores.transpose(0, 1).float()).to(x.dtype)
    index = torch.arange(x.shape[0], device=x.device).view(1, -1).expand(scores.shape[0], -1).reshape(-1, 1).expand(-1, DIM)
    rows = torch.gather(input=x, dim=0, index=index).to(x.device) * scores.reshape(-1, 1)
    out = m.shared(x)
    out.scatter_add_(dim=0, index=index, src=m.experts(rows).view(-1, DIM).to(out.dtype))
    return out, scores


def read_and_added(m, x, scores):
    """By `index_add` onto zeros, of rows read by an index."""
    numbers = torch.arange(x.shape[0]).repeat(EXPERTS)
    rows = x[numbers] * scores.mT.sigmoid().reshape(-1)[:, None]
    return torch.zeros_like(x).index_add(0, numbers, m.experts(rows).to(x.dtype))


def experts_inside(m, x, scores):
    """A token's rows side by side, and put so again; experts see them turned."""
    numbers = torch.arange(x.shape[0]).repeat_interleave(EXPERTS)
    rows = (x.index_select(0, numbers) * scores.sigmoid().reshape(-1, 1)).view(-1, EXPERTS, DIM).transpose(0, 1)
    out = m.experts(rows.reshape(-1, DIM)).view(EXPERTS, -1, DIM).transpose(0, 1).reshape(-1, DIM)
    shared = m.shared(x)
    return shared.index_put((numbers,), out.to(shared.dtype), accumulate=True)


def softmax_of_turned(m, x, scores):
    """Gates that are normalised over experts, which come first."""
    return weighted_by(m, x, scores.t().softmax(0))


BODIES = [gathered_and_scattered, as_transformers, read_and_added, experts_inside, softmax_of_turned]


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_fires(body, choices):
    assert_fires(NAME, Layer(body, choices).double(), (torch.randn(TOKENS, DIM, dtype=torch.float64).requires_grad_(),))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(EXPERTS,), (1,), (2, 5)], ids=["as many tokens as experts", "one token", "batches"])
@pytest.mark.parametrize("body", [gathered_and_scattered, experts_inside], ids=lambda f: f.__name__)
def test_fires_on_other_numbers_of_tokens(body, shape):
    assert_fires(NAME, Layer(body, 2).double(), (torch.randn(*shape, DIM, dtype=torch.float64).requires_grad_(),))


@pytest.mark.parametrize("body", [gathered_and_scattered, as_transformers], ids=lambda f: f.__name__)
def test_dynamic(body):
    assert_dynamic(NAME, Layer(body), lambda n: (torch.randn(n, DIM).requires_grad_(),), everything=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "bfloat16"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_as_exact_as_eager_in_bfloat16(body, dtype):
    module, x = Layer(body).to(dtype), torch.randn(60, DIM).to(dtype).requires_grad_()
    around = {"around": AUTOCAST} if dtype is torch.float32 else {}
    wide = Layer(body)
    wide.load_state_dict(module.state_dict())
    exact = train(wide, wide, (x.detach().float().requires_grad_(),))
    eager, frames = train(module, module, (x,), **around), run(module, (x,), **around)
    assert frames.counts[NAME] == 1, frames.misses
    for name, want in exact.items():
        if "router" not in name:
            ours, theirs = (relative_error(got[name], want) for got in (frames.results, eager))
            assert ours <= 1.25 * theirs + 2e-3, (name, ours, theirs)


OTHER_ROWS = {
    "backwards": lambda x: everyone(x).flip(0),
    # each number E times, one behind the other: rows of other tokens where experts come first
    "by_token": lambda x: torch.arange(x.shape[0]).repeat_interleave(EXPERTS),
    "from_one": lambda x: torch.arange(1, x.shape[0] + 1).remainder(x.shape[0]).repeat(EXPERTS),
    "of_the_first_half": lambda x: torch.arange(x.shape[0] // 2).repeat(2 * EXPERTS),
}


@pytest.mark.parametrize("end", ["numbers", "back"], ids=["read", "added"])
@pytest.mark.parametrize("name", OTHER_ROWS)
def test_other_rows_stay(name, end):
    assert_stays(Layer(functools.partial(gathered_and_scattered, **{end: OTHER_ROWS[name]}), 2))


def a_row_for_each_channel(m, x, scores):
    """As many tokens as channels, of which each is read from a row of its own number."""
    x, scores = x[:DIM], scores[:DIM]
    rows = torch.gather(x, 0, torch.arange(DIM).expand(EXPERTS * DIM, -1)) * torch.sigmoid(scores.t()).reshape(-1, 1)
    return m.shared(x).scatter_add(0, everyone(x)[:, None].expand(-1, DIM), m.experts(rows))


def reduced(*how, **kwargs):
    add = lambda out, index, rows: out.scatter_reduce(0, index, rows, *how, **kwargs)  # noqa: E731
    return functools.partial(gathered_and_scattered, add=add)


OTHER_SUMS = {
    "a_row_for_each_channel": a_row_for_each_channel,
    # the base has rows that no number names
    "scattered_on_more": functools.partial(gathered_and_scattered, onto=lambda m, x: torch.cat((m.shared(x), x))),
    "averaged": reduced("mean"),
    "overwritten": reduced("sum", include_self=False),
    # an expert that no token chose has no number for any
    "softmax_over_tokens": lambda m, x, scores: weighted_by(m, x, scores.t().clamp(min=-50).softmax(1)),
    # every expert has a share in every token
    "scores_of_all": lambda m, x, scores: weighted_by(m, x, (m.router(x).sigmoid() + scores.sigmoid()).t()),
    # scores that lie by token multiply rows that lie by expert
    "scores_not_turned": lambda m, x, scores: weighted_by(m, x, scores.sigmoid()),
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_sums_stay(name):
    assert_stays(Layer(OTHER_SUMS[name], 2))


def assert_stays(module):
    """Named, and with eager's own numbers."""
    x = torch.randn(TOKENS, DIM).requires_grad_()
    frames = run(module, (x,))
    assert not frames.counts[NAME] and frames.tags(NAME), frames.misses
    assert largest_error(frames.results, train(module, module, (x,)))[0] < 1e-6
