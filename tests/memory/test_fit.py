"""`fit`: levers in the order of their cost, until a step fits; and what an error of memory does."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import CheckpointingPolicy
from megacpp_compile.cli import main
from megacpp_compile.config.checkpointing import KINDS
from megacpp_compile.errors import BadOptionError, FitError
from megacpp_compile.memory import fit, pareto
from tests.memory.layered import Model, Small, ids
from tests.passes import experts
from tests.remat import models as blocks

# One worker makes what all tests share, and keeps it.
pytestmark = pytest.mark.xdist_group("fit")


def test_no_lever_weakens_the_one_before():
    """Whatever it begins with, remat is never turned off, and nothing that was asked for is dropped."""
    order = ("none", "selective", "full", "full_plus_norms")
    asked = (None, CheckpointingPolicy(), CheckpointingPolicy(ablock="full", eblock=0.3, last_layer="full"),
             CheckpointingPolicy(mblock="conv_bc_only", offload="all", recompute_q_upproj=True))  # fmt: skip
    for start in asked:
        policies = [lever.policy for lever in fit.policy_candidates(start)]
        assert policies[0] is start and None not in policies[1:] and len(policies) >= 9
        for one, other in zip(policies[1:], policies[2:], strict=False):
            for kind in KINDS:
                before, after = getattr(one, kind), getattr(other, kind)
                assert before == after or order.index(before) < order.index(after)
            for flag in ("recompute_kv_upproj", "recompute_q_upproj"):
                assert getattr(other, flag) >= getattr(one, flag)
            assert one.offload == "none" or other.offload == one.offload
        assert policies[-1].offload != "none" and policies[-1].fp8_wrapper == "auto"
        if start is not None:
            budgets = [k for k in KINDS if isinstance(getattr(start, k), float)]
            assert all(getattr(p, k) == getattr(start, k) for p in policies for k in budgets)
    assert all(p.mblock == "conv_bc_only" for p in policies)


@pytest.fixture(scope="session")
def peaks():
    """Estimated peaks of the levers on a model of two layers, in GiB."""
    found = {}
    model, x = blocks.llama(2), blocks.hidden().requires_grad_()
    for lever in fit.policy_candidates(None):
        if lever.name in ("none", "selective", "full: eblock, mblock, rblock, ablock"):
            policy = lever.policy or CheckpointingPolicy.of("none")
            found[lever.name] = megacpp_compile.estimate(model, x, options={"policy": policy})
    return found


@pytest.mark.end_to_end
def test_estimates_by_lever(peaks):
    none, selective, full = peaks.values()
    assert none.peak > selective.peak > full.peak
    assert full.levers["eblock"]["again"] > selective.levers["eblock"]["again"]
    assert full.levers["eblock"]["saved"] < selective.levers["eblock"]["saved"]
    assert full.transient > 0 and json.loads(json.dumps(full.to_dict()))["peak"] == full.peak
    assert "computed again" in str(full)


@pytest.mark.end_to_end
def test_the_first_lever_that_fits(peaks, no_kernels):
    model, x = blocks.llama(2), blocks.hidden().requires_grad_()
    between = (peaks["none"].peak + peaks["selective"].peak) / 2 / 2**30
    with megacpp_compile.record() as report:
        found = megacpp_compile.fit(model, x, limit_gib=between, settings={"whole_below": 0})
        assert [t.name for t in found.tried] == ["none", "selective"] and found.policy.eblock == "selective"
        found.run(lambda: model(x).sum().backward())
    assert "in force" in str(found) and "too much" in str(found)
    assert report.estimate == found.to_dict() and report.to_json()
    assert all(f.remat for f in report.frames), "what was only tried is none of the report's business"


@pytest.mark.end_to_end
def test_a_loop_over_experts_that_fuses(monkeypatch):
    """What the compiler takes, the search for a policy takes."""
    monkeypatch.setattr(fit, "compile", lambda model, **settings: None)
    model = nn.Sequential(*(experts.MoE(experts.where_index_add) for _ in range(2)))
    x = torch.randn(experts.TOKENS, experts.DIM, requires_grad=True)
    none = megacpp_compile.estimate(model, x, options={"policy": CheckpointingPolicy.of("none")})
    assert none.compiled < none.eager
    found = megacpp_compile.fit(model, x, limit_gib=none.peak / 2**30)
    assert found.lever.name == "none" and found.lever.estimate.peak == none.peak


@pytest.mark.end_to_end
def test_nothing_fits():
    with pytest.raises(FitError, match="lowest estimated peak"):
        megacpp_compile.fit(Model(2, block=Small), ids(), limit_gib=1e-6)
    with pytest.raises(BadOptionError, match="limit_gib"):
        megacpp_compile.fit(Model(2, block=Small), ids(), limit_gib=-1)


@pytest.mark.end_to_end
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ranks_take_the_costliest_policy_that_one_of_them_needs(monkeypatch, one_rank):
    """The other rank is one of another model's: what it says is put where it would arrive."""
    monkeypatch.setattr(fit, "compile", lambda model, **settings: None)
    names = [lever.name for lever in fit.policy_candidates(None)]
    gather = torch.distributed.all_gather_object
    given = Model(2, block=Small), ids()

    def fitted(*other, limit_gib=100.0):
        def gathered(every, own, group):
            gather(every, own, group)
            every.extend(other)

        monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
        return megacpp_compile.fit(*given, limit_gib=limit_gib, group=torch.distributed.group.WORLD)

    assert fitted().lever.name == "none"
    found = fitted((names.index("selective"), 1, 1, "selective"))
    assert [t.name for t in found.tried] == ["none", "selective"] and found.policy.eblock == "selective"
    assert found.lever.estimate is None and "in force" in str(found) and json.dumps(found.to_dict())
    assert found.retry() and names.index(found.lever.name) > names.index("selective")
    with pytest.raises(FitError, match="into 3 GiB: the lowest estimated peak is 4 GiB"):
        fitted((len(names), 3 * 2**30, 4 * 2**30, "full"))
    with pytest.raises(FitError, match="into 1e-05 GiB"):
        fitted((0, 2**40, 1, "none"), limit_gib=1e-5)


