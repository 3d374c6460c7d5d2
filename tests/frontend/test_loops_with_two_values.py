"""`expert(rows) if len(rows) else rows`: what a branch leaves behind is the same either way where there are no rows."""

from __future__ import annotations

import pytest
import torch

from tests.frontend.loops_with_two_values import FUSE, OTHER
from tests.frontend.test_expert_loops import all_to_one, compiled, fuses, tokens
from tests.passes.experts import DIM, Expert, MoE, Ungated

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


@pytest.mark.parametrize("body", FUSE, ids=lambda body: body.__name__)
def test_fuses(body):
    """Of four experts two have no tokens at first."""
    module = MoE(body, Ungated, experts=4)
    fuses(compiled(module, tokens(1)))
    torch._dynamo.reset()
    report = compiled(all_to_one(module), *(torch.rand(n, DIM).requires_grad_() for n in (9, 5, 3)))
    assert not report.misses and not any(f.graph_break for f in report.frames) and report.counts["moe"] >= 1


@pytest.mark.parametrize("body", FUSE, ids=lambda body: body.__name__)
def test_dynamic_shapes(body):
    fuses(compiled(MoE(body, Expert), tokens(), dynamic=True))


@pytest.mark.parametrize("body", OTHER, ids=lambda body: body.__name__)
def test_what_makes_a_difference(body):
    """Of four experts two have no tokens at first. Behind a graph break numbers are constants, and a branch on them is
    none: what fuses there assumes nothing."""
    module, misses = MoE(body, Ungated, experts=4), []
    for n in (1, 6):
        torch._dynamo.reset()
        report = compiled(module, tokens(n))
        assert not any(frame.expert_loops for frame in report.frames)
        misses += [m for m in report.misses if m.pass_name == "moe"]
    assert misses


def test_an_expert_that_is_skipped_has_no_gradient():
    """By default the report says so, and nothing is taken."""
    report = compiled(MoE(FUSE[0], Ungated, experts=4), tokens(1), loops="auto")
    assert not report.counts["moe"] and any("has no gradient" in m.reason for m in report.misses)
