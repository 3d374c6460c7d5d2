"""The gradient of a rate that the gates of all tokens share, as a model has one a head: a sum that nearly cancels."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings.gated_delta_rule import gated_delta_rule
from megacpp_compile.lowerings.gated_linear_attention import gated_linear_attention

from . import relative_error
from .delta_cases import attention, rule
from .delta_recurrence import delta_rule, linear_attention

OPS = {"gated_delta_rule": (gated_delta_rule, delta_rule, rule),
       "gated_linear_attention": (gated_linear_attention, linear_attention, attention)}


def behind_a_norm(o, seed):
    """As in a model: a norm takes away what a state that decays less would add to the size of its output."""
    return (seed.to(o) * torch.nn.functional.rms_norm(o, o.shape[-1:], eps=1e-6)).sum()


def rates_gradient(function, args, dtype, seed):
    """[h], or for gates a channel [h, k]: that of a factor of all gates, whatever the token."""
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args[:-1]]
    rate = torch.ones(args[3].shape[2:], dtype=dtype, requires_grad=True)
    args[3] = args[3] * rate
    behind_a_norm(function(*args, dtype)[0], seed).backward()
    return rate.grad


@pytest.mark.parametrize("steep", [0.1, 1, 10])
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("op", OPS)
def test_no_further_off_than_step_by_step(rand, op, gate, steep):
    """Gates of some 20 leave nothing of the state: of the products that a token's gate moves both sides are then as large
    as ever, and their difference is nothing."""
    function, plain, cases = OPS[op]
    args = list(cases(rand, torch.float32, b=1, t=150, gate=gate, initial=False, chunk=64))
    args[3] = steep * args[3]
    seed = rand(*args[2].shape)
    want = rates_gradient(plain, args, torch.float64, seed)
    got, stepwise = (rates_gradient(f, args, torch.float32, seed) for f in (function, plain))
    assert relative_error(got, want) < 3 * relative_error(stepwise, want) + 8 * torch.finfo(torch.float32).eps
