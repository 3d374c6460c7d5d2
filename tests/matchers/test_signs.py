"""Signs are told where ops leave no other, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.signs import at_most_zero
from tests.matchers.graphs import trace

AT_MOST_ZERO = {
    "rate times step": lambda x, a: -a.float().exp() * F.softplus(x + a),
    "logsigmoid": lambda x, a: F.logsigmoid(x) / 16,
    "logarithm of a sigmoid": lambda x, a: torch.log(torch.sigmoid(x).float()),
    "two signs": lambda x, a: -F.softplus(x) * -F.softplus(a) * -1.0, "clamped": lambda x, a: (x * a).clamp(max=-0.5),
    "clamped further": lambda x, a: (-x.square()).clamp(min=-5),
    "sums, views and pads": lambda x, a: F.pad(-x.exp().cumsum(0), (0, 1)).view(-1)[1:].flip(0) + -a.abs().sum(),
    "parts": lambda x, a: torch.cat([-x.square(), F.logsigmoid(a)]).split(2)[0],
}  # fmt: skip
EITHER = {
    "an input": lambda x, a: x, "another sign": lambda x, a: a.exp() * F.softplus(x),
    "a sum of both": lambda x, a: -x.exp() + a.exp(), "a bias": lambda x, a: F.logsigmoid(x) + 0.1,
    "clamped from below": lambda x, a: (-x.exp()).clamp(min=0.5),
    "a bound of data": lambda x, a: torch.clamp(-x.exp(), a),
    "padded with more": lambda x, a: F.pad(-x.exp(), (1, 0), value=1.0), "a logarithm": lambda x, a: torch.log(x),
    "one part": lambda x, a: torch.cat([x, -a.exp()]),
}  # fmt: skip


def of(function):
    class Module(torch.nn.Module):
        forward = staticmethod(function)

    graph = trace(Module(), torch.ones(2, 3), torch.ones(2, 3)).graph
    (result,) = graph.output_node().args[0]
    return at_most_zero(result)


@pytest.mark.parametrize("name", AT_MOST_ZERO)
def test_at_most_zero(name):
    x, a = (torch.randn(2, 3) * 3 for _ in range(2))
    assert of(AT_MOST_ZERO[name])
    assert (AT_MOST_ZERO[name](x, a) <= 0).all()


@pytest.mark.parametrize("name", EITHER)
def test_either(name):
    assert not of(EITHER[name])
