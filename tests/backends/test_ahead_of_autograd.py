"""On a CPU ops over few tokens are expanded ahead of autograd, unless a policy, a checkpoint or autocast speaks of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile import record
from megacpp_compile.passes._frame.sites import OF_AUTOGRAD
from tests.corpus.delta.block import PlainDelta
from tests.corpus.retention import PlainRetention, blocks, one_triangle
from tests.corpus.selective_scans import PlainMamba1
from tests.frames import largest_error, train

pytestmark = pytest.mark.usefixtures("no_kernels")


class GatedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.weight = nn.Linear(10, 24), nn.Parameter(1 + torch.randn(12) / 4)

    def forward(self, x):
        y, z = self.proj(x).chunk(2, -1)
        return self.weight * F.rms_norm(y, (12,), None, 1e-5) * F.silu(z)

    def example_inputs(self):
        return (torch.randn(2, 5, 10, requires_grad=True),)


class DeltaChunks(PlainDelta):
    def example_inputs(self):
        return super().example_inputs(24)[:1]


MODELS = {
    "triangle": lambda: PlainRetention(one_triangle, learned=True),
    "chunks": lambda: PlainRetention(blocks, learned=True, state=True, given=True),
    "steps": PlainMamba1,
    "delta": DeltaChunks,
    "norm": GatedNorm,
}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = PlainRetention(one_triangle)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def compiled_step(monkeypatch, model, args, options=None, around=None, dynamic=None):
    """(the site of the only op, how many backwards of ops are lowered, results and gradients)"""
    from megacpp_compile.backends import _lower

    backwards, lower = [], _lower._lower

    def seen(graph, node, *rest, **named):
        backwards.extend([node.name] * node.name.endswith("_backward"))
        return lower(graph, node, *rest, **named)

    monkeypatch.setattr(_lower, "_lower", seen)
    torch._dynamo.reset()
    with record() as report:
        compiled = torch.compile(model, backend="megacpp", options=options, dynamic=dynamic)
        results = train(compiled, model, args, *around or ())
    (site,) = report.sites
    return site, len(backwards), results


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_float64(monkeypatch, name):
    model = MODELS[name]()
    wide, args = copy.deepcopy(model).double(), model.example_inputs()
    site, backwards, got = compiled_step(monkeypatch, model, args)
    assert (site.effective, site.saved_after, site.saved_reason, backwards) == ("cpu_autograd", None, OF_AUTOGRAD, 0)
    want = train(wide, wide, tuple(a.detach().double().requires_grad_() for a in args))
    error, which = largest_error(got, {key: t.float() for key, t in want.items()})
    assert error < 5e-6, which


@pytest.mark.parametrize(
    ("model", "options", "around"),
    [
        (lambda: PlainRetention(one_triangle), {"policy": "selective"}, None),
        (Checkpointed, None, None),
        (lambda: PlainRetention(one_triangle), None, (lambda: torch.autocast("cpu", torch.bfloat16),)),
    ],
    ids=["policy", "checkpoint", "autocast"],
)
def test_ops_stay_where_something_speaks_of_them(monkeypatch, model, options, around):
    model = model()
    args = (torch.randn(2, 12, 10, requires_grad=True),)
    site, backwards, got = compiled_step(monkeypatch, model, args, options, around)
    assert backwards == 1 and site.saved_reason != OF_AUTOGRAD
    error, which = largest_error(got, train(model, model, args, *around or ()))
    assert error < (0.05 if around else 1e-5), which


def test_lengths_that_vary_stay_ops(monkeypatch):
    model = PlainRetention(one_triangle)
    args = (torch.randn(2, 12, 10, requires_grad=True),)
    site, backwards, _ = compiled_step(monkeypatch, model, args, dynamic=True)
    assert (site.lowering.partition(" (")[0], backwards) == ("cpu_autograd → cpu_chunks", 1)
