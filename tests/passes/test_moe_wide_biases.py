"""Experts whose biases are in float32 behind GEMMs in bfloat16, as autocast leaves them: what is added stays as exact as
eager has it, however large the biases are beside what they are added to."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import largest_error, run, train
from tests.lowerings import relative_error

from .contract import assert_refused
from .experts import CHOICES, DIM, EXPERTS, HIDDEN, clamped_swiglu, loop, swiglu

NAME, TOKENS = "moe", 200
WEIGHTS = ("gradient of both", "gradient of down")
AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Biased(nn.Module):
    """Routes by some of a token's own channels, in which autocast has no part."""

    def __init__(self, body, size: float = 1.0):
        super().__init__()
        self.body, self.num_experts = body, EXPERTS
        self.both, self.down = (nn.Parameter(torch.randn(EXPERTS, *s) / 3) for s in ((2 * HIDDEN, DIM), (DIM, HIDDEN)))
        self.b_both, self.b_down = (nn.Parameter(size * torch.randn(EXPERTS, n)) for n in (2 * HIDDEN, DIM))

    def forward(self, x):
        gates, indices = x[:, :EXPERTS].softmax(-1).topk(CHOICES, dim=-1)
        return self.body(self, x, indices, gates)


@loop
def by_rows(m, x, gates, e, token, choice):
    """As transformers' gpt-oss."""
    hidden = clamped_swiglu(x[token] @ m.both[e].T + m.b_both[e])
    out = (hidden.to(x.dtype) if hidden.dtype is torch.float64 else hidden) @ m.down[e].T + m.b_down[e]
    return (out * gates[token, choice, None]).to(x.dtype)


@loop
def pairs_by_rows(m, x, gates, e, token, choice):
    """Gate and up are projections of their own, of which one has a bias."""
    (gate, up), rows = m.both[e].chunk(2), x[token]
    out = F.linear(F.silu(F.linear(rows, gate)) * (m.b_both[e, :HIDDEN] + F.linear(rows, up)), m.down[e])
    return (out * gates[token, choice, None]).to(x.dtype)


def added_in_place(m, x, indices, gates):
    """As transformers' `batched_mm`: what a bias is added to in place stays narrow."""
    ids = indices.reshape(-1).clamp(0, EXPERTS - 1)
    both = torch.bmm(m.both[ids], x.repeat_interleave(CHOICES, dim=0)[..., None]).squeeze(-1).add_(m.b_both[ids])
    out = torch.bmm(m.down[ids], swiglu(both)[..., None]).squeeze(-1).add_(m.b_down[ids])
    return (out * gates.reshape(-1, 1)).view(x.shape[0], CHOICES, -1).sum(dim=1)


def of_all(m, x, indices, gates):
    matrix = torch.zeros_like(x[:, :EXPERTS]).scatter(1, indices, gates)
    hidden = swiglu(torch.einsum("td,ehd->teh", x, m.both) + m.b_both)
    return torch.einsum("ted,te->td", torch.einsum("teh,edh->ted", hidden, m.down) + m.b_down, matrix)


def of_chosen(m, x, indices, gates):
    hidden = swiglu(torch.einsum("td,tkhd->tkh", x, m.both[indices]) + m.b_both[indices])
    out = torch.einsum("tkh,tkdh->tkd", hidden, m.down[indices]) + m.b_down[indices]
    return (out * gates[..., None]).sum(1)


@pytest.mark.sampled(3, unit=9)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("size", [1.0, 64.0], ids=["alike", "large"])
@pytest.mark.parametrize("body", [by_rows, pairs_by_rows, added_in_place, of_all, of_chosen], ids=lambda f: f.__name__)
def test_as_exact_as_eager(body, size, dynamic):
    module, inputs = Biased(body, size), [torch.randn(TOKENS, DIM).requires_grad_() for _ in range(3)]
    frames = run(module, (inputs[0],), around=AUTOCAST, dynamic=dynamic)
    assert frames.counts[NAME] == 1, frames.misses
    ours, theirs = Counter(), Counter()
    for x in inputs:  # how a few numbers are rounded is chance, in eager too
        exact, eager = train(module, module, (x,)), train(module, module, (x,), AUTOCAST)
        got = train(frames.compiled, module, (x,), AUTOCAST)
        for name, want in exact.items():
            assert got[name].dtype == eager[name].dtype, name
            ours[name] += relative_error(got[name], want)
            theirs[name] += relative_error(eager[name], want)
    # Of copies of weights for each choice eager rounds every gradient, and sums in float32; a GEMM rounds the sum.
    bounds = {name: max(theirs.values()) if name in WEIGHTS else theirs[name] for name in ours}
    worse = {name: (ours[name], bounds[name]) for name in ours if ours[name] > 1.25 * bounds[name] + 1e-6}
    assert not worse
    assert len(frames.graphs) == 1


@pytest.mark.end_to_end
def test_biases_wider_than_float32_stay():
    module = Biased(by_rows).bfloat16()
    module.b_both, module.b_down = (nn.Parameter(b.detach().double()) for b in (module.b_both, module.b_down))
    assert_refused(NAME, "bias", module, (torch.randn(TOKENS, DIM).bfloat16(),))


@loop
def narrowed_before_the_bias(m, x, gates, e, token, choice):
    """A product in float32 that is rounded before a narrow bias is added."""
    out = swiglu((x[token] @ m.both[e].T).bfloat16() + m.b_both[e].bfloat16()).float() @ m.down[e].T
    return out * gates[token, choice, None]


def test_a_bias_narrower_than_the_product_stays():
    assert_refused(NAME, "bias", Biased(narrowed_before_the_bias), (torch.randn(TOKENS, DIM),))


def test_graph_keeps_the_biases_wide():
    """No copy of them in bfloat16; the rows before the activation stay in float32, as eager keeps them."""
    frames = run(Biased(by_rows), (torch.randn(TOKENS, DIM).requires_grad_(),), around=AUTOCAST)
    (node,) = (n for n in frames.graph.graph.nodes if n.target is torch.ops.megacpp.moe.default)
    (hidden,) = node.meta["val"][1]
    assert [b.meta["val"].dtype for b in node.args[12:]] == [torch.float32] * 2 and hidden.dtype is torch.float32
    assert node.args[0].meta["val"].dtype is torch.bfloat16


def test_second_step_is_eager_again():
    module, x = Biased(by_rows, 8.0), torch.randn(TOKENS, DIM).requires_grad_()
    frames = run(module, (x,), around=AUTOCAST)
    again = train(frames.compiled, copy.deepcopy(module), (x,), AUTOCAST)
    assert largest_error({"y": again["output 0"]}, {"y": train(module, module, (x,), AUTOCAST)["output 0"]})[0] < 1e-2
