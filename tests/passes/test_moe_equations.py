"""Experts that are weighted, and gates that are normalised, by equations of more than two tensors or of none that are
summed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check_graph

from .contract import assert_autocast, assert_dynamic, assert_fires, assert_refused
from .experts import DIM, MoE, loop, matrix, swiglu, where_index_add


def outputs(m, x, experts=None):
    return torch.stack([expert(x) for expert in experts or m.experts], 1)


def one_hots(m, x, indices):
    return F.one_hot(indices, m.num_experts).to(x.dtype)


def given(count=11, dtype=torch.float32):
    return (torch.randn(count, DIM, dtype=dtype).requires_grad_(),)


def by_matrix(sums, more=lambda m, x, of: (), seen=lambda y, of: y):
    """`sums` of a matrix of gates, all outputs, and more that is made of the matrix."""

    def body(m, x, indices, gates):
        of = matrix(indices, gates)
        return seen(torch.einsum(sums, of, outputs(m, x), *more(m, x, of)), of)

    return body


def scaled_in_the_sum(m, x, indices, gates):
    of, scale = matrix(indices, gates), x.new_full((), 2.5)
    return torch.einsum("t,te,,ted->td", x[:, 0].exp(), of, scale, outputs(m, x))


def normalised_by_an_equation(m, x, indices, gates):
    of = matrix(indices, gates)
    return torch.einsum("te,ted->td", torch.einsum("te,t->te", of, 1 / of.sum(-1)), outputs(m, x))


def normalised_one_hots(m, x, indices, gates, chosen=lambda indices: indices):
    of = torch.einsum("tk,tke,t->te", gates, one_hots(m, x, chosen(indices)), 1 / gates.sum(-1))
    return torch.einsum("te,ted->td", of, outputs(m, x))


FIRES = {
    "normalised_in_the_sum": by_matrix("te,ted,t->td", lambda m, x, of: (1 / of.sum(-1),)),
    "scaled_in_the_sum": scaled_in_the_sum,
    "normalised_by_an_equation": normalised_by_an_equation,
    "normalised_one_hots": normalised_one_hots,
    "rows_by_an_equation": loop(
        lambda m, x, g, e, token, choice: torch.einsum("rd,r->rd", m.experts[e](x[token]), g[token, choice])),
    # as a loss that balances experts reads it
    "matrix_read_elsewhere": by_matrix("te,ted->td", seen=lambda y, of: (y, of.mean(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRES)
def test_fires(name):
    assert_fires("moe", MoE(FIRES[name]).double(), given(dtype=torch.float64))


@pytest.mark.parametrize("name", list(FIRES)[:4])
def test_bfloat16(name):
    assert check_graph(MoE(FIRES[name]).bfloat16(), given(dtype=torch.bfloat16)).counts["moe"] == 1


# --- sums over choices and experts at once


def in_another_order(m, x, indices, gates):
    every = torch.stack([expert(x) for expert in m.experts])
    return torch.einsum("etd,tek,kt->td", every, one_hots(m, x, indices).mT, gates.t())


def products_summed(m, x, indices, gates):
    weighted = gates[:, :, None, None] * one_hots(m, x, indices)[..., None] * outputs(m, x)[:, None]
    return weighted.sum((1, 2))


def compared_with_all_numbers(m, x, indices, gates):
    marks = (indices[..., None] == torch.arange(m.num_experts)).to(x.dtype)
    return torch.einsum("tk,tke,ted->td", gates, marks, outputs(m, x))


OVER_CHOICES = {
    "of_gates_and_one_hots": (
        lambda m, x, i, g: torch.einsum("tk,tke,ted->td", g, one_hots(m, x, i), outputs(m, x))),
    "in_another_order": in_another_order,
    "scaled_one_hots": (
        lambda m, x, i, g: torch.einsum("tke,ted->td", g[..., None] * one_hots(m, x, i), outputs(m, x))),
    "products_summed": products_summed,
    "scaled_by_token": lambda m, x, i, g: (
        torch.einsum("t,tk,tke,ted->td", x[:, 0].exp(), g, one_hots(m, x, i), outputs(m, x))),
    "compared_with_all_numbers": compared_with_all_numbers,
    # a choice that comes twice counts twice
    "repeated_choices": (
        lambda m, x, i, g: torch.einsum("tk,tke,ted->td", g, one_hots(m, x, i // 2), outputs(m, x))),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_CHOICES)
def test_fires_over_choices(name):
    assert_fires("moe", MoE(OVER_CHOICES[name]).double(), given(dtype=torch.float64))


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(OVER_CHOICES)[:4])
def test_over_choices_of_batches(name):
    def of_batches(m, x, *chosen):
        return OVER_CHOICES[name](m, *(t.flatten(0, 1) for t in (x, *chosen))).view_as(x)

    assert_dynamic("moe", MoE(of_batches), lambda n: (torch.randn(2, n, DIM).requires_grad_(),), everything=True)


def of_stacked(m, x, indices, gates):
    hidden = swiglu(torch.einsum("td,ehd->teh", x, m.gate_up))
    return torch.einsum("tk,tke,teh,edh->td", gates, one_hots(m, x, indices), hidden, m.down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fires_over_choices_of_stacked_weights(dtype):
    assert check_graph(MoE(of_stacked, stacked=True).to(dtype), given(dtype=dtype)).counts["moe"] == 1


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


@pytest.mark.parametrize(
    "body", [marks_that_are_soft, gates_of_experts, gates_of_the_next_choice], ids=lambda body: body.__name__
)
def test_does_not_fire_over_choices(body):
    frames = check_graph(MoE(body), given())
    assert not frames.counts["moe"] and frames.tags("moe") == {"gates"}


# --- experts that run once for each choice


def over_each(outs, marks=lambda hots: hots):
    """The body that weighs and sums `outs(m, x, k)` [T, k, E, d], all experts' outputs for each choice."""

    def body(m, x, indices, gates):
        each = outs(m, x, indices.shape[-1])
        return torch.einsum("tk,tke,tked->td", gates, marks(one_hots(m, x, indices)), each)

    return body


