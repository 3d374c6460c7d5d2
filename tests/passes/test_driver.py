"""What the driver promises for every pass: one site's result may be the next one's input, sites that overlap are one, and
the report names ops that are in the graph."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import megacpp_compile
from megacpp_compile import analysis
from megacpp_compile.config.options import Config
from megacpp_compile.frontend.capture import capture
from megacpp_compile.fx.edit import drop_dead
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.passes import _driver, down_norm_up
from megacpp_compile.passes._rule import Match
from tests.capture import Called, traced
from tests.corpus import jitter_gains
from tests.corpus.spellings import PlainMLA
from tests.frames import check, run, run_graph
from tests.matchers.graphs import trace

from . import experts, test_linear
from .contract import Watch

DIM, RANK = 40, 26


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.05) * self.gain


def linear(n, m):
    return nn.Linear(n, m, bias=False)


def bottleneck():
    return nn.Sequential(linear(DIM, RANK), Norm(RANK), linear(RANK, DIM))


def hidden():
    return torch.randn(2, 5, DIM, requires_grad=True)


class InTurn(nn.Module):
    """Layers, each of which reads nothing but the one before and the model's other inputs."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *others):
        for layer in self.layers:
            x = layer(x, *others)
        return x


def ops_of(frames):
    """The fused ops in the graph that runs, by name."""
    return [n.target._opname for n in frames.graph.graph.nodes if "megacpp" in str(n.target)]


# --- one site's result is the next one's input


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, groups=DIM, padding=2)

    def forward(self, x):
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


class Gated(Norm):
    def forward(self, x, z):
        return super().forward(x * F.silu(z))


def mixture():
    return experts.MoE(experts.batched_gemms, stacked=True)


CHAINS = {
    "down_norm_up": bottleneck,
    "causal_conv1d": Convolution,
    "gated_rms_norm": lambda: Gated(DIM),
    "moe": mixture,
    "norm_linear": lambda: nn.Sequential(Norm(DIM), linear(DIM, DIM)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHAINS)
def test_one_site_reads_another(name):
    module = InTurn(*(CHAINS[name]() for _ in range(2 if name == "moe" else 3)))
    args = {
        "gated_rms_norm": (hidden(), hidden()),
        "moe": (torch.randn(experts.TOKENS, experts.DIM, requires_grad=True),),
    }.get(name, (hidden(),))
    config = Config(strict=True, passes={name: True}, disable=tuple({"down_norm_up", "linear"} - {name}))
    with megacpp_compile.record():
        frames = check(jitter_gains(module), args, config)
    assert frames.counts[name] == len(module.layers) == ops_of(frames).count(name)
    sites = [s for a in frames.analyses for s in a.outcome.sites if s.pass_name == name]
    assert len({(s.saved_before, s.saved_after) for s in sites}) == 1, "each site's bytes are its own"
    assert not frames.again(config)


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.setattr(test_linear.linear, "no_float8", lambda device: "")


def test_a_linear_in_float8_reads_another(float8):
    module = nn.Sequential(linear(32, 32), linear(32, 32)).bfloat16()
    config = Config(strict=True, precision=test_linear.EVERYTHING)
    frames = run(module, (torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True),), config)
    assert frames.counts["linear"] == 2 == ops_of(frames).count("fp8_linear")
    first, second = (n for n in frames.graph.graph.nodes if "fp8_linear" in str(n.target))
    assert second.args[0].args == (first, 0), "and no payload is made of the plain linear that is gone"
    assert not [n for n in frames.graph.graph.nodes if n.target is torch.ops.aten.linear.default]


# --- sites that overlap


def test_sites_that_overlap_are_one():
    """The middle projection is the first site's up and the second one's down."""
    module = nn.Sequential(linear(DIM, RANK), Norm(RANK), linear(RANK, DIM), Norm(DIM), linear(DIM, RANK))
    frames = check(jitter_gains(module), (hidden(),))
    assert frames.counts["down_norm_up"] == 1 == ops_of(frames).count("down_norm_up")
    assert frames.tags("down_norm_up") == {"overlap"}
    assert not frames.again()


# --- passes that lie


def lying(monkeypatch, find):
    """`find` in the place of the pass down_norm_up, alone."""
    fake = types.SimpleNamespace(name="down_norm_up", op=down_norm_up.op, after=(), find=find)
    monkeypatch.setattr(_driver, "all_passes", lambda: (fake,))


def nothing_done(view):
    """An op that no value of the graph is computed by."""
    for found in down_norm_up.find(view):

        def rewrite(build, found=found):
            op_node, _ = found.rewrite(build)
            return op_node, list(found.outputs)

        yield Match(found.node, found.inputs, found.outputs, rewrite)


def the_plain_node(view):
    """No op at all."""
    for found in down_norm_up.find(view):
        yield Match(found.node, found.inputs, found.outputs, lambda build, found=found: (found.node, found.outputs))


