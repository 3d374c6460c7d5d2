"""A module that is called several times in a row beside other layers: its calls are layers, recomputed but for the last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.remat.depth_loops import calls_of
from tests.remat import models
from tests.remat.steps import KEEPS_RANDOM_STATE, cores, same, step

DEPTHS = 2
X = models.hidden()


class Depths(nn.Module):
    """Predictions of several tokens ahead by one block, behind a trunk."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = models.Layer(models.Attention(), models.SwiGLU())
        self.join, self.ahead = nn.Linear(2 * models.DIM, models.DIM), models.Layer(models.Attention(), models.SwiGLU())

    def forward(self, x):
        h = self.trunk(x)
        found = [h]
        for depth in range(DEPTHS):
            h = self.ahead(self.join(torch.cat((h, x.roll(-depth - 1, 1)), -1)))
            found.append(h)
        return torch.stack(found)


@pytest.fixture(scope="module")
def steps():
    policies = {"none": None, "kinds": {"depth_loop": "kinds"}, "full": "selective"}
    return {name: step(Depths(), (X,), {"policy": policy}) for name, policy in policies.items()}


pytestmark = pytest.mark.xdist_group("depth loops")


@pytest.mark.end_to_end
def test_all_calls_but_the_last_run_again(steps):
    """Cores of the trunk and of the last call are saved; so is what passes from call to call. Gradients are the same to
    the last bit."""
    assert same(steps["kinds"], steps["none"]) and same(steps["full"], steps["none"])
    assert cores(steps["full"].graphs[1]) == DEPTHS - 1 and cores(steps["kinds"].graphs[1]) == 0
    assert steps["none"].saved > steps["kinds"].saved > steps["full"].saved
    spared = steps["kinds"].saved - steps["full"].saved
    # Of each call queries, keys, values and the core's result, and two of SwiGLU's, three times as wide; less what
    # running again takes beside.
    assert spared >= (DEPTHS - 1) * 8 * X.nbytes


@pytest.mark.end_to_end
def test_the_report_has_a_block_for_each_call(steps):
    found = steps["full"].remat
    assert found["ablock"]["blocks"] == 1 + DEPTHS
    assert found["ablock"]["entries"] == ["selective", "never", "full in the loop over depth"]
    states = (DEPTHS - 1) * KEEPS_RANDOM_STATE * torch.get_rng_state().nbytes
    assert steps["full"].predicted == steps["full"].saved - states


@pytest.mark.end_to_end
def test_entries_beside_it():
    of = CheckpointingPolicy
    assert [of().entry("ablock", last, True) for last in (False, True)] == ["full", "never"]
    assert of("none").entry("ablock", False, True) == "none", "what is written stands"
    assert of(budget=0.5).entry("ablock", False, True) == "never"
    assert of(depth_loop="full_plus_norms").entry("eblock", False, True) == "full_plus_norms"
    assert of.of(of(depth_loop="kinds").to_dict()) == of(depth_loop="kinds")


class Calls(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.block, self.cell = body, models.Layer(models.Attention(), nn.Identity()), nn.Linear(models.DIM, models.DIM)
        self.others = models.llama(1)

    def forward(self, x):
        return self.body(self, x)


# Name -> (what is called, numbers of the calls that are layers, whether other layers are beside them).
BODIES = {
    "in a row": (lambda m, x: m.block(m.block(m.block(x))), {0, 1, 2}, False),
    "beside others": (lambda m, x: m.block(m.block(m.others(x))), {0, 1}, True),
    # As one attention block between state-space layers: no loop.
    "between others": (lambda m, x: m.block(m.others(m.block(x))), set(), None),
    # None reads the other's result.
    "of two inputs": (lambda m, x: m.block(x) + m.block(x + 1), set(), None),
    # Tokens do not mix in it.
    "a cell": (lambda m, x: m.others(m.cell(m.cell(x).tanh())), set(), None),
}


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BODIES)
def test_what_is_a_loop(name):
    body, numbers, beside = BODIES[name]
    found = {}

    def look(gm, _):
        nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
        found.update(calls_of(nodes, lambda n: "scaled_dot_product_attention" in str(n.target)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Calls(body), backend=look)(X)
    assert {call.number for call in found.values()} == numbers
    assert {call.beside for call in found.values()} == ({beside} if numbers else set())
    assert {call.module for call in found.values()} <= {"block"}
