"""An op that no graph can be traced of stays in the graph, and is called when it runs: a loop over as many chunks as
there are then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megacpp_compile import record
from megacpp_compile.lowerings.gated_delta_rule import gated_delta_rule
from tests.lowerings import relative_error
from tests.lowerings.delta_recurrence import delta_rule

HK, HV, K, V = 2, 4, 8, 6


pytestmark = pytest.mark.usefixtures("no_kernels")


class Mixer(nn.Module):
    """Projections into slices of one buffer, the op, a projection out."""

    def __init__(self, op=gated_delta_rule):
        super().__init__()
        self.op, self.sizes = op, [HK * K, HK * K, HV * V, HV * K, HV]
        self.inner, self.outer = nn.Linear(16, sum(self.sizes)), nn.Linear(HV * V, 16)

    def forward(self, x):
        q, k, v, g, beta = self.inner(x).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, n)) for t, n in ((q, K), (k, K), (v, V)))
        g = -nn.functional.softplus(g).unflatten(-1, (HV, K))
        o = self.op(q, k, v, g, beta.sigmoid(), None, None, K**-0.5, 1e-6, 16, q.dtype)[0]
        return self.outer(o.flatten(2))


def step(model, call, x):
    x = x.detach().requires_grad_()
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_forward_and_backward(dynamic):
    torch.manual_seed(0)
    model = Mixer().double()
    plain = Mixer(lambda *args: delta_rule(*args)).double()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="megacpp", dynamic=dynamic, fullgraph=True, options={"strict": True})
    with record() as report:
        for t in (130, 147, 200):
            x = torch.randn(1, t, 16).double()
            for got, want in zip(step(model, compiled, x), step(plain, plain, x), strict=True):
                assert relative_error(got, want) < 1e-10
    assert len(report.frames) == 1 or not dynamic


def test_autocast():
    torch.manual_seed(0)
    model, x, results = Mixer(), torch.randn(2, 20, 16), []
    for call in (torch.compile(model, backend="megacpp", fullgraph=True, options={"strict": True}), model):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(model, call, x))
    assert all(got.dtype == want.dtype and relative_error(got, want) < 2e-2 for got, want in zip(*results, strict=True))


def test_inference():
    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(1, 70, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="megacpp")(x), model(x), rtol=1e-5, atol=1e-5)