def an_op_of_the_model(view):
    """An op that was there already."""
    for node in view.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        called = next(n for n in view.graph.nodes if "megacpp" in str(n.target))
        yield Match(node, [node.args[0]], [node], lambda build, node=node, called=called: (called, [node]))


@pytest.mark.parametrize("lie", [nothing_done, the_plain_node])
def test_an_op_that_is_not_there_is_not_reported(monkeypatch, lie):
    lying(monkeypatch, lie)
    frames = check(bottleneck(), (hidden(),), Config())
    assert not frames.counts["down_norm_up"] and not frames.analyses[0].outcome.sites
    (miss,) = frames.misses
    assert miss.tag == "op-removed" and "megacpp::down_norm_up" in miss.reason and miss.fqn
    with pytest.raises(BackendCompilerFailed, match="UnfoundedSiteError: .*down_norm_up"):
        run(bottleneck(), (hidden(),), Config(strict=True))


def test_an_op_that_the_model_calls_is_no_site_of_a_pass(monkeypatch):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.gain = linear(DIM, RANK), linear(RANK, DIM), nn.Parameter(torch.ones(RANK))

        def forward(self, x):
            up, _, _, _ = torch.ops.megacpp.down_norm_up(
                x, self.down.weight, None, self.gain, [self.up.weight], 0.05, 0, RANK
            )
            return up[0].relu() * 2

    lying(monkeypatch, an_op_of_the_model)
    frames = check(Calls(), (hidden(),), Config())
    assert not frames.counts["down_norm_up"] and frames.tags("down_norm_up") == {"op-removed"}
    assert [s.pass_name for s in frames.analyses[0].outcome.sites] == ["(called)"]


def test_one_op_is_one_site(monkeypatch):
    """Two matches of different values, and one op for both."""
    made = []

    def find(view):
        for found in down_norm_up.find(view):

            def rewrite(build, found=found):
                op_node, new = found.rewrite(build)
                made.append(op_node)
                return made[0], new

            yield Match(found.node, found.inputs, found.outputs, rewrite)

    lying(monkeypatch, find)
    module = jitter_gains(nn.Sequential(bottleneck(), bottleneck()))
    frames = check(module, (hidden(),), Config())
    assert frames.counts["down_norm_up"] == 1 and frames.tags("down_norm_up") == {"op-reported-twice"}
    assert [n.name for n in frames.analyses[0].outcome.op_nodes] == [made[0].name]
    with pytest.raises(BackendCompilerFailed, match="UnfoundedSiteError: .*another site"):
        made.clear()
        run(module, (hidden(),), Config(strict=True))


def test_one_match_twice_is_one_site(monkeypatch):
    lying(monkeypatch, lambda view: [match for match in down_norm_up.find(view) for _ in range(2)])
    frames = check(bottleneck(), (hidden(),))
    assert frames.counts["down_norm_up"] == 1 == ops_of(frames).count("down_norm_up") and not frames.misses


def test_a_pass_that_takes_a_site_of_another(monkeypatch):
    """A later pass whose match holds an earlier one's op is refused, and the earlier site stays."""

    def swallow(view):
        for node in view.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            start = view.graph.find_nodes(op="placeholder")
            yield Match(node, list(start), [node], lambda build, x=node.args[0]: _zeros(build, x))

    def _zeros(build, like):
        node = build(torch.ops.aten.zeros_like.default, build.graph.find_nodes(op="placeholder")[0])
        return node, [node]

    later = types.SimpleNamespace(name="later", op="", after=(), find=swallow)
    monkeypatch.setattr(_driver, "all_passes", lambda: (down_norm_up, later))
    frames = check(nn.Sequential(bottleneck(), nn.ReLU()), (hidden(),))
    assert frames.fired == {"down_norm_up": 1} and frames.tags("later") == {"overlap"}


def test_a_pass_that_always_finds_more_ends(monkeypatch):
    """Each op that this pass makes is a match again, and one more overlaps with it."""

    def find(view):
        (x,) = view.graph.find_nodes(op="placeholder")[:1]
        for node in view.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):

            def rewrite(build, x=x):
                new = build(torch.ops.aten.relu.default, x)
                return new, [new]

            yield from (Match(node, [x], [node], rewrite) for _ in range(2))

    lying(monkeypatch, find)
    assert not run(nn.ReLU(), (hidden(),), Config(), captured=False).counts["down_norm_up"]


@pytest.mark.parametrize("key", ["_run", "val"])
def test_a_find_that_writes_is_seen(key):
    def find(view):
        for node in view.graph.nodes:
            node.meta[key] = 1
            yield MatchFailure(node, "", "")

    watch = Watch()
    traced = trace(lambda x: x.relu(), hidden())
    watch.find(types.SimpleNamespace(name="writes", find=find), types.SimpleNamespace(graph=traced.graph))
    assert list(watch.changed) == ["writes"] and all(key in change for change in watch.changed["writes"])


