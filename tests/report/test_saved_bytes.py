"""Bytes kept for backward are counted at the sizes of the call, where all of them are known, and guard nothing."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.frontend.capture import capture
from megacpp_compile.fx.subgraph import between
from megacpp_compile.report.saved_bytes import saved_bytes


def counted(function, *args, dynamic=True):
    """(bytes that `function` of `args` keeps, how many guards counting them added)."""
    found = {}

    def backend(gm, inputs):
        captured = capture(gm, inputs)
        graph = captured.gm.graph
        module, order = between(captured.gm, graph.find_nodes(op="placeholder"), list(graph.output_node().args[0]))
        env = captured.fake_mode.shape_env
        before = len(env.guards) if env else 0
        found["bytes"] = saved_bytes(module, order, captured.fake_mode)
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


def test_sizes_known_at_run_time_only_are_not_counted():
    bytes_, _ = counted(lambda x: (x[x[:, 0] > 0].exp(),), torch.randn(5, 4))
    assert bytes_ is None
