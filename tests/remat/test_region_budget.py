"""Memory budgets of regions, torch 2.13 and newer: a second authority beside a policy, and heeded without one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

from megacpp_compile.errors import TwoPoliciesError
from tests.corpus.spellings import PlainMLA
from tests.remat.steps import same, step

COVERAGE = "activation_memory_budget_require_full_coverage"
X = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(3))

needs_regions = pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"),
    reason=f"torch {torch.__version__} has no memory budgets of regions",
)
parts = [
    pytest.param("whole", id="all of the frame"),
    pytest.param("part", id="a part of the frame", marks=pytest.mark.skipif(
        not hasattr(functorch_config, COVERAGE), reason=f"torch {torch.__version__} has budgets for whole frames only")),
]  # fmt: skip


class Model(nn.Module):
    """budget: of its block, or of all it does; None for none."""

    def __init__(self, covers, budget):
        super().__init__()
        torch.manual_seed(3)
        sizes = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}
        self.block, self.covers, self.budget = PlainMLA(24, **sizes, table_source="buffer"), covers, budget

    def region(self, covers):
        if self.budget is None or covers != self.covers:
            return contextlib.nullcontext()
        return torch.autograd.graph.region_activation_memory_budget(self.budget)

    def forward(self, x):
        with self.region("whole"):
            x = x.sin()
            with self.region("part"):
                x = self.block(x)
            return x.exp()


@pytest.fixture(params=parts)
def covers(request):
    """As much of the frame as torch lets a budget be given for."""
    with functorch_config.patch({COVERAGE: False}) if request.param == "part" else contextlib.nullcontext():
        yield request.param


@needs_regions
def test_beside_a_policy(covers):
    """It would count for all of the frame, whatever it is given for."""
    with pytest.raises(TwoPoliciesError, match=r"region_activation_memory_budget\(0.5\)"):
        step(Model(covers, 0.5), (X,), {"policy": "selective"})


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@needs_regions
def test_without_a_policy(covers):
    """Semantic ops are of the region of what they replace: the partitioner misses no part of it. Without Inductor's own
    patterns, as attention that torch 2.13 has put in place is of no region."""
    options = {"inductor": {"pattern_matcher": False}}
    free, bound = (step(Model(covers, budget), (X,), options) for budget in (None, 0.0))
    assert same(free, bound) and bound.saved < free.saved
    for made in (free, bound):
        assert {s.pass_name for s in made.report.sites} == {"down_norm_up", "mla_rope_q", "mla_rope_kv"}
        assert all(frame.captured for frame in made.report.frames)
