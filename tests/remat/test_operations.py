"""`policy.recompute`: exactly the operations it names run again, beside whatever their kinds' entries say."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.config.checkpointing import KINDS, OPERATIONS, CheckpointingPolicy
from tests.remat import models
from tests.remat.steps import cores, count, same, step

X = models.hidden()
NOTHING = {**dict.fromkeys(KINDS, "none"), "last_layer": "none"}


def made(*blocks, layers=1):
    torch.manual_seed(0)
    return models.Model(*(models.Layer(*(b() for b in blocks)) for _ in range(layers)))


@pytest.fixture(scope="module")
def dense():
    """Steps of a layer of attention and SwiGLU by what is recomputed; () for nothing."""
    model = made(models.Attention, models.SwiGLU)
    every = ((), ("core_attn",), ("mlp",), ("core_attn", "mlp"))
    return {names: step(model, (X,), {"policy": {**NOTHING, "recompute": names}}) for names in every}


pytestmark = pytest.mark.xdist_group("remat operations")


def mms(gm):
    return count(gm, "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "grouped_gemms")


@pytest.mark.end_to_end
def test_what_is_named_runs_again_and_nothing_else(dense):
    """gate and up of the feed-forward; down's result is read by nobody's backward."""
    assert all(same(s, dense[()]) for s in dense.values())
    plain, core, mlp = (dense[names].graphs[1] for names in ((), ("core_attn",), ("mlp",)))
    assert (cores(plain), cores(core), cores(mlp)) == (0, 1, 0)
    assert (mms(core), mms(mlp)) == (mms(plain), mms(plain) + 2)
    both = dense["core_attn", "mlp"]
    assert cores(both.graphs[1]) == 1 and both.saved < dense["mlp",].saved < dense[()].saved
    assert both.remat["ablock"]["entries"] == ["none", "recompute core_attn"]
    assert both.remat["eblock"]["entries"] == ["none", "recompute mlp"]


@pytest.mark.end_to_end
def test_the_last_layer_keeps_its_own():
    policy = {**dict.fromkeys(KINDS, "none"), "recompute": ("core_attn", "mlp")}
    kept = step(made(models.Attention, models.SwiGLU, layers=2), (X,), {"policy": policy})
    assert cores(kept.graphs[1]) == 1


@pytest.mark.end_to_end
def test_beside_other_entries():
    """A core runs again under "selective" too, and projections are saved as ever."""
    model = made(models.Attention, models.SwiGLU, layers=2)
    plain, again = (step(model, (X,), {"policy": {"recompute": names}}) for names in ((), "core_attn"))
    assert same(plain, again) and (cores(plain.graphs[1]), cores(again.graphs[1])) == (0, 1)
    assert mms(plain.graphs[1]) == mms(again.graphs[1]) and again.saved < plain.saved


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("disable", [(), ("moe",)], ids=["op", "plain"])
def test_experts_run_again_with_the_choice_of_the_first_time(disable):
    model = made(lambda: models.Experts(bias=False), models.SwiGLU)
    steps = {
        names: step(model, (X,), {"disable": disable, "policy": {**NOTHING, "recompute": names}})
        for names in ((), ("moe",), ("mlp",))
    }
    for names, found in steps.items():
        assert same(steps[()], found) and (not names or found.saved < steps[()].saved)
        assert count(found.graphs[1], "aten.topk") == 0
    assert mms(steps["moe",].graphs[1]) > mms(steps[()].graphs[1])
    assert steps["mlp",].remat["eblock"]["entries"] == ["none", "recompute mlp"]


@pytest.mark.end_to_end
def test_what_may_be_named():
    assert CheckpointingPolicy(recompute="mlp").recompute == ("mlp",)
    assert CheckpointingPolicy(recompute=["mlp", "moe", "mlp"]).recompute == ("mlp", "moe")
    policy = CheckpointingPolicy(recompute=tuple(OPERATIONS))
    assert CheckpointingPolicy.of(policy.to_dict()) == policy and hash(policy)
