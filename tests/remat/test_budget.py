"""Budgets: what is computed again grows as the budget falls, and the bytes come out as predicted."""

from __future__ import annotations

import pytest
from torch._inductor.custom_graph_pass import CustomGraphPass

from megacpp_compile.remat import budget, kinds, plan, tagging
from megacpp_compile.remat.policy import CheckpointingPolicy
from tests.remat import models
from tests.remat.steps import same, step

FULL = dict.fromkeys(("ablock", "eblock"), "full_plus_norms")
FRACTIONS = [i / 10 for i in range(10, 0, -1)]


class Plans(CustomGraphPass):
    """Every plan for one joint graph, which is left as it is."""

    def __call__(self, graph):
        forward, needed = tagging.joint(graph)
        where = kinds.places(forward, {})
        self.read = budget.read_bytes(needed, forward, where, None)
        self.of = [plan.make(forward, needed, where, CheckpointingPolicy(budget=f)) for f in FRACTIONS]
        self.half = plan.make(forward, needed, where, CheckpointingPolicy(ablock=0.5, eblock=1.0))
        self.where = where

    def uuid(self):
        return None


@pytest.fixture(scope="module")
def plans():
    found = Plans()
    step(models.llama(3), (models.hidden(),), {"inductor": {"joint_custom_post_pass": found}})
    return found


def test_a_lower_budget_never_keeps_more(plans):
    saved = [p.saved_bytes() for p in plans.of]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) >= 5
    products = [{n for n in p.recomputed if "mm" in str(n.target)} for p in plans.of]
    assert all(a <= b for a, b in zip(products, products[1:], strict=False)) and products[-1] > products[0]


def test_budgets_are_met_where_they_can_be(plans):
    least = plans.of[-1].saved_bytes()
    for fraction, made in zip(FRACTIONS, plans.of, strict=True):
        assert made.saved_bytes() <= fraction * plans.read or made.saved_bytes() == least
    assert plans.of[5].saved_bytes() <= 0.5 * plans.read


def test_a_kind_of_its_own(plans):
    def of(kind, made):
        return sum(plan.kept_bytes(n) for n in made.saved if plans.where[n].kind == kind)

    assert of("ablock", plans.half) < of("ablock", plans.of[0])
    assert of("eblock", plans.half) == of("eblock", plans.of[0])


def test_everything_in_the_layers_of_latent_attention_can_be_given_up():
    model, inputs = models.mla(2)
    made, full = (step(model, inputs, {"policy": p}) for p in (0.0, {**FULL, "last_layer": "full_plus_norms"}))
    assert made.saved <= full.saved
    assert same(made, full)


def test_what_was_planned_is_what_is_saved():
    model = models.llama(2)
    plain, policed = step(model, (models.hidden(),), {}), step(model, (models.hidden(),), {"policy": 0.3})
    assert same(plain, policed) and policed.saved < 0.5 * plain.saved
    assert policed.remat["ablock"]["entries"] == ["0.3"]
    assert 0 <= policed.saved - policed.predicted <= 2 * 5056  # the random state of each core computed again
