"""Saved values through main memory: which, what the two graphs do with them, and gradients to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import megacpp_compile
from megacpp_compile.remat import offload
from tests.remat import models
from tests.remat.steps import count, same, step, without_code

# One worker makes what all tests share, and keeps it.
pytestmark = pytest.mark.xdist_group("offload")

BETWEEN = models.hidden().nbytes


@pytest.fixture(scope="session")
def plain():
    return step(models.llama(3), (models.hidden(),), {"policy": "full"})


@pytest.mark.parametrize("what", ["inputs", "all"])
def test_what_waits_in_main_memory(plain, what, monkeypatch):
    monkeypatch.setattr(offload, "LEAST", BETWEEN)
    policy = {"ablock": "full", "eblock": "full", "offload": what}
    made = step(models.llama(3), (models.hidden(),), {"policy": policy})
    assert same(made, plain)
    away = count(made.graphs[0], "megacpp.offload")
    assert away == count(made.graphs[1], "megacpp.reload") > 0
    assert sum(kind["offloaded"] for kind in made.remat.values()) == away * BETWEEN
    assert made.predicted == plain.predicted - away * BETWEEN
    assert (away == 2) == (what == "inputs"), "two values pass from layer to layer"
    assert made.report.predicted_peak < plain.report.predicted_peak
    assert "offloaded" in str(made.report)


def test_nothing_by_default(plain):
    assert count(plain.graphs[0], "megacpp.offload") == 0
    assert all(kind["offloaded"] == 0 for kind in plain.remat.values())


class Users(CustomPartitionerFn):
    calls = 0

    def __call__(self, gm, joint_inputs, **kwargs):
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        Users.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self):
        return "users"


def test_a_partitioner_of_the_users_runs_first():
    options = {"policy": {"offload": "inputs"}, "inductor": {"custom_partitioner_fn": Users()}}
    made = step(models.llama(2), (models.hidden(),), options)
    assert Users.calls == 1 and count(made.graphs[0], "megacpp.offload") == 1
    assert offload.Offload(Users()).uuid() != offload.Offload().uuid()


def test_copies():
    x = torch.randn(3, 4).t()
    there = torch.ops.megacpp.offload(x)
    here = torch.ops.megacpp.reload(there, x.device)
    assert torch.equal(here, x) and here.stride() == there.stride() == x.stride()
    torch.library.opcheck(torch.ops.megacpp.offload.default, (x,))
    torch.library.opcheck(torch.ops.megacpp.reload.default, (there, x.device))


def test_blocks_that_are_graphs_pass_their_inputs_through_main_memory():
    """What one hands on is the next one's input."""
    x, model = models.hidden().requires_grad_(), models.llama(4)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    graphs = []
    with without_code(graphs), megacpp_compile.record() as report:
        megacpp_compile.compile(model, policy={"ablock": "full", "eblock": "full", "offload": "inputs"})
        found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # sums in another order, by processor
    assert [f.blocks for f in report.frames] == [4]
    assert count(graphs[0], "megacpp.offload") == count(graphs[1], "megacpp.reload") == 1
