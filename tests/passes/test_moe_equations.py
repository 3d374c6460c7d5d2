"""Experts that are weighted, and gates that are normalised, by equations of more than two tensors or of none that are
summed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.frames import check

from .contract import assert_dynamic, assert_fires
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


# --- sums over choices and experts at once


def of_gates_and_one_hots(m, x, indices, gates):
    return torch.einsum("tk,tke,ted->td", gates, one_hots(m, x, indices), outputs(m, x))


def in_another_order(m, x, indices, gates):
    every = torch.stack([expert(x) for expert in m.experts])
    return torch.einsum("etd,tek,kt->td", every, one_hots(m, x, indices).mT, gates.t())


def scaled_one_hots(m, x, indices, gates):
    return torch.einsum("tke,ted->td", gates[..., None] * one_hots(m, x, indices), outputs(m, x))


def products_summed(m, x, indices, gates):
    weighted = gates[:, :, None, None] * one_hots(m, x, indices)[..., None] * outputs(m, x)[:, None]
    return weighted.sum((1, 2))


def scaled_by_token(m, x, indices, gates):
    return torch.einsum("t,tk,tke,ted->td", x[:, 0].exp(), gates, one_hots(m, x, indices), outputs(m, x))


def compared_with_all_numbers(m, x, indices, gates):
    marks = (indices[..., None] == torch.arange(m.num_experts)).to(x.dtype)
    return torch.einsum("tk,tke,ted->td", gates, marks, outputs(m, x))


def repeated_choices(m, x, indices, gates):
    """A choice that comes twice counts twice."""
    return torch.einsum("tk,tke,ted->td", gates, one_hots(m, x, indices // 2), outputs(m, x))


OVER_CHOICES = [of_gates_and_one_hots, in_another_order, scaled_one_hots, products_summed, scaled_by_token,
                compared_with_all_numbers, repeated_choices]  # fmt: skip


@pytest.mark.parametrize("body", OVER_CHOICES, ids=lambda body: body.__name__)
def test_fires_over_choices(body):
    assert_fires("moe", MoE(body).double(), (torch.randn(11, DIM, dtype=torch.float64).requires_grad_(),))


@pytest.mark.parametrize("body", OVER_CHOICES[:4], ids=lambda body: body.__name__)
def test_over_choices_of_batches(body):
    def of_batches(m, x, indices, gates):
        flat = body(m, x.flatten(0, 1), indices.flatten(0, 1), gates.flatten(0, 1))
        return flat.view_as(x)

    assert_dynamic("moe", MoE(of_batches), lambda n: (torch.randn(2, n, DIM).requires_grad_(),), everything=True)


def of_stacked(m, x, indices, gates):
    gate, up = torch.einsum("td,ehd->teh", x, m.gate_up).chunk(2, -1)
    return torch.einsum("tk,tke,teh,edh->td", gates, one_hots(m, x, indices), F.silu(gate) * up, m.down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fires_over_choices_of_stacked_weights(dtype):
    module = MoE(of_stacked, stacked=True).to(dtype)
    assert check(module, (torch.randn(11, DIM).to(dtype).requires_grad_(),)).counts["moe"] == 1


def marks_that_are_soft(m, x, indices, gates):
    soft = torch.stack([m.router(x * scale).softmax(-1) for scale in (1.0, 2.0)], 1)
    return torch.einsum("tk,tke,ted->td", gates, soft, outputs(m, x))


def gates_of_experts(m, x, indices, gates):
    """Numbers that differ by choice and expert."""
    own = torch.einsum("tk,te->tke", gates, m.router(x).sigmoid())
    return torch.einsum("tke,tke,ted->td", own, one_hots(m, x, indices), outputs(m, x))


def outputs_of_choices(m, x, indices, gates):
    """What is weighted differs by choice."""
    each = torch.stack([outputs(m, x * scale) for scale in (1.0, 2.0)], 1)
    return torch.einsum("tk,tke,tked->td", gates, one_hots(m, x, indices), each)


def gates_of_the_next_choice(m, x, indices, gates):
    """Summed over choices on their own, and over experts: a product of sums."""
    return torch.einsum("tj,tke,ted->td", gates, one_hots(m, x, indices), outputs(m, x))


NOT_OVER_CHOICES = [marks_that_are_soft, gates_of_experts, outputs_of_choices, gates_of_the_next_choice]


@pytest.mark.parametrize("body", NOT_OVER_CHOICES, ids=lambda body: body.__name__)
def test_does_not_fire_over_choices(body):
    frames = check(MoE(body), (torch.randn(11, DIM).requires_grad_(),))
    assert not frames.counts["moe"]
    assert frames.tags("moe") == {"gates"} or body is outputs_of_choices  # experts run for each choice: some other sum


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
    frames = check(MoE(body), (torch.randn(11, DIM).requires_grad_(),))
    assert not frames.counts["moe"] and frames.tags("moe") in ({"gates"}, {"dense-gates"})
