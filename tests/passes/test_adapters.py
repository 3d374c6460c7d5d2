"""Low-rank paths (LoRA) beside experts and heads: weights that are added up fuse, paths beside them are told with a remedy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import run

from .contract import assert_dynamic, assert_fires, assert_refused
from .experts import DIM, EXPERTS, HIDDEN, MoE, over_experts, swiglu, where_index_add

RANK, WORDS = 2, 21


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Beside(nn.Module):
    """`W x + s * B (A x)`, W frozen. dropout: of what A reads."""

    def __init__(self, d: int, n: int, dropout: float = 0.0):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(d, n, bias=False), nn.Linear(d, RANK, bias=False), nn.Linear(RANK, n, bias=False)
        self.base.weight.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.b(self.a(self.dropout(x))) * 2.0


class First(Beside):
    def forward(self, x):
        return 2.0 * self.b(self.a(x)) + self.base(x)


class Added(Beside):
    """The same with weights that are added up."""

    def forward(self, x):
        return F.linear(x, self.base.weight + 2.0 * self.b.weight @ self.a.weight)


class Expert(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.gate, self.up, self.down = up(DIM, HIDDEN), up(DIM, HIDDEN), down(HIDDEN, DIM)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plain(d, n):
    return nn.Linear(d, n, bias=False)


def tokens(count=11):
    return (torch.randn(count, DIM).requires_grad_(),)


def test_experts_of_added_weights_fire():
    assert_fires("moe", MoE(where_index_add, lambda: Expert(Added, Added)), tokens())
    assert_dynamic("moe", MoE(where_index_add, lambda: Expert(Added, Added)), tokens, everything=True)


class Stacked(MoE):
    """All experts' weights in one tensor, and so their paths'."""

    def __init__(self):
        super().__init__(by_rows_of_added, stacked=True)
        self.a, self.b = (nn.Parameter(torch.randn(EXPERTS, *s) / 3) for s in ((RANK, DIM), (2 * HIDDEN, RANK)))
        self.gate_up.requires_grad_(False)


def by_rows_of_added(m, x, indices, gates):
    gate_up = m.gate_up + 0.5 * torch.bmm(m.b, m.a)

    def out(e, token, choice):
        return F.linear(swiglu(F.linear(x[token], gate_up[e])), m.down[e]) * gates[token, choice, None]

    return over_experts(m, x, lambda e: torch.where(indices == e), out)


def test_stacked_experts_of_added_weights_fire():
    assert_fires("moe", Stacked(), tokens())


PATHS = {"last": Beside, "first": First, "dropout": lambda d, n: Beside(d, n, 0.2)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["up", "down", "all"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_experts_with_paths_are_told(path, where):
    made = {"up": (path, plain), "down": (plain, path), "all": (path, path)}[where]
    module = MoE(where_index_add, lambda: Expert(*made), experts=2)
    reasons = [miss.reason for miss in assert_refused("moe", "low-rank", module, tokens()).misses]
    assert any("w + s * (b @ a)" in reason for reason in reasons)


class Head(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head(DIM, WORDS)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x).float(), labels)


def rows(count=11):
    return torch.randn(count, DIM).requires_grad_(), torch.randint(WORDS, (count,))


def test_a_head_of_added_weights_fires():
    assert_fires("linear_cross_entropy", Head(Added), rows())


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_head_with_a_path_is_told(path):
    (miss,) = assert_refused("linear_cross_entropy", "between", Head(path), rows()).misses
    assert "F.linear(x, w + s * (b @ a))" in miss.reason


class TwoProducts(Beside):
    """Two full products, no path of a lower rank."""

    def __init__(self, d, n):
        super().__init__(d, n)
        self.other = plain(d, n)

    def forward(self, x):
        return self.base(x) + self.other(x.tanh())


def test_another_sum_is_no_path():
    (miss,) = run(Head(TwoProducts), rows()).misses
    assert miss.tag == "between" and "low-rank" not in miss.reason
    tags = run(MoE(where_index_add, lambda: Expert(TwoProducts, plain), experts=2), tokens()).tags("moe")
    assert tags and "low-rank" not in tags


class Scaled(Beside):
    """A path whose channels are scaled, between its weights and behind them, as VeRA trains it (arXiv:2310.11454)."""

    def __init__(self, d, n):
        super().__init__(d, n)
        self.inner, self.outer = nn.Parameter(torch.rand(RANK)), nn.Parameter(torch.rand(n))

    def forward(self, x):
        return self.base(x) + self.outer * self.b(self.inner * self.a(x))


def test_experts_with_scaled_paths_are_told():
    """Regression: sizes that depend on data were compared by the matcher of delta rules, an internal error."""
    module = MoE(where_index_add, lambda: Expert(Scaled, Scaled), experts=2)
    assert {miss.tag for miss in assert_refused("moe", "low-rank", module, tokens()).misses} == {"low-rank"}


class Rescaled(Beside):
    """A sum whose channels are rescaled, as DoRA trains it (arXiv:2402.09353)."""

    def __init__(self, d, n):
        super().__init__(d, n)
        self.magnitude = nn.Parameter(torch.rand(n))

    def forward(self, x):
        norm = (self.base.weight + 2.0 * self.b.weight @ self.a.weight).norm(dim=1).detach()
        return super().forward(x) * (self.magnitude / norm)


def test_experts_with_rescaled_sums_are_told():
    module = MoE(where_index_add, lambda: Expert(plain, Rescaled), experts=2)
    (miss,) = assert_refused("moe", "no-expert", module, tokens()).misses
    assert "made of several projections" in miss.reason and "mul" in miss.reason
