"""What may lie between an expert's GEMMs, in the ways that people write it, and what only looks like it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.experts import Expert, expert_ending_in
from megacpp_compile.matchers.moe.gemms import Gemm, Weight
from tests.matchers.graphs import trace

GPT_OSS = "silu(alpha=1.702, gate=clamp -inf 7.0, up=clamp -7.0 7.0, offset=1.0)"
LIMITED = "silu(gate=clamp -inf 7.0, up=clamp -7.0 7.0)"


def read(function, *shapes):
    """What is read of `function` between GEMMs that give its arguments and one that reads its result."""
    traced = trace(function, *(torch.randn(shape) for shape in shapes))

    def match_gemm(node):
        return Gemm(node, traced.inputs[0], Weight(node)) if node.op == "placeholder" else None

    return expert_ending_in(Gemm(traced.output, traced.output, Weight(traced.output)), match_gemm)


def as_gpt_oss(gate, up):
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def factors_in_another_order(gate, up):
    gate = torch.clamp_max(gate, 7)
    return torch.special.expit(1.702 * gate) * ((1.0 + up.clip(-7, 7)) * gate)


def by_exponentials(gate, up):
    gate = gate.clone().clamp_(max=7.0)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up.clamp(min=-7).clamp(max=7) - (-1))


def by_silu_of_the_multiple(gate, up):
    return F.silu(1.702 * gate.clamp(max=7)) / 1.702 * (up.clamp(-7, 7) + 1)


def clamped_twice(gate, up):
    return (gate.clamp(max=7) * (gate.clamp(max=7) * 1.702).sigmoid()) * (up.clamp(-7, 7) + 1)


def as_glm(gate, up):
    return F.silu(gate.clamp(max=7.0)) * up.clamp(min=-7.0, max=7.0)


def in_float32(gate, up):
    return (F.silu(gate.float().clamp(max=7)) * up.float().clamp(-7, 7)).to(gate.dtype)


def behind_silu(gate, up):
    return F.silu(gate).clamp(max=7.0) * up.clamp(min=-7.0, max=7.0)


def hardtanh(gate, up):
    return F.silu(gate) * F.hardtanh(up, -7.0, 7.0)




def minimum(gate, up):
    return F.silu(torch.minimum(gate, torch.full((), 7.0))) * torch.maximum(torch.full((), -7.0), up)


def quick_gelu(gate, up):
    return gate * torch.sigmoid(1.702 * gate) * up


def softcapped(gate, up):
    return F.gelu(30 * torch.tanh(gate / 30)) * up


def softcapped_result(gate, up):
    return torch.tanh(F.silu(gate) * 0.125).mul(8.0) * up


@pytest.mark.parametrize(
    "function, activation",
    [
        (as_gpt_oss, GPT_OSS),
        (factors_in_another_order, GPT_OSS),
        (by_exponentials, GPT_OSS),
        (by_silu_of_the_multiple, GPT_OSS),
        (clamped_twice, GPT_OSS),
        (as_glm, LIMITED),
        (in_float32, LIMITED),
        (behind_silu, "silu(result=clamp -inf 7.0, up=clamp -7.0 7.0)"),
        (hardtanh, "silu(up=hardtanh -7.0 7.0)"),
        (minimum, "silu(gate=minimum -inf 7.0, up=minimum -7.0 inf)"),
        (quick_gelu, "silu(alpha=1.702)"),
        (softcapped, "gelu(gate=tanh -30.0 30.0)"),
        (softcapped_result, "silu(result=tanh -8.0 8.0)"),
        (lambda g, u: u * g * torch.sigmoid(g), "silu"),
        (lambda g, u: F.relu(g) * F.relu(g) * u, "relu2"),
        (lambda g, u: F.relu(g) * (u * F.relu(g)), "relu2"),
        (lambda g, u: g.clamp(min=0) ** 2 * u, "relu2"),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_products(function, activation):
    expert = read(function, (5, 8), (5, 8))
    assert isinstance(expert, Expert), expert
    assert (expert.activation, expert.layout) == (activation, "pair")
    assert [gemm.node.name for gemm in expert.ups] == ["arg0_1", "arg1_1"]


@pytest.mark.parametrize(
    "function",
    [
        lambda h: F.relu(h) ** 2,
        lambda h: F.relu(h).pow(2),
        lambda h: torch.square(torch.relu(h)),
        lambda h: F.relu(h) * F.relu(h),
        lambda h: (r := h.clone().relu_()) * r,
    ],
)
def test_squared_relu(function):
    expert = read(function, (5, 8))
    assert isinstance(expert, Expert) and (expert.activation, expert.layout) == ("relu2", "single")


def halves(both):
    return both.chunk(2, -1)


def view_of_halves(both):
    return both.view(5, 2, 8).unbind(1)


def in_turn(both):
    return both[..., ::2], both[..., 1::2]


def pairs(both):
    return both.reshape(5, 8, 2).unbind(-1)


def pairs_by_number(both):
    both = both.unflatten(-1, (-1, 2))
    return both[..., 0], both[..., 1]


def clamped_before(both):
    return in_turn(both.clamp(-3, 3))


@pytest.mark.parametrize(
    "cut, layout",
    [(halves, "gate_up"), (view_of_halves, "gate_up"), (in_turn, "interleaved"), (pairs, "interleaved"),
     (pairs_by_number, "interleaved"), (clamped_before, "interleaved")],
    ids=lambda p: getattr(p, "__name__", p),
)  # fmt: skip
def test_layouts(cut, layout):
    def function(both):
        gate, up = cut(both)
        return F.silu(gate) * up

    expert = read(function, (5, 16))
    assert isinstance(expert, Expert), expert
    bounded = "silu(gate=clamp -3.0 3.0, up=clamp -3.0 3.0)"
    assert (expert.layout, expert.activation) == (layout, bounded if cut is clamped_before else "silu")


@pytest.mark.parametrize(
    "function, tag",
    [
        (lambda g, u: F.silu(g.clamp(max=u.amax())) * u, "clamp"),
        (lambda g, u: F.silu(g.clamp(min=1.0)) * u, "clamp"),
        (lambda g, u: F.silu(g) * (u + 1).clamp(-7, 7), "projections"),
        (lambda g, u: F.silu(g.clamp(-7, 7).clamp(-5, 5)) * u, "projections"),
        (lambda g, u: F.silu(g + 1) * u, "projections"),
        (lambda g, u: g * torch.sigmoid(u) * g, "activation"),
        (lambda g, u: F.silu(1.702 * g) / 1.7 * u, "activation"),
        (lambda g, u: F.silu(g) * u * u, "projections"),
        (lambda g, u: 30 * torch.tanh(F.silu(g) / 20) * u, "activation"),
        (lambda g, u: torch.sigmoid(g) * u, "activation"),
        (lambda g, u: F.relu(g) * F.relu(u), "projections"),
    ],
)
def test_refused(function, tag):
    failure = read(function, (5, 8), (5, 8))
    assert isinstance(failure, MatchFailure) and failure.tag == tag, failure


@pytest.mark.parametrize(
    "cut",
    [
        lambda both: (both[..., 1::2], both[..., ::2]),
        lambda both: (both[..., ::2], both[..., ::2]),
        lambda both: (both[..., :8:2], both[..., 1:8:2]),
        lambda both: (both[..., ::2], both[..., 8:]),
    ],
    ids=["up first", "the same", "a part", "a half"],
)
def test_other_channels_are_refused(cut):
    def function(both):
        gate, up = cut(both)
        return F.silu(gate) * up

    failure = read(function, (5, 16))
    assert isinstance(failure, MatchFailure) and failure.tag == "halves", failure