def each_choice(m, rows):
    """The outputs [T, k, E, d] for `rows` [T, k, d]."""
    return torch.stack([expert(rows) for expert in m.experts], 2)


def expanded(x, k):
    return x[:, None].expand(-1, k, -1)


def of_repeated(rows):
    return lambda m, x, k: outputs(m, rows(x, k)).unflatten(0, (-1, k))


def run_anew(m, x, k):
    return torch.stack([outputs(m, x) for _ in range(k)], 1)


def run_anew_and_scaled(m, x, indices, gates):
    each = torch.stack([outputs(m, x) for _ in range(indices.shape[-1])], 2)
    return torch.einsum("t,tk,tke,tekd->td", x[:, 0].exp(), gates, one_hots(m, x, indices), each)


def choice_by_choice(m, x, indices, gates):
    """Experts run again for every choice, weighted by the marks of this one."""
    hots = one_hots(m, x, indices)
    return sum(torch.einsum("t,te,ted->td", gates[:, k], hots[:, k], outputs(m, x)) for k in range(indices.shape[-1]))


ONCE_A_CHOICE = {
    "tokens_expanded": over_each(lambda m, x, k: each_choice(m, expanded(x, k))),
    "tokens_repeated": over_each(of_repeated(lambda x, k: x.repeat_interleave(k, 0))),
    "tokens_read_for_each_slot": over_each(of_repeated(lambda x, k: x[torch.arange(len(x) * k) // k])),
    "run_anew": over_each(run_anew),
    "run_anew_and_scaled": run_anew_and_scaled,
}


@pytest.mark.parametrize("name", [*ONCE_A_CHOICE, "choice_by_choice"])
def test_fires_once_a_choice(name):
    module = MoE(ONCE_A_CHOICE.get(name, choice_by_choice)).double()
    assert_fires("moe", module, given(dtype=torch.float64), 1 if name in ONCE_A_CHOICE else 2)


def test_one_of_several_choices():
    def second(m, x, indices, gates):
        return torch.einsum("te,ted->td", gates[:, 1:] * one_hots(m, x, indices)[:, 1], outputs(m, x))

    assert_fires("moe", MoE(second).double(), given(dtype=torch.float64))


def test_once_a_choice_with_stacked_weights():
    def of_stacked(m, x, k):
        hidden = swiglu(torch.einsum("tkd,ehd->tkeh", expanded(x, k), m.gate_up))
        return torch.einsum("tkeh,edh->tked", hidden, m.down)

    assert_fires("moe", MoE(over_each(of_stacked), stacked=True), given())


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["tokens_expanded", "tokens_repeated", "run_anew"])
def test_once_a_choice_of_every_length(name):
    assert_dynamic("moe", MoE(ONCE_A_CHOICE[name]), given, everything=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*list(ONCE_A_CHOICE)[1:], "normalised_in_the_sum"])
def test_autocast(name):
    """A scale in float32, as an equation takes it under autocast, leaves the sum in bfloat16."""
    assert_autocast("moe", MoE((ONCE_A_CHOICE | FIRES)[name]), given(200))


# name: (the tag of the refusal, body)
OF_CHOICES = {
    "marks_of_one_choice_twice": ("gates", over_each(run_anew, lambda hots: hots[:, :1].expand(-1, hots.shape[1], -1))),
    "rows_of_choices": ("rows", over_each(lambda m, x, k: each_choice(m, torch.stack([x, x * 2], 1)))),
    "run_on_other_tokens": (
        "rows", over_each(lambda m, x, k: torch.stack([outputs(m, x), outputs(m, x.roll(1, 0))], 1))),
    # slot s is of token s % T
    "tokens_tiled": ("rows", over_each(of_repeated(lambda x, k: x.repeat(k, 1)))),
    "experts_of_choices": ("experts-differ", over_each(
        lambda m, x, k: torch.stack([outputs(m, x), outputs(m, x, m.experts[::-1])], 1))),
    "marks_of_the_next_choice": (
        "gates", over_each(lambda m, x, k: each_choice(m, expanded(x, k)), lambda hots: hots.flip(1))),
    "changed_in_between": ("no-expert", over_each(lambda m, x, k: each_choice(m, expanded(x, k)).cumsum(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CHOICES)
def test_refused_once_a_choice(name):
    tag, body = OF_CHOICES[name]
    assert_refused("moe", tag, MoE(body), given())


def of_one_projection(body):
    module = MoE(body)
    module.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(module.num_experts))
    return module


def test_experts_of_one_projection():
    (miss,) = check_graph(of_one_projection(by_matrix("te,ted->td")), given()).misses
    assert (miss.tag, miss.pass_name) == ("projections", "moe") and "one projection" in miss.reason


def test_experts_of_one_projection_in_a_loop():
    assert_refused("moe", "projections", of_one_projection(where_index_add), given())


def test_part_of_a_layer_is_no_near_miss():
    def choices_first(m, x, indices, gates):
        of_choices = torch.einsum("tke,ted->tkd", one_hots(m, x, indices), outputs(m, x))
        return (gates[..., None] * of_choices).sum(1)

    assert not assert_fires("moe", MoE(choices_first), given()).misses


# --- what else multiplies the sum


def softmax_scaled_in_the_sum(m, x, indices, gates):
    """Every expert works on every token."""
    g = m.router(x).softmax(-1)
    return torch.einsum("te,ted,t->td", g, outputs(m, x), 1 / g.square().sum(-1))


NONE = {
    "scaled_channels": by_matrix("te,ted,d->td", lambda m, x, of: (x[0].exp(),)),
    "scaled_experts": by_matrix("te,ted,e->td", lambda m, x, of: (x[0, : m.num_experts].exp(),)),
    "softmax_scaled_in_the_sum": softmax_scaled_in_the_sum,
    "one_hots_of_choices_that_repeat": lambda m, x, i, g: normalised_one_hots(m, x, i, g, lambda i: i // 2),
}


@pytest.mark.parametrize("name", NONE)
def test_does_not_fire(name):
    frames = check_graph(MoE(NONE[name]), given())
    assert not frames.counts["moe"] and frames.tags("moe") in ({"gates"}, {"dense-gates"})