@pytest.mark.end_to_end
def test_out_of_memory_goes_one_lever_on_and_keeps_every_setting(few_objects, monkeypatch):
    """Regression: a retry once compiled with its defaults, and so without remat."""
    given = []
    monkeypatch.setattr(fit, "compile", lambda model, **settings: given.append(settings))
    options = {"keep_latents": True, "block_kinds": {"layers.*.mlp": "eblock"}, "policy": {"ablock": "full"}}
    found = megacpp_compile.fit(Model(2, block=Small), ids(), limit_gib=1.0, options=options,
                                settings={"mode": "max-autotune-no-cudagraphs"})  # fmt: skip
    failures = 3

    def step():
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise torch.OutOfMemoryError("no room")
        return "done"

    assert found.run(step) == "done" and len(given) == 4
    policies = [settings["options"].pop("policy") for settings in given]
    assert all(settings == given[0] for settings in given)
    options.pop("policy")
    assert given[0] == {"mode": "max-autotune-no-cudagraphs", "options": options}
    assert all(p is not None and p.ablock in ("full", "full_plus_norms") for p in policies)
    assert len(set(policies)) == 4 and found.policy == policies[-1]
    assert found.to_dict()["out_of_memory"] == [t.name for t in found.tried[:3]]
    failures = 100
    with pytest.raises(torch.OutOfMemoryError):
        found.run(step)
    assert found.policy.offload == "inputs"


def build():
    return blocks.llama(2), (blocks.hidden().requires_grad_(),)


@pytest.mark.end_to_end
def test_plan_on_the_command_line(capsys, monkeypatch, tmp_path):
    """Two policies are enough to see the path; all of them are a list."""
    monkeypatch.setitem(sys.modules, "planned", sys.modules[__name__])
    some = [("selective", CheckpointingPolicy()), ("full", CheckpointingPolicy.of("full"))]
    assert {name for name, _ in pareto._candidates()} > {"none", "selective", "budget 0.4"}
    monkeypatch.setattr(pareto, "_candidates", lambda: iter(some))
    drawing = tmp_path / "plan.svg"
    assert main(["plan", "planned:build", "--json", "--plot", str(drawing)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("selective", "full") and first["best"] and second["best"]
    assert first["activations"] > second["activations"] and 0 < first["seconds"] < second["seconds"]
    assert "selective" in drawing.read_text()
    point = pareto.Point("full", some[1][1], 2**30, 2**31, 1e-3, True)
    monkeypatch.setattr(pareto, "points", lambda *args, **kwargs: [point])
    assert main(["plan", "planned:build"]) == 0 and "1 GiB" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "planned:build", "--plot", "plan.png"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and "matplotlib" in captured.err  # at once: no plan is made that cannot be drawn
