"""Frames that write to DTensors which nothing else reads are captured, and one that something reads is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megacpp_compile import record
from megacpp_compile.frontend.capture import fake_inputs
from megacpp_compile.frontend.dtensors import calls_on_dtensors
from megacpp_compile.frontend.local_dtensors import localize

DIM, EXPERTS, TOP = 8, 4, 2


@pytest.fixture
def mesh():
    if not dist.is_gloo_available():
        pytest.skip("no gloo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Routed(nn.Module):
    """A pair of low rank, and a router whose map and counter are DTensors, as torchtitan's are. read: what else the
    counter is read for."""

    def __init__(self, mesh, read=None):
        super().__init__()
        self.mesh, self.read = mesh, read
        self.down, self.norm, self.up = nn.Linear(DIM, 4, bias=False), nn.RMSNorm(4), nn.Linear(4, DIM, bias=False)
        self.gate = nn.Parameter(distribute_tensor(torch.randn(EXPERTS, DIM), mesh, [Replicate()]))
        self.register_buffer("counts", distribute_tensor(torch.zeros(EXPERTS), mesh, [Replicate()]))

    def forward(self, x):
        x = self.up(self.norm(self.down(x)))
        scores = nn.functional.linear(DTensor.from_local(x, self.mesh, [Replicate()], run_check=False), self.gate)
        chosen = scores.topk(TOP, dim=-1)[1]
        sent = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        with torch.no_grad():
            self.counts.add_(sent.sum(0))
        gates = scores.gather(-1, chosen).to_local().sum(-1, keepdim=True)
        return x * gates + (self.read(self.counts) if self.read else 0.0)


def steps(model, run, x):
    """Outputs, gradients and counts of two steps."""
    found = []
    for _ in range(2):
        model.zero_grad()
        out = run(x)
        out.square().mean().backward()
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        found += [out.detach(), *(g.clone() for g in local), model.counts.to_local().clone()]
    return found


def both(mesh, **how):
    torch._dynamo.reset()
    torch.manual_seed(1)
    x, model = torch.randn(6, DIM), Routed(mesh, **how)
    want = steps(model, model, x)
    model.counts.zero_()
    with record() as report:
        got = steps(model, torch.compile(model, backend="megacpp"), x)
    assert want[-1].sum() == 2 * 6 * TOP
    torch.testing.assert_close(got, want)
    return report


def test_a_map_and_a_counter(mesh, no_kernels):
    report = both(mesh)
    assert [f.reason for f in report.frames] == [""] and report.counts["down_norm_up"] == 1


def test_a_counter_that_is_read_behind_the_write(mesh, no_kernels):
    report = both(mesh, read=lambda counts: counts.to_local().mean())
    assert ["`add_` writes to a DTensor" in f.reason for f in report.frames] == [True]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_lookups_are_local_where_each_rank_has_all(mesh, placement):
    table = distribute_tensor(torch.randn(5, DIM), mesh, [placement])
    index = distribute_tensor(torch.randint(5, (3, DIM)), mesh, [Replicate()])
    left = []

    def backend(gm, inputs):
        mode, _ = fake_inputs(inputs)
        local = localize(gm, mode, calls_on_dtensors(gm, inputs))
        left.extend(n.name for n in calls_on_dtensors(local, inputs) if "gather" in str(n.target))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda table, index: (table * 2).gather(0, index) + 1, backend=backend)(table, index)
    assert bool(left) is placement.is_shard()
