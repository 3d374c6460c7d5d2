"""What each entry saves and recomputes: bytes counted on the partitioned forward, gradients to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models import Layer, SparseMLA, Stack
from benchmarks.subjects import dsa
from megacpp_compile.passes import sparse_mla
from tests.remat import models
from tests.remat.steps import KEEPS_RANDOM_STATE, cores, count, same, step

pytestmark = pytest.mark.xdist_group("remat entries")  # one worker compiles the steps all tests share


@pytest.fixture(scope="session")
def steps():
    entries = ("none", "selective", "full", "full_plus_norms")
    return {entry: step(*models.mla(2), {"policy": entry}) for entry in entries}


@pytest.mark.end_to_end
def test_each_entry_keeps_less_than_the_one_before_and_gradients_are_the_same_to_the_last_bit(steps):
    saved = [s.saved for s in steps.values()]
    assert saved[0] > saved[1] > saved[2] > saved[3]
    assert all(same(s, steps["none"]) for s in steps.values())


@pytest.mark.end_to_end
def test_predicted_bytes_are_what_the_forward_saves_and_the_report_says_it_by_kind(steps):
    for entry, again in (("selective", 0), ("full", 1), ("full_plus_norms", 1)):
        states = again * KEEPS_RANDOM_STATE
        assert steps[entry].predicted == steps[entry].saved - states * torch.get_rng_state().nbytes
    assert steps["none"].report.frames[0].remat is None
    assert all(f.captured for s in steps.values() for f in s.report.frames)
    found, report = steps["selective"].remat, steps["selective"].report
    assert {k: v["blocks"] for k, v in found.items()} == {"ablock": 2, "eblock": 2, "": 0}
    assert found["ablock"]["entries"] == ["selective", "never"]
    assert "remat" in str(report) and "nodes recomputed" in str(report)
    assert type(report).from_json(report.to_json()).frames[0].remat == found


@pytest.mark.end_to_end
def test_selective_computes_keys_and_values_again_and_the_latent_once(steps):
    """One of two layers, as the last is never: one up-projection, and the latent where it was before. The core
    runs again under "full" alone."""
    plain, selective, full = (steps[e].graphs[1] for e in ("none", "selective", "full"))
    assert count(selective, "aten.mm", "aten.addmm") == count(plain, "aten.mm", "aten.addmm") + 1
    assert [cores(g) for g in (plain, selective, full)] == [0, 0, 1]


@pytest.mark.end_to_end
def test_projections_of_queries_are_asked_for():
    policies = ({"recompute_kv_upproj": False}, {}, {"recompute_q_upproj": True})
    made = [step(*models.mla(1), {"policy": policy}) for policy in policies]
    assert made[0].saved > made[1].saved > made[2].saved
    assert same(made[0], made[2])


@pytest.mark.end_to_end
def test_queries_of_sparse_attention_are_absorbed_again(monkeypatch):
    """From 16 channels a head to 40; at DeepSeek's widths, from 192 to 576. As the last layer the only one is never, but
    where its entry is written."""
    monkeypatch.setattr(sparse_mla, "LEAST_ROWS", 0)
    size = dsa.Size("", tokens=64, topk=4, dim=models.DIM, heads=6, q_lora=24, kv_lora=32, nope=8, rope=8, v=8)
    torch.manual_seed(0)
    widths = size.dim, size.heads, size.q_lora, size.kv_lora, size.nope, size.rope, size.v
    model = Stack([Layer(SparseMLA(size.topk, *widths), size.dim, 48) for _ in range(1)]).bfloat16()
    inputs = dsa.inputs(size, torch.device("cpu"))
    kept, again = (step(model, inputs, {"policy": {"recompute_kv_upproj": asked, "last_layer": "selective"}}) for asked in (False, True))
    assert same(kept, again)
    assert kept.report.counts["sparse_mla"] == 1
    queries = 2 * size.tokens * size.heads * (size.kv_lora + size.rope)
    assert kept.saved - again.saved >= queries


@pytest.mark.end_to_end
def test_experts_products_only():
    """Under "expert_gemm_only" all of the rest is kept, and what selects is not chosen again, whatever is asked.
    `disable` leaves GEMMs that can be counted."""
    torch.manual_seed(0)
    model = models.Model(models.Layer(nn.Identity(), models.Experts()))
    plain = step(model, (models.hidden(),), {"disable": "moe"})
    for entry in ("expert_gemm_only", "full_plus_norms"):
        policed = step(model, (models.hidden(),), {"disable": "moe", "policy": {"eblock": entry}})
        assert same(plain, policed) and policed.saved < plain.saved
        assert count(policed.graphs[1], "aten.topk") == 0 < count(policed.graphs[0], "aten.topk")
        assert count(policed.graphs[1], "mm.default") > count(plain.graphs[1], "mm.default")


@pytest.mark.end_to_end
def test_convolutions_only():
    """Depthwise, which moves bytes more than it multiplies; `disable` leaves it a node that can be counted."""
    torch.manual_seed(0)
    model, name = models.Model(models.Layer(models.Mixer(), models.Mixer())), "aten.convolution.default"
    plain = step(model, (models.hidden(),), {"disable": "causal_conv1d"})
    policed = step(model, (models.hidden(),), {"disable": "causal_conv1d", "policy": "conv_bc_only"})
    assert same(plain, policed) and policed.remat["mblock"]["blocks"] == 2 and policed.saved < plain.saved
    assert count(policed.graphs[1], name) > count(plain.graphs[1], name)
    assert count(policed.graphs[1], "aten.mm", "aten.addmm") == count(plain.graphs[1], "aten.mm", "aten.addmm")
