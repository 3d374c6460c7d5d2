"""Regions of `torch.compiler.nested_compile_region`: passes see into them, and each call has the names of its own modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile import explain, record
from megacpp_compile._torch._registry import release
from megacpp_compile._torch.functorch import lowers_backward_with_forward
from megacpp_compile.frontend import nested_regions
from megacpp_compile.frontend.nested_regions import HOP, inline_regions
from megacpp_compile.fx.edit import all_nodes, called
from megacpp_compile.fx.provenance import module_fqn
from tests.backends.test_stitched import step
from tests.frontend.test_repeated_blocks import MLP, Norm, Stack, ids
from tests.memory.layered import Model
from tests.memory.layered import ids as token_ids

region = torch.compiler.nested_compile_region
# Dynamo of an older torch fails at regions of symbolic sizes, whatever compiles them.
SYMBOLIC = release(torch.__version__) >= (2, 13)


class Layer(nn.Module):
    def __init__(self, number=0, dim=8):
        super().__init__()
        self.number, self.norm, self.mlp = number, Norm(dim), MLP(dim)

    def forward(self, x, table):
        return x + torch.tanh(self.mlp(self.norm(x)) * table)


class Nested(Layer):
    forward = region(Layer.forward)


class Random(Layer):
    @region
    def forward(self, x, table):
        return nn.functional.dropout(Layer.forward(self, x, table), 0.5, self.training)


class Cast(Layer):
    @region
    def forward(self, x, table):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.mlp(self.norm(x))
        return x + y.float() * table


class Inner(Layer):
    """With a region of its own, twice."""

    @region
    def mixed(self, x):
        return torch.tanh(self.mlp(self.norm(x)))

    @region
    def forward(self, x, table):
        return x + self.mixed(self.mixed(x)) * table


class Recomputed(Layer):
    @region
    def forward(self, x, table):
        return checkpoint(super().forward, x, table, use_reentrant=False)


class Handed(Stack):
    """The region is a function that takes the layer."""

    @staticmethod
    @region
    def run(layer, x, table):
        return layer(x, table)

    def between(self, layer, x, table):
        return self.run(layer, x, table)


class Checkpointed(Stack):
    def between(self, layer, x, table):
        return checkpoint(layer, x, table, use_reentrant=False)


class Twice(Stack):
    def between(self, layer, x, table):
        return layer(layer(x, table), table)


STACKS = {
    "layers": lambda: Stack([Nested(i) for i in range(4)]),
    "a_function": lambda: Handed([Layer(i) for i in range(3)]),
    "in_checkpoints": lambda: Checkpointed([Nested(i) for i in range(3)]),
    "with_checkpoints": lambda: Stack([Recomputed(i) for i in range(3)]),
    "called_twice": lambda: Twice([Nested(i) for i in range(2)]),
    "in_regions": lambda: Stack([Inner(i) for i in range(3)]),
    "under_autocast": lambda: Stack([Cast(i) for i in range(3)]),
    "of_two_kinds": lambda: Stack([Nested(i) if i % 2 else Random(i) for i in range(4)]),
}


def graphs(model, *args, **settings):
    """Dynamo's graph of `model`."""
    found = []

    def backend(gm, inputs):
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, **settings)(*args)
    return found[0]


def plain(model):
    """`model` without regions: what Dynamo traces of it call by call."""
    twin = copy.deepcopy(model)
    for layer in twin.layers:
        if isinstance(layer, Nested):
            layer.__class__ = Layer
    if isinstance(twin, Handed):
        twin.__class__ = Stack
    return twin


def lines(gm):
    return [(called(n), module_fqn(n)) for n in gm.graph.nodes if n.op == "call_function" and called(n) != "getitem"]


@pytest.mark.parametrize("case", ["layers", "a_function", "called_twice"])
def test_names_are_those_of_each_call(case):
    model = STACKS[case]()
    gm = graphs(model, ids())
    whole = inline_regions(gm)
    assert [any(node.target is HOP for node in all_nodes(graph)) for graph in (gm, whole)] == [True, False]
    assert lines(whole) == lines(graphs(plain(model), ids()))


def test_a_graph_without_regions_is_itself():
    gm = graphs(Stack([Layer(i) for i in range(2)]), ids())
    assert inline_regions(gm) is gm


def test_a_region_with_options_of_its_own_stays(monkeypatch, no_kernels):
    """Torch has them behind a setting for now, and what they are is its own affair: the report says what is not seen."""
    gm = graphs(Stack([Nested(i) for i in range(2)]), ids())
    gm.subgraph_0.meta["nested_region_config"] = object()
    assert inline_regions(gm) is gm
    torch._dynamo.reset()
    monkeypatch.setattr(nested_regions, "inline_regions", lambda gm: gm)
    with record() as report:
        torch.compile(Stack([Nested(i) for i in range(2)]), backend="megacpp", fullgraph=True)(ids())
    (miss,) = report.misses
    assert miss.tag == "opaque" and "`invoke_subgraph`" in miss.reason


@pytest.mark.parametrize(
    ("case", "how"),
    [
        *((case, "training") for case in STACKS),
        pytest.param(
            "layers", "dynamic", marks=pytest.mark.skipif(not SYMBOLIC, reason="torch fails at symbolic sizes")
        ),
        ("layers", "inference"),
    ],
)
def test_results_are_eager_s(case, how, no_kernels):
    model = STACKS[case]()
    eager = copy.deepcopy(model)
    if how == "inference":
        model, eager = (m.eval().requires_grad_(False) for m in (model, eager))
    elif case == "of_two_kinds":
        model, eager = (m.eval() for m in (model, eager))
    torch._dynamo.reset()
    with record() as report:
        call = torch.compile(model, backend="megacpp", fullgraph=True, dynamic=True if how == "dynamic" else None)
        for rows in (2, 3) if case == "layers" and SYMBOLIC else (2,):
            of = torch.arange(5 * rows).view(rows, 5) % 11
            for a, b in zip(results(call, model, of, how), results(eager, eager, of, how), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(frame.captured for frame in report.frames)


def results(call, model, of, how):
    return [call(of)] if how == "inference" else step(call, model, of)


LAYERS = 4


def of_latents():
    """Layers of MLA, each a region."""
    model = Model(LAYERS)
    for layer in model.layers:
        layer.__class__ = type("Region", (type(layer),), {"forward": region(type(layer).forward)})
    return model


def test_explain_sees_every_site():
    report = explain(of_latents(), token_ids())
    assert report.counts["down_norm_up"] == 2 * LAYERS and not report.misses
    assert [site.fqn for site in report.sites if site.fqn.endswith("q_b")] == [
        f"layers.{i}.attention.q_b" for i in range(LAYERS)
    ]


@pytest.mark.skipif(
    not lowers_backward_with_forward(), reason="this torch cannot compile the backward of a block with its forward"
)
def test_sites_and_one_code_for_all_calls(no_kernels):
    model = of_latents()
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    with record() as report:
        call = torch.compile(model, backend="megacpp", fullgraph=True)
        for a, b in zip(step(call, model, token_ids()), step(eager, eager, token_ids()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert report.counts["down_norm_up"] == 2 * LAYERS and report.counts["mla_rope_kv"] == LAYERS
    assert {site.fqn for site in report.sites if site.pass_name == "mla_rope_kv"} == {
        f"layers.{i}.attention" for i in range(LAYERS)
    }
    (found,) = report.regions
    assert found.reason == f"compiled once, called {LAYERS} times" and found.fqns[0] == "layers.0"