def _written(view, node):
    node.meta["val"] = 1
    return []


def _dead(view, node):
    with view.graph.inserting_after(node):
        view.graph.call_function(torch.ops.aten.relu.default, (node,))
    return []


def _matching(view, node):
    node.meta["val"] = 1
    return [Match(node, [], [], lambda build: None)]


@pytest.mark.parametrize("last, by", [(_written, "reads, writes, reads"), (_dead, "reads, writes"), (_matching, "reads, writes")])
def test_what_a_later_find_writes_is_seen(last, by):
    """At the end of a run, before a pass rewrites, and where the driver drops what was put there."""
    watch = Watch()
    graph = trace(lambda x: x.relu(), hidden()).graph
    view, node = types.SimpleNamespace(graph=graph), next(iter(graph.nodes))
    reads = types.SimpleNamespace(name="reads", find=lambda view: [])
    writes = types.SimpleNamespace(name="writes", find=lambda view: last(view, node))
    for p in watch.until_the_end([reads, reads, writes, reads]):
        watch.find(p, view)
        watch.dropped(drop_dead(graph))
    assert list(watch.changed) == [by]


def test_a_graph_is_linted_by_passes_that_have_changed_it(monkeypatch):
    passes, lint = [], torch.fx.Graph.lint

    def linted(graph):
        if (caller := sys._getframe(1)).f_code is _driver.run_passes.__code__:
            passes.append(caller.f_locals["p"].name)
        lint(graph)

    monkeypatch.setattr(torch.fx.Graph, "lint", linted)
    frames = run_graph(bottleneck(), (hidden(),))
    assert passes == ["down_norm_up"]
    assert not frames.again() and passes == ["down_norm_up"]


# --- what is done with is let go


def alive(graphs):
    """Those of `graphs` that something keeps: not Dynamo's caches, nor torch's memory of what it has traced last."""
    torch._dynamo.reset()
    traced(Called(torch.relu), (hidden(),))  # not a kept graph: a trace
    gc.collect()
    return [graph for graph in graphs if graph() is not None]


@pytest.mark.end_to_end
def test_no_analysis_outlives_its_frame(few_objects):
    block = PlainMLA()
    frames = run(block, block.example_inputs())
    graph = weakref.ref(frames.analyses[0].captured.gm.graph)
    del frames
    assert not alive([graph])


@pytest.mark.end_to_end
def test_nothing_of_the_backend_s_outlives_its_frame(no_kernels, few_objects, monkeypatch):
    graphs = []

    def captured(*args):
        made = capture(*args)
        graphs.append(weakref.ref(made.gm.graph))
        return made

    monkeypatch.setattr(analysis, "capture", captured)
    with megacpp_compile.record() as report:
        torch.compile(bottleneck(), backend="megacpp")(hidden()).sum().backward()
    assert len(report.sites) == 1 and graphs
    assert not alive(graphs)


# --- a report costs no frame


def test_bytes_that_cannot_be_counted(monkeypatch):
    def fails(*_):
        raise RuntimeError("no such storage")

    monkeypatch.setattr("megacpp_compile.report.saved_bytes.saved_bytes", fails)
    with megacpp_compile.record():
        frames = check(bottleneck(), (hidden(),))
    (site,) = frames.analyses[0].outcome.sites
    assert site.saved_before is None and site.saved_after is None
    assert site.saved_reason == "RuntimeError: no such storage"


def test_bytes_behind_a_number_that_is_an_input(monkeypatch):
    """A site that begins in front of a number that is read from a tensor, as every float is under `dynamic=True`."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.factor = bottleneck(), 0.7

        def forward(self, x):
            return self.layers(x * self.factor)

    def find(view):
        for found in down_norm_up.find(view):

            def rewrite(build, found=found):
                build.anchor = found.node
                return found.rewrite(build)

            yield Match(found.node, view.graph.find_nodes(op="placeholder"), found.outputs, rewrite)

    lying(monkeypatch, find)
    with megacpp_compile.record():
        frames = check(Scaled(), (hidden(),), dynamic=True, fullgraph=False)
    (site,) = frames.analyses[0].outcome.sites
    assert site.saved_before > site.saved_after > 0 and site.saved_reason == ""


def test_a_pass_that_fails_stops_no_other(monkeypatch):
    def find(view):
        yield MatchFailure(view.graph.output_node(), "first", "")
        raise ValueError("second")

    fake = types.SimpleNamespace(name="fake", op="", after=(), find=find)
    monkeypatch.setattr(_driver, "all_passes", lambda: (fake, down_norm_up))
    frames = check(bottleneck(), (hidden(),), Config())
    assert frames.tags("fake") == {"internal-error"} and frames.counts["down_norm_up"] == 1
