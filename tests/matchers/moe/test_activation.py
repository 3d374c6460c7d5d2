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


PRODUCTS = {
    "as_gpt_oss": (
        lambda g, u: (u.clamp(min=-7.0, max=7.0) + 1) * ((h := g.clamp(min=None, max=7.0)) * torch.sigmoid(h * 1.702)),
        GPT_OSS,
    ),
    "factors_in_another_order": (
        lambda g, u: torch.special.expit(1.702 * (h := torch.clamp_max(g, 7))) * ((1.0 + u.clip(-7, 7)) * h), GPT_OSS
    ),
    "by_exponentials": (
        lambda g, u: (
            (h := g.clone().clamp_(max=7.0)) / (1 + torch.exp(-1.702 * h)) * (u.clamp(min=-7).clamp(max=7) - (-1))
        ),
        GPT_OSS,
    ),
    "by_silu_of_the_multiple": (
        lambda g, u: F.silu(1.702 * g.clamp(max=7)) / 1.702 * (u.clamp(-7, 7) + 1), GPT_OSS
    ),
    "clamped_twice": (
        lambda g, u: (g.clamp(max=7) * (g.clamp(max=7) * 1.702).sigmoid()) * (u.clamp(-7, 7) + 1), GPT_OSS
    ),
    "as_glm": (lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(min=-7.0, max=7.0), LIMITED),
    "in_float32": (lambda g, u: (F.silu(g.float().clamp(max=7)) * u.float().clamp(-7, 7)).to(g.dtype), LIMITED),
    "behind_silu": (
        lambda g, u: F.silu(g).clamp(max=7.0) * u.clamp(min=-7.0, max=7.0),
        "silu(result=clamp -inf 7.0, up=clamp -7.0 7.0)",
    ),
    "hardtanh": (lambda g, u: F.silu(g) * F.hardtanh(u, -7.0, 7.0), "silu(up=hardtanh -7.0 7.0)"),
    "minimum": (
        lambda g, u: F.silu(torch.minimum(g, torch.full((), 7.0))) * torch.maximum(torch.full((), -7.0), u),
        "silu(gate=minimum -inf 7.0, up=minimum -7.0 inf)",
    ),
    "quick_gelu": (lambda g, u: g * torch.sigmoid(1.702 * g) * u, "silu(alpha=1.702)"),
    "softcapped": (lambda g, u: F.gelu(30 * torch.tanh(g / 30)) * u, "gelu(gate=tanh -30.0 30.0)"),
    "softcapped_result": (lambda g, u: torch.tanh(F.silu(g) * 0.125).mul(8.0) * u, "silu(result=tanh -8.0 8.0)"),
    "sigmoid by hand": (lambda g, u: u * g * torch.sigmoid(g), "silu"),
    "relu twice": (lambda g, u: F.relu(g) * F.relu(g) * u, "relu2"),
    "relu around": (lambda g, u: F.relu(g) * (u * F.relu(g)), "relu2"),
    "clamp squared": (lambda g, u: g.clamp(min=0) ** 2 * u, "relu2"),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("function", "activation"), PRODUCTS.values(), ids=PRODUCTS)
def test_products(function, activation):
    expert = read(function, (5, 8), (5, 8))
    assert isinstance(expert, Expert), expert
    assert (expert.activation, expert.layout) == (activation, "pair")
    assert [gemm.node.name for gemm in expert.ups] == ["arg0_1", "arg1_1"]


@pytest.mark.parametrize("function", [
    lambda h: F.relu(h) ** 2, lambda h: F.relu(h).pow(2), lambda h: torch.square(torch.relu(h)),
    lambda h: F.relu(h) * F.relu(h), lambda h: (r := h.clone().relu_()) * r,
])  # fmt: skip
def test_squared_relu(function):
    expert = read(function, (5, 8))
    assert isinstance(expert, Expert) and (expert.activation, expert.layout) == ("relu2", "single")


CUTS = {
    "halves": (lambda both: both.chunk(2, -1), "gate_up", "silu"),
    "view_of_halves": (lambda both: both.view(5, 2, 8).unbind(1), "gate_up", "silu"),
    "in_turn": (lambda both: (both[..., ::2], both[..., 1::2]), "interleaved", "silu"),
    "pairs": (lambda both: both.reshape(5, 8, 2).unbind(-1), "interleaved", "silu"),
    "pairs_by_number": (lambda both: (
        (pairs := both.unflatten(-1, (-1, 2)))[..., 0], pairs[..., 1],
    ), "interleaved", "silu"),
    "clamped_before": (lambda both: (
        (bounded := both.clamp(-3, 3))[..., ::2], bounded[..., 1::2],
    ), "interleaved", "silu(gate=clamp -3.0 3.0, up=clamp -3.0 3.0)"),
}  # fmt: skip


def cut_by(cut):
    """An expert whose gate and up are `cut` from one projection."""

    def function(both):
        gate, up = cut(both)
        return F.silu(gate) * up

    return read(function, (5, 16))


@pytest.mark.parametrize(("cut", "layout", "activation"), CUTS.values(), ids=CUTS)
def test_layouts(cut, layout, activation):
    expert = cut_by(cut)
    assert isinstance(expert, Expert), expert
    assert (expert.layout, expert.activation) == (layout, activation)


@pytest.mark.parametrize("function, tag", [
    (lambda g, u: F.silu(g.clamp(max=u.amax())) * u, "clamp"), (lambda g, u: F.silu(g.clamp(min=1.0)) * u, "clamp"),
    (lambda g, u: F.silu(g) * (u + 1).clamp(-7, 7), "projections"),
    (lambda g, u: F.silu(g.clamp(-7, 7).clamp(-5, 5)) * u, "projections"),
    (lambda g, u: F.silu(g + 1) * u, "projections"), (lambda g, u: g * torch.sigmoid(u) * g, "activation"),
    (lambda g, u: F.silu(1.702 * g) / 1.7 * u, "activation"), (lambda g, u: F.silu(g) * u * u, "projections"),
    (lambda g, u: 30 * torch.tanh(F.silu(g) / 20) * u, "activation"), (lambda g, u: torch.sigmoid(g) * u, "activation"),
    (lambda g, u: F.relu(g) * F.relu(u), "projections"),
])  # fmt: skip
def test_refused(function, tag):
    failure = read(function, (5, 8), (5, 8))
    assert isinstance(failure, MatchFailure) and failure.tag == tag, failure


@pytest.mark.parametrize("cut", [
    lambda both: (both[..., 1::2], both[..., ::2]), lambda both: (both[..., ::2], both[..., ::2]),
    lambda both: (both[..., :8:2], both[..., 1:8:2]), lambda both: (both[..., ::2], both[..., 8:]),
], ids=["up first", "the same", "a part", "a half"])  # fmt: skip
def test_other_channels_are_refused(cut):
    failure = cut_by(cut)
    assert isinstance(failure, MatchFailure) and failure.tag == "halves", failure
