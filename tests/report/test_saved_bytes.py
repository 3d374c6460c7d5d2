"""Bytes kept for backward are counted at the sizes of the call, where all of them are known, and guard nothing."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile
from benchmarks import models
from megacpp_compile.frontend.capture import capture
from megacpp_compile.fx.subgraph import between
from megacpp_compile.passes import _review
from megacpp_compile.report.saved_bytes import saved_bytes


def counted(function, *args, dynamic=True):
    """(bytes that `function` of `args` keeps, how many guards counting them added)."""
    found = {}

    def backend(gm, inputs):
        captured = capture(gm, inputs)
        graph = captured.gm.graph
        part = between(captured.gm, graph.find_nodes(op="placeholder"), list(graph.output_node().args[0]))
        env = captured.fake_mode.shape_env
        before = len(env.guards) if env else 0
        found["bytes"] = saved_bytes(part.module(), part.inputs, captured.fake_mode)
        found["guards"] = (len(env.guards) if env else 0) - before
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return found["bytes"], found["guards"]


def products(x, w):
    return ((x @ w).exp().reshape(x.shape[0] * 4, 2).tanh(),)


@pytest.mark.parametrize("rows", [5, 0])
def test_symbolic_sizes_count_as_they_are(rows):
    args = torch.randn(rows, 4), torch.randn(4, 8)
    static, _ = counted(products, *args, dynamic=False)
    assert counted(products, *args) == (static, 0) and static == 2 * 4 * 8 * rows


def test_a_tensor_that_several_read_counts_once():
    """An exponential keeps its result, and so do both products that read it: 5 rows of 8 numbers, as each product does."""
    x, *ws = torch.randn(5, 4), torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8)
    bytes_, _ = counted(lambda x, a, b, c: (torch.tanh((e := (x @ a).exp()) @ b + e @ c),), x, *ws, dynamic=False)
    assert bytes_ == 2 * 5 * 8 * 4


def test_sizes_known_at_run_time_only_are_not_counted():
    bytes_, _ = counted(lambda x: (x[x[:, 0] > 0].exp(),), torch.randn(5, 4))
    assert bytes_ is None


def stack_of(layers, width):
    torch.manual_seed(0)
    made = [models.Layer(models.MLA(128, 4, 96, 64, 32, 16, 40), 128, width(i)) for i in range(layers)]
    cos, sin = models.rotary_tables(16, 16, torch.device("cpu"), torch.float32)
    return models.Stack(made), (torch.randn(2, 16, 128).requires_grad_(), cos, sin)


@pytest.mark.end_to_end
@pytest.mark.usefixtures("no_kernels")
def test_equal_sites_are_counted_once(monkeypatch):
    runs = []
    monkeypatch.setattr(_review.saved_bytes, "saved_bytes", lambda *a: runs.append(a) or saved_bytes(*a))

    def saved(layers):
        runs.clear()
        model, inputs = stack_of(layers, lambda i: 224)
        torch._dynamo.reset()
        with megacpp_compile.record() as report:
            torch.compile(model, backend="megacpp")(*inputs)
        return [(s.pass_name, s.saved_before, s.saved_after) for s in report.sites], len(runs)

    (one, once), (two, as_often) = saved(1), saved(2)
    assert sorted(two) == sorted(2 * one) and len({n for _, n, _ in one}) > 1 and once == as_often == 2 * len({*one})


def part_of(function, *args):
    """What computes the results of `function`, and the names of the nodes in it."""
    graph = torch.fx.symbolic_trace(function)
    part = between(graph, graph.graph.find_nodes(op="placeholder"), list(graph.graph.output_node().args[0]))
    return part.code(), {n.name for n in (*part.inputs, *part.calls)}


def test_a_part_is_told_by_what_it_computes():
    same, names = part_of(lambda x, y: (torch.mul(x.exp(), y),))
    renamed, others = part_of(lambda a, b: (torch.mul(a.exp(), b),))
    assert same == renamed and names != others
    different = {part_of(function)[0] for function in (
        lambda x, y: (torch.mul(y, x.exp()),), lambda x, y: (torch.mul(x.exp(), x),),
        lambda x, y: (torch.mul(x.sin(), y),), lambda x, y: (x.exp().mul(y),), lambda x, y: (x.exp().mul("%1"),),
        lambda x, y: (torch.mul(x.exp(), y), y), lambda x, y, z: (torch.mul(x.exp(), y),),
    )}
    assert len({same, *different}) == 8
