"""Saved values through main memory: which, what the two graphs do with them, and gradients to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import megacpp_compile
from megacpp_compile.remat import host_copies, offload
from tests.remat import models
from tests.remat.steps import count, same, step, without_code

# One worker makes what all tests share, and keeps it.
pytestmark = pytest.mark.xdist_group("offload")

BETWEEN = models.hidden().nbytes


@pytest.fixture(scope="session")
def plain():
    return step(models.llama(3), (models.hidden(),), {"policy": "full"})


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["inputs", "all"])
def test_what_waits_in_main_memory(plain, what, monkeypatch):
    """By default nothing does."""
    assert count(plain.graphs[0], "megacpp.offload") == 0
    assert all(kind["offloaded"] == 0 for kind in plain.remat.values())
    monkeypatch.setattr(offload, "LEAST", BETWEEN)
    monkeypatch.setattr(host_copies, "AHEAD", BETWEEN)
    policy = {"ablock": "full", "eblock": "full", "offload": what}
    made = step(models.llama(3), (models.hidden(),), {"policy": policy})
    assert same(made, plain)
    away = count(made.graphs[0], "megacpp.offload")
    assert away == count(made.graphs[1], "megacpp.reload") > 0
    assert sum(kind["offloaded"] for kind in made.remat.values()) == away * BETWEEN
    assert made.predicted == plain.predicted - away * BETWEEN
    assert (away == 2) == (what == "inputs"), "two values pass from layer to layer"
    gained = plain.report.predicted_step - made.report.predicted_step
    assert gained == BETWEEN if what == "inputs" else gained > BETWEEN, "backward begins with one of them on the device"
    assert "offloaded" in str(made.report)


class Users(CustomPartitionerFn):
    calls = 0

    def __call__(self, gm, joint_inputs, **kwargs):
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        Users.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self):
        return "users"


@pytest.mark.end_to_end
def test_a_partitioner_of_the_users_runs_first():
    options = {"policy": {"offload": "inputs"}, "inductor": {"custom_partitioner_fn": Users()}}
    made = step(models.llama(2), (models.hidden(),), options)
    assert Users.calls == 1 and count(made.graphs[0], "megacpp.offload") == 1
    assert offload.Offload(Users()).uuid() != offload.Offload().uuid()


@pytest.mark.end_to_end
def test_copies():
    x = torch.randn(3, 4).t()
    there = torch.ops.megacpp.offload(x)
    torch.ops.megacpp.await_offload(x, there, x)
    here = torch.ops.megacpp.reload(there, x.device)
    assert torch.equal(here, x) and here.stride() == there.stride() == x.stride()
    torch.library.opcheck(torch.ops.megacpp.offload.default, (x,))
    torch.library.opcheck(torch.ops.megacpp.await_offload.default, (x, there, x))
    torch.library.opcheck(torch.ops.megacpp.reload.default, (there, x.device))


@pytest.mark.end_to_end
def test_what_left_before_is_asked_for(monkeypatch):
    """In the reverse order, up to a limit; what nobody keeps is forgotten."""
    values = [torch.full((4,), float(i)) for i in range(6)]
    monkeypatch.setattr(host_copies, "AHEAD", 2 * values[0].nbytes)
    copies = host_copies.HostCopies(torch.device("cpu"))
    away = [copies.leave(x) for x in values]
    copies.ask(away[5])
    assert copies.early() == 1
    assert torch.equal(copies.back(away[5]), values[5]) and copies.early() == 2
    away[4].fill_(9.0)  # it has been copied
    assert torch.equal(copies.back(away[4]), values[4]) and copies.early() == 2
    del away[2]
    assert copies.early() == 1, "that of 3"
    assert torch.equal(copies.back(away[2]), values[3]) and copies.early() == 2
    later = copies.leave(torch.zeros(4))
    assert torch.equal(copies.back(away[1]), values[1]) and torch.equal(copies.back(away[0]), values[0])
    assert copies.early() == 0, "what left later is not asked for"
    assert torch.equal(copies.back(later), torch.zeros(4)) and copies.early() == 2, "those of 1 and 0, which still live"
    assert torch.equal(copies.back(later), torch.zeros(4)), "a second time"
    assert not copies.back(copies.leave(torch.ones(0))).numel()


@pytest.mark.end_to_end
def test_the_order_of_copies_in_generated_code(monkeypatch):
    """Copies from the device are waited for a layer later, and those to it are begun a layer earlier."""
    done: list[tuple[str, int]] = []
    names: dict[int, int] = {}

    def noted(name, plain):
        def method(self, t):
            if name != "leave":
                done.append((name, names[t.data_ptr()]))
                return plain(self, t)
            there = plain(self, t)
            done.append((name, names.setdefault(there.data_ptr(), len(names))))
            return there

        return method

    copies = host_copies.HostCopies
    kind = type("Noted", (copies,), {n: noted(n, getattr(copies, n)) for n in ("leave", "left", "ask", "back")})
    monkeypatch.setattr(host_copies, "_copies", {torch.device("cpu"): kind(torch.device("cpu"))})
    blocks = (torch.nn.Linear(models.DIM, models.DIM), torch.nn.Tanh())
    layers = [models.Layer(*blocks) for _ in range(4)]
    x, model = models.hidden().requires_grad_(), models.Model(*layers)
    given = [x, *model.parameters()]
    wanted = torch.autograd.grad(model(x).square().sum(), given)
    policy = {"eblock": "full", "offload": "inputs"}
    compiled = torch.compile(model, backend=megacpp_compile.backend, options={"policy": policy})
    found = torch.autograd.grad(compiled(x).square().sum(), given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # sums in another order, by processor
    assert done == [("leave", 0), ("leave", 1), ("left", 0), ("leave", 2), ("left", 1), ("left", 2),
                    ("ask", 2), ("back", 2), ("ask", 1), ("ask", 0), ("back", 1), ("back", 0)]  # fmt: skip


@pytest.mark.end_to_end
def test_blocks_that_are_graphs_pass_their_inputs_through_main_memory():
    """What one hands on is the next one's input, but for the last one, whose backward comes at once."""
    x, model = models.hidden().requires_grad_(), models.llama(4)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    graphs = []
    with without_code(graphs), megacpp_compile.record() as report:
        megacpp_compile.compile(model, policy={"ablock": "full", "eblock": "full", "offload": "inputs"})
        found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # sums in another order, by processor
    assert [f.blocks for f in report.frames] == [3, 1]
    moved = [[count(graph, name) for graph in graphs] for name in ("megacpp.offload", "megacpp.reload")]
    assert sorted(map(sum, moved)) == [1, 1] and moved[0].index(1) != moved[1].index(1)
