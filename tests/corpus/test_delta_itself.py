"""Every spelling of the delta-rule family computes its recurrence, with the same gradients; no near miss does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .delta.block import CHUNKED, LINEAR, TOKENS, PlainDelta, Spelling
from .delta.near_misses import NEAR_DELTA_RULES, NEAR_LINEAR
from .delta.parts import over_longer_norm, over_norm, repeated

EXACT = 1e-10
SPELLINGS = {"chunked": CHUNKED, "tokens": TOKENS, "linear": LINEAR}


def recurrence(delta):
    """The recurrence as it is defined."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        b, t, h, width = v.shape
        q, k = repeated(norm(q), h), repeated(norm(k), h)
        decay = torch.ones(b, t, h, 1, dtype=v.dtype) if g is None else g.exp()
        decay = decay.expand(b, t, h) if decay.dim() == 1 else decay
        decay = decay if decay.dim() == 4 else decay[..., None]
        state, out = torch.zeros(b, h, k.shape[-1], width, dtype=v.dtype) if state is None else state, []
        for i in range(t):
            state = decay[:, i, :, :, None] * state
            new = v[:, i]
            if delta:
                new = beta[:, i, :, None] * (new - torch.einsum("bhkv,bhk->bhv", state, k[:, i]))
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], new)
            out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
        return torch.stack(out, 1), state

    return form


def results(module, args):
    out = module(*args)
    leaves = [*args, *module.parameters()]
    grads = torch.autograd.grad(sum(o.sin().sum() for o in out), leaves, allow_unused=True, materialize_grads=True)
    return [*out, *grads]


def errors(spelling, length, given=False, delta=None):
    """Of outputs and gradients against the recurrence, in float64."""
    module = PlainDelta(spelling, given=given, state=True).double()
    args = module.example_inputs(length, dtype=torch.float64)
    got = results(module, args)
    module.spelling = dataclasses.replace(spelling, form=recurrence(spelling.delta if delta is None else delta))
    want = results(module, args)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(got, want, strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in SPELLINGS.items() for name in names])
def test_spelling(kind, name):
    spelling = SPELLINGS[kind][name]
    for length in (8, 12) if spelling.whole else (12, 10):
        for given in (False, True):
            assert max(errors(spelling, length, given)) <= EXACT


@pytest.mark.parametrize("name", NEAR_DELTA_RULES)
def test_near_delta_rule(name):
    """In whole chunks of 8, of which a series that is cut off leaves out most."""
    assert max(errors(Spelling(NEAR_DELTA_RULES[name]), 16, given=True)) > 1e-3


@pytest.mark.parametrize("name", NEAR_LINEAR)
def test_near_linear_attention(name):
    assert max(errors(Spelling(NEAR_LINEAR[name]), 12, given=True, delta=False)) > 1e-3


@pytest.mark.parametrize("norm", [over_norm, over_longer_norm])
def test_norms_without_eps_agree(norm):
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x * torch.rsqrt((x * x).sum(-1, keepdim=True)))
