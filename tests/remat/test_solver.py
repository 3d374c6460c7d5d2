"""Budgets: what backward recomputes grows as the budget falls, and the bytes come out as predicted."""

from __future__ import annotations

import pytest
from torch._inductor.custom_graph_pass import CustomGraphPass

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.errors import PeakUnreachableError
from megacpp_compile.remat import peak, solver
from megacpp_compile.remat.joint_graph import joint
from megacpp_compile.remat.kinds import blocks_of
from megacpp_compile.remat.plan import ALONE, StepContext, kept_bytes
from megacpp_compile.remat.planner import make_plan
from tests.remat import models
from tests.remat.steps import same, step

# One worker makes what all tests share, and keeps it.
pytestmark = pytest.mark.xdist_group("remat budgets")

KINDS = ("ablock", "eblock")
FULL = dict.fromkeys(KINDS, "full_plus_norms")
FRACTIONS = [i / 10 for i in range(10, 0, -1)]


def limited(size):
    return CheckpointingPolicy(peak_gib=size / 2**30)


class Plans(CustomGraphPass):
    """Every plan for one joint graph, which is left as it is."""

    def __call__(self, graph):
        forward, needed = joint(graph)
        blocks = blocks_of(forward, {})
        self.read = solver.read_bytes(needed, forward, blocks, None)
        self.of = [make_plan(forward, needed, blocks, CheckpointingPolicy(budget=f)) for f in FRACTIONS]
        self.half = make_plan(forward, needed, blocks, CheckpointingPolicy(ablock=0.5, eblock=1.0))
        self.blocks = blocks
        live = peak.PeakModel(graph)
        self.peaks = [live(p) for p in self.of]
        self.before = ALONE.before(graph)
        most, least = (self.before + self.peaks[i].of() for i in (0, -1))
        # The lowest promise is a margin above the lowest prediction.
        self.limits = [most + (least * 1.05 - most) * i / 7 for i in range(8)]
        self.met = [live(make_plan(forward, needed, blocks, limited(limit))) for limit in self.limits]
        self.copies = make_plan(forward, needed, blocks, limited(1.5 * most), around=StepContext(copies=2))
        try:
            make_plan(forward, needed, blocks, limited(least / 2))
        except PeakUnreachableError as error:
            self.error = error

    def uuid(self):
        return None


@pytest.fixture(scope="session")
def plans():
    found = Plans()
    step(models.llama(3), (models.hidden(),), {"inductor": {"joint_custom_post_pass": found}})
    return found


@pytest.mark.end_to_end
def test_a_lower_budget_never_keeps_more_or_peaks_higher(plans):
    saved = [p.saved_bytes() for p in plans.of]
    peaks = [p.of() for p in plans.peaks]
    for found in (saved, peaks):
        assert found == sorted(found, reverse=True) and len(set(found)) >= 5
    products = [{n for n in p.recomputed if "mm" in str(n.target)} for p in plans.of]
    assert all(a <= b for a, b in zip(products, products[1:], strict=False)) and products[-1] > products[0]


@pytest.mark.end_to_end
def test_limits_on_the_peak_are_met(plans):
    found = [plans.before + p.of() for p in plans.met]
    assert all(f <= limit for f, limit in zip(found, plans.limits, strict=True))
    assert found == sorted(found, reverse=True) and len(set(found)) >= 5
    # Two such graphs in one step share the limit.
    assert plans.copies.saved_bytes() < plans.of[0].saved_bytes()


@pytest.mark.end_to_end
def test_a_limit_that_cannot_be_met(plans):
    error = plans.error
    assert error.limit < error.lowest <= plans.before + peak.MARGIN * plans.peaks[-1].of()
    assert f"{error.lowest / 2**30:.3g} GiB" in str(error) and "batch" in str(error)


@pytest.mark.end_to_end
def test_budgets_are_met_where_they_can_be(plans):
    least = plans.of[-1].saved_bytes()
    for fraction, made in zip(FRACTIONS, plans.of, strict=True):
        assert made.saved_bytes() <= fraction * plans.read or made.saved_bytes() == least
    assert plans.of[5].saved_bytes() <= 0.5 * plans.read
    # Of the half plan, whose budget is its attention's alone.
    half, whole = ({kind: sum(kept_bytes(n) for n in made.saved if plans.blocks[n].kind == kind) for kind in KINDS}
                   for made in (plans.half, plans.of[0]))  # fmt: skip
    assert half["ablock"] < whole["ablock"] and half["eblock"] == whole["eblock"]


@pytest.mark.exhaustive
def test_what_is_in_the_layers_of_latent_attention_is_given_up_unless_the_peak_would_rise():
    model, inputs = models.mla(2)
    full = {**FULL, "last_layer": "full_plus_norms"}
    plain, made, whole = (step(model, inputs, {"policy": p}) for p in (1.0, 0.0, full))
    peaks = [s.report.predicted_peak for s in (plain, made, whole)]
    assert made.saved < 0.5 * plain.saved and peaks[1] <= min(peaks)
    assert same(made, whole) and same(made, plain)


@pytest.mark.end_to_end
def test_what_was_planned_is_what_is_saved():
    model = models.llama(1)
    plain, policed = step(model, (models.hidden(),), {"policy": "none"}), step(model, (models.hidden(),), {"policy": 0.3})
    assert same(plain, policed) and policed.saved < 0.5 * plain.saved
    assert policed.remat["ablock"]["entries"] == ["0.3"]
    assert 0 <= policed.saved - policed.predicted <= 5056  # the random state of the core computed again
