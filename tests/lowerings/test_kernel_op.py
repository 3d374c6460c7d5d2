"""Ops that lowerings call past autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacpp_compile.lowerings._op import kernel_op


@pytest.fixture(scope="session")  # an op is registered once a process, in whatever order tests run
def scaled():
    """(the op, what Dynamo was doing when it ran)"""
    seen: list[bool] = []

    @kernel_op("megacpp_tests::scaled")
    def scaled(xs: list[Tensor], by: float = 2.0) -> Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return torch.cat(xs, out=xs[0].new_empty(0)) * by

    @torch.library.register_fake("megacpp_tests::scaled")
    def _(xs, by=2.0):
        return xs[0].new_empty((sum(x.shape[0] for x in xs), *xs[0].shape[1:]))

    return scaled, seen


def test_runs_as_the_function_does(scaled, rand):
    op, _ = scaled
    x, y = rand(3, 4), rand(2, 4)
    assert torch.equal(op([x, y]), torch.cat([x, y]) * 2)
    assert torch.equal(torch.ops.megacpp_tests.scaled([x], by=3.0), x * 3)
    assert op._schema.is_mutable is False


def test_no_graph_is_made_of_what_it_does(scaled, rand):
    """`out=` is taken of operands with gradients, too, outside of a compiled graph."""
    op, _ = scaled
    x = rand(3, 4).requires_grad_()
    assert torch.equal(op([x, x]), torch.cat([x, x]).detach() * 2)


def test_is_opaque_to_compilers(scaled, rand):
    op, seen = scaled
    graphs = []

    def backend(gm, args):
        graphs.append(gm)
        return gm.forward

    x, y = rand(3, 4), rand(2, 4)
    seen.clear()
    got = torch.compile(lambda x, y: op([x, y]).sin(), backend=backend, fullgraph=True)(x, y)
    assert torch.equal(got, (torch.cat([x, y]) * 2).sin())
    (graph,) = graphs
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"][0] is op
    assert seen == [False]


def test_its_results_are_known_before_it_runs(scaled, rand):
    op, _ = scaled
    compiled = torch.compile(lambda x: op([x, x]).cos(), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x = rand(rows, 4)
        assert torch.equal(compiled(x), (torch.cat([x, x]) * 2).cos())
