"""DDP's optimizer cuts a graph between its buckets: it is made to cut between sites, and a site that is cut all the same
is a near miss that says where, and what helps."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import megacpp_compile
from megacpp_compile import pipeline, record
from megacpp_compile.errors import RequirementError
from megacpp_compile.passes._frame.buckets import TAG
from megacpp_compile.report.at_exit import ENDING
from tests.sharding.ranks import MLA

DIM, LAYERS = 16, 3


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def small(monkeypatch):
    """Buckets that hold one product's weight each, and the gains behind it; what DDP is to be called with."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    return {"bucket_cap_mb": 0.0001}


@pytest.fixture
def cut_as_it_is(monkeypatch):
    """Buckets follow no sites."""
    monkeypatch.setattr(pipeline, "follow_sites", lambda *_: None)


class Layer(nn.Module):
    """One `down_norm_up`, whose last call has the name of a variable in Dynamo's graph."""

    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(DIM, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, DIM, bias=False)

    def forward(self, x):
        branch = self.up(self.norm(self.down(x)))
        return x + branch


class LongLayer(Layer):
    """Of as many calls as it takes to pay for a graph of its own."""

    def forward(self, x):
        for _ in range(8):
            x = super().forward(x)
        return x


class Model(nn.Module):
    def __init__(self, layer=Layer, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def step(model, compiled):
    """The report of a training step of `compiled`, whose gradients are those of `model` in eager."""
    eager, x = copy.deepcopy(model), torch.randn(5, DIM, requires_grad=True)
    eager(x).square().sum().backward()
    with record() as report:
        compiled(x).square().sum().backward()
    for (name, got), want in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4, msg=name)
    return report


def under_ddp(model, options=None, **buckets):
    """(report of) a training step of the whole model, wrapped first."""
    return step(model, torch.compile(nn.parallel.DistributedDataParallel(model, **buckets), backend="megacpp", options=options))


def cut(report):
    return [miss for miss in report.misses if miss.tag == TAG]


def test_a_cut_site_names_the_buckets_and_what_helps(no_kernels, small, cut_as_it_is, caplog):
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"):
        report = under_ddp(Model(), **small)
    assert report.counts["down_norm_up"] == 0
    assert [(m.pass_name, m.fqn) for m in cut(report)] == [("down_norm_up", f"layers.{i}.up") for i in range(LAYERS)]
    first = cut(report)[0]
    assert "bucket 1 of 6 (which ends with layers.0.norm.weight)" in first.reason
    assert "bucket 2 (from layers.0.up.weight on)" in first.reason
    assert "torch._dynamo.config.optimize_ddp = False" in first.reason
    assert report.frames[first.frame].captured  # it is told with the piece that the site ends in
    (said,) = (r.getMessage() for r in caplog.records if r.name == "megacpp_compile")
    assert said.startswith("DDP's buckets cut the graph inside of places that would fuse, first at layers.0.up: ")
    assert "optimize_ddp" in said
    assert "the end of a bucket of DDP" in report.summary()


@pytest.mark.parametrize("megabytes", [0.0001, 25])
def test_buckets_end_between_sites(no_kernels, small, megabytes, caplog):
    """A bucket a product, or one behind the first: what holds a part of a site holds all of it."""
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"):
        report = under_ddp(Model(), {"require": {"down_norm_up": LAYERS}}, bucket_cap_mb=megabytes)
    assert len([f for f in report.frames if f.captured]) == (LAYERS if megabytes < 1 else 2)
    assert report.counts["down_norm_up"] == LAYERS and not cut(report)
    assert not [r for r in caplog.records if r.name == "megacpp_compile"]


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("megabytes", "cut_sites"), [(0.002, 6), (0.004, 2), (0.006, 0)])
@pytest.mark.parametrize("follow", [True, False])
def test_every_site_fires_or_is_told_as_cut(no_kernels, small, follow, megabytes, cut_sites, monkeypatch):
    """All of these buckets end inside of the query's RoPE, behind its view and transpose: what is left is enough for it."""
    if not follow:
        monkeypatch.setattr(pipeline, "follow_sites", lambda *_: None)
    model = nn.ModuleList(MLA() for _ in range(LAYERS))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x, cos, sin):
            for layer in self.layers:
                x = x + layer(x, cos, sin)
            return x

    angles = torch.randn(6, 4)
    wrapped = nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=megabytes)
    with record() as report:
        torch.compile(wrapped, backend="megacpp")(torch.randn(2, 6, 32), angles.cos(), angles.sin())
    told = Counter(miss.pass_name for miss in cut(report))
    found = {name: report.counts[name] + told[name] for name in ("down_norm_up", "mla_rope_q", "mla_rope_kv")}
    assert found == {"down_norm_up": 2 * LAYERS, "mla_rope_q": LAYERS, "mla_rope_kv": LAYERS}
    assert told == ({"down_norm_up": cut_sites} if cut_sites and not follow else {})
    assert len([f for f in report.frames if f.captured]) >= LAYERS  # buckets there are all the same


def test_without_the_optimizer_every_site_fires(no_kernels, small):
    with torch._dynamo.config.patch(optimize_ddp=False):
        report = under_ddp(Model(), {"require": {"down_norm_up": LAYERS}}, **small)
    assert report.counts["down_norm_up"] == LAYERS and not cut(report)


