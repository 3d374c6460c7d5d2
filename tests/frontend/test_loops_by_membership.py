"""`if e in indices.unique()` in a loop over experts is read as one over all, where nothing else depends on it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.frontend.loops_by_membership import FUSE, STAY, among_choices, among_distinct_choices
from tests.frontend.test_expert_loops import all_to_one, compiled, fuses, tokens
from tests.passes.experts import DIM, MoE, Ungated

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


@pytest.mark.parametrize("body", FUSE, ids=lambda body: body.__name__)
def test_fuses(body):
    fuses(compiled(MoE(body, Ungated), tokens()))


@pytest.mark.parametrize("body", [among_distinct_choices, among_choices], ids=lambda body: body.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_tokens(body, dtype):
    """Two of four experts have none, and sizes become symbols."""
    module = all_to_one(MoE(body, Ungated, experts=4)).to(dtype)
    report = compiled(
        module, *(torch.rand(n, DIM, dtype=dtype).requires_grad_() for n in (9, 5, 7)), dynamic=True,
        tolerance=4e-2 if dtype is torch.bfloat16 else 1e-5,
    )  # fmt: skip
    assert report.counts["moe"] >= 1 and not report.misses and not counters["graph_break"]


@pytest.mark.parametrize("body", STAY, ids=lambda body: body.__name__)
def test_stays(body):
    """Of four experts two have no tokens, of all tokens or of the first."""
    module = all_to_one(MoE(body, Ungated, experts=4))
    report = compiled(module, torch.rand(5, DIM).requires_grad_(), tokens(3))
    assert not any(frame.expert_loops for frame in report.frames)
    assert any(frame.graph_break for frame in report.frames)


def test_without_gradients():
    module, x = MoE(among_distinct_choices, Ungated, experts=4).eval(), tokens().detach()
    with torch.no_grad():
        got = torch.compile(module, backend="megacpp", fullgraph=True)(x)
        torch.testing.assert_close(got, module(x))
