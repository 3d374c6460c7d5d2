"""`policy.recompute`: exactly the operations it names run again, beside whatever their kinds' entries say."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.config.checkpointing import KINDS, OPERATIONS, CheckpointingPolicy
from megacpp_compile.errors import BadOptionError
from tests.remat import models
from tests.remat.steps import cores, count, same, step

X = models.hidden()


def made(*blocks):
    torch.manual_seed(0)
    return models.Model(*(models.Layer(*(b() for b in blocks)) for _ in range(2)))


@pytest.fixture(scope="module")
def dense():
    """Steps of two layers of attention and SwiGLU by what is recomputed; () for nothing."""
    model = made(models.Attention, models.SwiGLU)
    return {
        names: step(model, (X,), {"policy": {**dict.fromkeys(KINDS, "none"), "last_layer": last, "recompute": names}})
        for names, last in (((), "none"), (("core_attn",), "none"), (("mlp",), "none"), (("core_attn", "mlp"), "none"))
    }


pytestmark = pytest.mark.xdist_group("remat operations")


def mms(gm):
    return count(gm, "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "grouped_gemms")


def test_gradients_are_the_same_to_the_last_bit(dense):
    assert all(same(s, dense[()]) for s in dense.values())


def test_attention_cores_run_again_and_nothing_else(dense):
    plain, again = dense[()].graphs[1], dense["core_attn",].graphs[1]
    assert (cores(plain), cores(again)) == (0, 2) and mms(plain) == mms(again)


def test_feed_forwards_run_again_and_nothing_else(dense):
    """gate and up of each of the two; down's result is read by nobody's backward."""
    plain, again = dense[()].graphs[1], dense["mlp",].graphs[1]
    assert mms(again) == mms(plain) + 2 * 2 and cores(again) == 0
    assert dense["mlp",].saved < dense[()].saved


def test_both(dense):
    both = dense["core_attn", "mlp"]
    assert cores(both.graphs[1]) == 2 and both.saved < dense["mlp",].saved
    found = both.remat
    assert found["ablock"]["entries"] == ["none", "recompute core_attn"]
    assert found["eblock"]["entries"] == ["none", "recompute mlp"]


def test_the_last_layer_keeps_its_own():
    model = made(models.Attention, models.SwiGLU)
    policy = {**dict.fromkeys(KINDS, "none"), "recompute": ("core_attn", "mlp")}
    kept = step(model, (X,), {"policy": policy})
    assert cores(kept.graphs[1]) == 1


def test_beside_other_entries():
    """A core runs again under "selective" too, and projections are saved as ever."""
    model = made(models.Attention, models.SwiGLU)
    plain, again = (step(model, (X,), {"policy": {"recompute": names}}) for names in ((), "core_attn"))
    assert same(plain, again) and (cores(plain.graphs[1]), cores(again.graphs[1])) == (0, 1)
    assert mms(plain.graphs[1]) == mms(again.graphs[1]) and again.saved < plain.saved


@pytest.mark.parametrize("disable", [(), ("moe",)], ids=["op", "plain"])
def test_experts_run_again_with_the_choice_of_the_first_time(disable):
    model = made(lambda: models.Experts(bias=False), models.SwiGLU)
    steps = {
        names: step(model, (X,), {"disable": disable, "policy": {**dict.fromkeys(KINDS, "none"), "last_layer": "none",
                                                                "recompute": names}})
        for names in ((), ("moe",), ("mlp",))
    }  # fmt: skip
    assert same(steps[()], steps["moe",]) and same(steps[()], steps["mlp",])
    assert steps["moe",].saved < steps[()].saved and steps["mlp",].saved < steps[()].saved
    for made_by in steps.values():
        assert count(made_by.graphs[1], "aten.topk") == 0
    assert mms(steps["moe",].graphs[1]) > mms(steps[()].graphs[1])
    assert steps["mlp",].remat["eblock"]["entries"] == ["none", "recompute mlp"]


def test_what_may_be_named():
    assert CheckpointingPolicy(recompute="mlp").recompute == ("mlp",)
    assert CheckpointingPolicy(recompute=["mlp", "moe", "mlp"]).recompute == ("mlp", "moe")
    policy = CheckpointingPolicy(recompute=tuple(OPERATIONS))
    assert CheckpointingPolicy.of(policy.to_dict()) == policy and hash(policy)
    for value, words in (("core_atn", "Did you mean 'core_attn'"), (("mlp", 3), "policy.recompute"), (3, "names among")):
        with pytest.raises(BadOptionError, match=words):
            CheckpointingPolicy(recompute=value)
