"""`policy="auto"` on an XLA device: the same rule, at the target's rates."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from megacpp_compile.backends import automatic
from megacpp_compile.targets.rates import Rates
from tests.remat import models


@pytest.mark.parametrize("sparing", [True, False])
def test_a_stack(xla, monkeypatch, sparing):
    """Gradients are eager's on CPU, with a plan and without; on this target latents are kept in any case."""
    monkeypatch.setattr(automatic, "LEAST_READ", 0)
    monkeypatch.setattr(automatic, "rates", lambda target: Rates(1e9, 1e13, target))
    if not sparing:
        monkeypatch.setattr(automatic, "worth_taking", lambda plan, none: False)
    torch._dynamo.reset()
    model, inputs = models.mla(3)
    x = inputs[0].detach().requires_grad_()
    want = torch.autograd.grad(model(x, *inputs[1:]).square().sum(), [x, *model.parameters()])
    model = model.to(xla)
    x, *tables = (t.detach().to(xla) for t in inputs)
    x.requires_grad_()
    with megacpp_compile.record() as report:
        out = torch.compile(model, backend="megacpp", options={"policy": "auto"})(x, *tables)
        got = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    (found,) = [f.auto for f in report.frames if f.auto]
    assert found["taken"] is sparing and found["rates"] == "tpu" and found["latents"]["kept"] == 0
    assert report.frames[0].chosen == {"keep_latents": True}
    for mine, eager in zip(got, want, strict=True):
        assert (mine.cpu() - eager).abs().max() <= 1e-5 * eager.abs().max()
