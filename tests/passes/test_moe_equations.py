"""Experts that are weighted, and gates that are normalised, by equations of more than two tensors or of none that are
summed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check

from .contract import assert_autocast, assert_dynamic, assert_fires, assert_refused
from .experts import DIM, MoE, where_index_add


def matrix(m, x, indices, gates):
    return torch.zeros(x.shape[0], m.num_experts, dtype=gates.dtype).scatter(1, indices, gates)


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


def gates_of_the_next_choice(m, x, indices, gates):
    """Summed over choices on their own, and over experts: a product of sums."""
    return torch.einsum("tj,tke,ted->td", gates, one_hots(m, x, indices), outputs(m, x))


NOT_OVER_CHOICES = [marks_that_are_soft, gates_of_experts, gates_of_the_next_choice]


@pytest.mark.parametrize("body", NOT_OVER_CHOICES, ids=lambda body: body.__name__)
def test_does_not_fire_over_choices(body):
    frames = check(MoE(body), (torch.randn(11, DIM).requires_grad_(),))
    assert not frames.counts["moe"] and frames.tags("moe") == {"gates"}


# --- experts that run once for each choice


def each_choice(m, x, indices, rows):
    """The outputs [T, k, E, d] of all experts for `rows` [T, k, d], weighted and summed by `over_each`."""
    return torch.stack([expert(rows) for expert in m.experts], 2)


def over_each(m, x, indices, gates, outs):
    return torch.einsum("tk,tke,tked->td", gates, one_hots(m, x, indices), outs)


def tokens_expanded(m, x, indices, gates):
    rows = x[:, None].expand(-1, indices.shape[-1], -1)
    return over_each(m, x, indices, gates, each_choice(m, x, indices, rows))


def tokens_repeated(m, x, indices, gates):
    rows = x.repeat_interleave(indices.shape[-1], 0)
    outs = outputs(m, rows).unflatten(0, (-1, indices.shape[-1]))
    return over_each(m, x, indices, gates, outs)


def tokens_read_for_each_slot(m, x, indices, gates):
    slots = torch.arange(indices.numel()) // indices.shape[-1]
    outs = outputs(m, x[slots]).unflatten(0, (-1, indices.shape[-1]))
    return over_each(m, x, indices, gates, outs)


def run_anew(m, x, indices, gates):
    return over_each(m, x, indices, gates, torch.stack([outputs(m, x) for _ in range(indices.shape[-1])], 1))


def run_anew_and_scaled(m, x, indices, gates):
    each = torch.stack([outputs(m, x) for _ in range(indices.shape[-1])], 2)
    return torch.einsum("t,tk,tke,tekd->td", x[:, 0].exp(), gates, one_hots(m, x, indices), each)


def choice_by_choice(m, x, indices, gates):
    """Experts run again for every choice, weighted by the marks of this one."""
    hots = one_hots(m, x, indices)
    return sum(torch.einsum("t,te,ted->td", gates[:, k], hots[:, k], outputs(m, x)) for k in range(indices.shape[-1]))


ONCE_A_CHOICE = [tokens_expanded, tokens_repeated, tokens_read_for_each_slot, run_anew, run_anew_and_scaled]


@pytest.mark.parametrize("body", [*ONCE_A_CHOICE, choice_by_choice], ids=lambda body: body.__name__)
def test_fires_once_a_choice(body):
    module, x = MoE(body).double(), torch.randn(11, DIM, dtype=torch.float64).requires_grad_()
    assert_fires("moe", module, (x,), 2 if body is choice_by_choice else 1)


def test_one_of_several_choices():
    def second(m, x, indices, gates):
        return torch.einsum("te,ted->td", gates[:, 1:] * one_hots(m, x, indices)[:, 1], outputs(m, x))

    assert_fires("moe", MoE(second).double(), (torch.randn(11, DIM, dtype=torch.float64).requires_grad_(),))


def test_once_a_choice_with_stacked_weights():
    def of_stacked(m, x, indices, gates):
        rows = x[:, None].expand(-1, indices.shape[-1], -1)
        gate, up = torch.einsum("tkd,ehd->tkeh", rows, m.gate_up).chunk(2, -1)
        return over_each(m, x, indices, gates, torch.einsum("tkeh,edh->tked", F.silu(gate) * up, m.down))

    assert_fires("moe", MoE(of_stacked, stacked=True), (torch.randn(11, DIM).requires_grad_(),))


@pytest.mark.parametrize("body", [tokens_expanded, tokens_repeated, run_anew], ids=lambda body: body.__name__)
def test_once_a_choice_of_every_length(body):
    assert_dynamic("moe", MoE(body), lambda n: (torch.randn(n, DIM).requires_grad_(),), everything=True)


@pytest.mark.parametrize("body", [*ONCE_A_CHOICE[1:], normalised_in_the_sum], ids=lambda body: body.__name__)
def test_autocast(body):
    """A scale in float32, as an equation takes it under autocast, leaves the sum in bfloat16."""
    assert_autocast("moe", MoE(body), (torch.randn(200, DIM).requires_grad_(),))


def rows_of_choices(m, x, indices, gates):
    rows = torch.stack([x, x * 2], 1)
    return over_each(m, x, indices, gates, each_choice(m, x, indices, rows))


def run_on_other_tokens(m, x, indices, gates):
    return over_each(m, x, indices, gates, torch.stack([outputs(m, x), outputs(m, x.roll(1, 0))], 1))


def tokens_tiled(m, x, indices, gates):
    """Slot s is of token s % T."""
    outs = outputs(m, x.repeat(indices.shape[-1], 1)).unflatten(0, (-1, indices.shape[-1]))
    return over_each(m, x, indices, gates, outs)


def experts_of_choices(m, x, indices, gates):
    turned = torch.stack([expert(x) for expert in m.experts[::-1]], 1)
    return over_each(m, x, indices, gates, torch.stack([outputs(m, x), turned], 1))


def marks_of_the_next_choice(m, x, indices, gates):
    rows = x[:, None].expand(-1, indices.shape[-1], -1)
    outs = each_choice(m, x, indices, rows)
    return torch.einsum("tk,tke,tked->td", gates, one_hots(m, x, indices).flip(1), outs)


def changed_in_between(m, x, indices, gates):
    rows = x[:, None].expand(-1, indices.shape[-1], -1)
    return over_each(m, x, indices, gates, each_choice(m, x, indices, rows).cumsum(1))


def marks_of_one_choice_twice(m, x, indices, gates):
    first = one_hots(m, x, indices)[:, :1].expand(-1, indices.shape[-1], -1)
    each = torch.stack([outputs(m, x) for _ in range(indices.shape[-1])], 1)
    return torch.einsum("tk,tke,tked->td", gates, first, each)


OF_CHOICES = {marks_of_one_choice_twice: "gates", rows_of_choices: "rows", run_on_other_tokens: "rows",
              tokens_tiled: "rows", experts_of_choices: "experts-differ",
              marks_of_the_next_choice: "gates", changed_in_between: "no-expert"}  # fmt: skip


@pytest.mark.parametrize(("body", "tag"), OF_CHOICES.items(), ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_refused_once_a_choice(body, tag):
    assert_refused("moe", tag, MoE(body), (torch.randn(11, DIM).requires_grad_(),))


def test_experts_of_one_projection():
    module = MoE(lambda m, x, indices, gates: torch.einsum("te,ted->td", matrix(m, x, indices, gates), outputs(m, x)))
    module.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(module.num_experts))
    frames = check(module, (torch.randn(11, DIM).requires_grad_(),))
    (miss,) = frames.misses
    assert (miss.tag, miss.pass_name) == ("projections", "moe") and "one projection" in miss.reason


def test_experts_of_one_projection_in_a_loop():
    module = MoE(where_index_add)
    module.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(module.num_experts))
    assert_refused("moe", "projections", module, (torch.randn(11, DIM).requires_grad_(),))


def test_part_of_a_layer_is_no_near_miss():
    def choices_first(m, x, indices, gates):
        of_choices = torch.einsum("tke,ted->tkd", one_hots(m, x, indices), outputs(m, x))
        return (gates[..., None] * of_choices).sum(1)

    frames = assert_fires("moe", MoE(choices_first), (torch.randn(11, DIM).requires_grad_(),))
    assert not frames.misses


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
