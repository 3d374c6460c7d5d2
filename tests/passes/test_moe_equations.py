"""Experts that are weighted, and gates that are normalised, by equations of more than two tensors or of none that are
summed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frames import check

from .contract import assert_fires
from .experts import DIM, MoE


def matrix(m, x, indices, gates):
    return torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter(1, indices, gates)


def outputs(m, x):
    return torch.stack([expert(x) for expert in m.experts], 1)


def one_hots(m, x, indices):
    return F.one_hot(indices, m.num_experts).to(x.dtype)


def normalised_in_the_sum(m, x, indices, gates):
    g = matrix(m, x, indices, gates)
    return torch.einsum("te,ted,t->td", g, outputs(m, x), 1 / g.sum(-1))


def scaled_in_the_sum(m, x, indices, gates):
    g, scale = matrix(m, x, indices, gates), x.new_full((), 2.5)
    return torch.einsum("t,te,,ted->td", x[:, 0].exp(), g, scale, outputs(m, x))


def normalised_by_an_equation(m, x, indices, gates):
    g = matrix(m, x, indices, gates)
    return torch.einsum("te,ted->td", torch.einsum("te,t->te", g, 1 / g.sum(-1)), outputs(m, x))


def normalised_one_hots(m, x, indices, gates):
    g = torch.einsum("tk,tke,t->te", gates, one_hots(m, x, indices), 1 / gates.sum(-1))
    return torch.einsum("te,ted->td", g, outputs(m, x))


def rows_by_an_equation(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, torch.einsum("rd,r->rd", expert(x[token]), gates[token, choice]))
    return y


def matrix_read_elsewhere(m, x, indices, gates):
    """As a loss that balances experts reads it."""
    g = matrix(m, x, indices, gates)
    return torch.einsum("te,ted->td", g, outputs(m, x)), g.mean(0)


FIRES = [normalised_in_the_sum, scaled_in_the_sum, normalised_by_an_equation, normalised_one_hots, rows_by_an_equation,
         matrix_read_elsewhere]  # fmt: skip


@pytest.mark.parametrize("body", FIRES, ids=lambda body: body.__name__)
def test_fires(body):
    assert_fires("moe", MoE(body).double(), (torch.randn(11, DIM, dtype=torch.float64).requires_grad_(),))


@pytest.mark.parametrize("body", FIRES[:4], ids=lambda body: body.__name__)
def test_bfloat16(body):
    module = MoE(body).bfloat16()
    assert check(module, (torch.randn(11, DIM).bfloat16().requires_grad_(),)).counts["moe"] == 1


# --- what else multiplies the sum


def scaled_channels(m, x, indices, gates):
    return torch.einsum("te,ted,d->td", matrix(m, x, indices, gates), outputs(m, x), x[0].exp())


def scaled_experts(m, x, indices, gates):
    return torch.einsum("te,ted,e->td", matrix(m, x, indices, gates), outputs(m, x), x[0, : m.num_experts].exp())


def softmax_scaled_in_the_sum(m, x, indices, gates):
    """Every expert works on every token."""
    g = m.router(x).softmax(-1)
    return torch.einsum("te,ted,t->td", g, outputs(m, x), 1 / g.square().sum(-1))


def one_hots_of_choices_that_repeat(m, x, indices, gates):
    g = torch.einsum("tk,tke,t->te", gates, one_hots(m, x, indices // 2), 1 / gates.sum(-1))
    return torch.einsum("te,ted->td", g, outputs(m, x))


NONE = [scaled_channels, scaled_experts, softmax_scaled_in_the_sum, one_hots_of_choices_that_repeat]


@pytest.mark.parametrize("body", NONE, ids=lambda body: body.__name__)
def test_does_not_fire(body):
    assert not check(MoE(body), (torch.randn(11, DIM).requires_grad_(),)).counts["moe"]
