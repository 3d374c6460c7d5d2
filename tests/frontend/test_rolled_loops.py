"""Loops over tokens are traced once where all steps are one step at consecutive positions, and with all steps where
they are not, or where no op serves for them; results and gradients are eager's."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from megacpp_compile.frontend import rolled_loops
from tests.frontend.loops_of_steps import DIFFERENT, SAME, TOKENS

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


def drawn():
    q, k, v, g = (torch.randn(2, 3, TOKENS, 4) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v, -g.abs())]


def results(f, inputs):
    outputs = f(*(x * 1 for x in inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), inputs, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]


def compiled(f, **options):
    """(the report, marks of the loops that are compiled from a few steps) of `f`, held to eager."""
    inputs, short = drawn(), []
    before = rolled_loops.check
    step = torch.compile(f, backend="megacpp", options={"rolled_loops": True} | options)
    with pytest.MonkeyPatch.context() as patch, megacpp_compile.record() as report:

        def check(gm, rewritten):
            before(gm, rewritten)
            short.extend(rolled_loops.short(gm))

        patch.setattr(rolled_loops, "check", check)
        found = results(step, inputs)
    for one, other in zip(found, results(f, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * max(float(other.detach().abs().max()), 1e-3))
    return report, short


@pytest.mark.parametrize("name", SAME)
def test_is_traced_once(name):
    report, short = compiled(SAME[name])
    assert short and {site.pass_name for site in report.sites} == {"token_loop"}
    assert len(report.sites) == 1 + (name == "twice_in_a_row")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_is_traced_step_by_step(name):
    _, short = compiled(DIFFERENT[name])
    assert not short


def test_explain_looks_at_a_few_steps():
    options = {"rolled_loops": True}
    report = megacpp_compile.explain(SAME["appends_and_stacks"], *drawn(), options=options)
    assert [site.pass_name for site in report.sites] == ["token_loop"]
    report = megacpp_compile.explain(DIFFERENT["goes_by_parity"], *drawn(), options=options)
    assert not report.sites and "step-by-step" in {miss.tag for miss in report.misses}


def test_says_which_loop_is_traced_step_by_step():
    report, _ = compiled(DIFFERENT["goes_by_parity"])
    (miss,) = [m for m in report.misses if m.tag == "step-by-step"]
    assert "loops_of_steps.py" in miss.source and "position" in miss.reason