def test_a_reducer_in_compiled_autograd_cuts_nothing(no_kernels, small):
    """`optimize_ddp="python_reducer"`: hooks of gradients sum them over ranks, in the frame of the backward."""
    autograd = torch._dynamo.compiled_autograd._enable(torch.compile(backend="megacpp", fullgraph=True))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), autograd:
        report = under_ddp(Model(), {"require": {"down_norm_up": LAYERS}}, **small)
    assert report.counts["down_norm_up"] == LAYERS and not cut(report)
    assert [re.sub(r":\d+", "", f.name) for f in report.frames] == ["forward (test_ddp.py)", "backward (compiled autograd)"]


def test_a_larger_bucket_leaves_the_cut_behind_the_first(no_kernels, small, cut_as_it_is):
    """DDP makes the first bucket small, whatever the others are: that of the last layer."""
    report = under_ddp(Model(), bucket_cap_mb=25)
    assert report.counts["down_norm_up"] == LAYERS - 1
    assert [m.fqn for m in cut(report)] == [f"layers.{LAYERS - 1}.up"]


def test_blocks_of_a_whole_graph_are_functions_of_their_own(no_kernels, small):
    """What is advised where buckets cannot follow sites: gradients of a layer are there when its backward is done."""
    with torch._dynamo.config.patch(optimize_ddp=False):
        model, order = Model(LongLayer, 5), []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name.split(".")[1]))
        report = under_ddp(model, {"repeated_blocks": True}, **small)
    assert report.counts["down_norm_up"] == 5 * 8 and not cut(report)
    assert [f.blocks for f in report.frames if f.captured and f.blocks] == [5]
    assert order == sorted(order, reverse=True)


def test_a_graph_for_each_layer_has_none_to_cut(no_kernels, small):
    model = Model()
    with torch._dynamo.config.patch(optimize_ddp=False):
        megacpp_compile.compile(model, blocks="layers.*", require={"down_norm_up": LAYERS})
        report = step(model, nn.parallel.DistributedDataParallel(model, **small))
    assert {f.block for f in report.frames} == {"layers.0"} and report.counts["down_norm_up"] == 1
    assert not cut(report)


def test_a_cut_between_sites_is_no_miss(no_kernels, small, caplog, monkeypatch):
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 700)  # less than a layer, and more than its last weight
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"):
        report = under_ddp(Model(), {"require": {"down_norm_up": LAYERS}}, bucket_cap_mb=0.001)
    assert len([f for f in report.frames if f.captured]) == LAYERS
    assert report.counts["down_norm_up"] == LAYERS
    assert not cut(report) and not [r for r in caplog.records if r.name == "megacpp_compile"]


def test_require_says_what_cut_the_sites(no_kernels, small, cut_as_it_is):
    with pytest.raises(RequirementError) as caught:
        under_ddp(Model(), {"require": {"down_norm_up": LAYERS}}, **small)
    assert caught.value.fired == 0 and "DDP cuts the graph inside of it" in str(caught.value)


def plain(layer):
    return layer


def checkpointed(layer):
    return checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)


def compiled_inside(layer):
    return torch.compile(layer, backend="eager")


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("wrap", [plain, checkpointed, compiled_inside])
def test_require_counts_behind_wrappers(wrap, ddp, no_kernels, small):
    options = {"require": {"down_norm_up": LAYERS}, "passes": {"norm_linear": False}}
    model = Model(lambda: wrap(Layer()))
    with torch._dynamo.config.patch(optimize_ddp=False):
        wrapped = nn.parallel.DistributedDataParallel(model, **small) if ddp else model
        report = step(model, torch.compile(wrapped, backend="megacpp", options=options))
    assert [site.fqn for site in report.sites] == [f"layers.{i}.up" for i in range(LAYERS)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=False), pytest.raises(RequirementError):
        torch.compile(wrapped, backend="megacpp", options={"require": {"down_norm_up": LAYERS + 1}})(torch.randn(5, DIM))


@pytest.mark.end_to_end
def test_require_counts_behind_fsdp(no_kernels, recwarn):
    model, x = Model(), torch.randn(5, DIM)
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
    with record() as report:
        torch.compile(model, backend="megacpp", options={"require": {"down_norm_up": LAYERS}})(x)
    assert not any("_fsdp" in str(part) for part in report.to_dict().values())
    torch._dynamo.reset()
    with pytest.raises(RequirementError):
        torch.compile(model, backend="megacpp", options={"require": {"down_norm_up": LAYERS + 1}})(x)


def test_a_loop_over_layers_that_the_hooks_of_fsdp_break_is_no_loss(no_kernels, caplog):
    """Nobody can help it, and each layer is a frame: it is in the report alone."""
    model, mesh = Model(), init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"), record() as report:
        torch.compile(fully_shard(model, mesh=mesh), backend="megacpp")(torch.randn(5, DIM))
    assert "ran in eager, given up by Dynamo (1):" in report.summary() and report.counts["down_norm_up"]
    assert ENDING.text() == "" and not [r for r in caplog.records if r.name == "megacpp_compile"]
