"""Symbolic sizes in graphs are nodes, which compute them again at other sizes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.size_nodes import reshaped, size_node

aten = torch.ops.aten
SIZES = {
    "a size": lambda b, t: t, "a product": lambda b, t: b * t, "whole chunks": lambda b, t: t // 4,
    "padded": lambda b, t: t + (-t) % 4, "a polynomial": lambda b, t: t * t + 3 * b - 1,
}  # fmt: skip


def graph_of(x):
    """A graph with one input, and a builder in front of its output."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = mode.from_tensor(x, static_shapes=False)
    output = graph.output(node)
    return Builder(graph, mode, output, node), node


def result_of(build, node, x):
    build.anchor.args = (node,)
    return fx.GraphModule({}, build.graph)(x)


@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_sizes_at_other_sizes(size):
    build, x = graph_of(torch.randn(3, 10))
    made = size_node(build, size(*value(x).shape))
    for shape in ((3, 10), (5, 7), (2, 8)):
        assert result_of(build, made, torch.randn(shape)) == size(*shape)


def test_numbers_stay_numbers():
    build, _ = graph_of(torch.randn(3, 10))
    assert size_node(build, 7) == 7 and not build.emitted


def test_a_size_that_is_an_input():
    build, x = graph_of(torch.randn(3, 10))
    with build.graph.inserting_before(x):
        given = build.graph.placeholder("n")
    given.meta["val"] = value(x).shape[0]
    assert size_node(build, value(x).shape[0]) is given and not build.emitted


def test_reshaped():
    build, x = graph_of(torch.randn(3, 10))
    b, t = value(x).shape
    node = reshaped(build, build(aten.reshape.default, x, [-1]), [b, 1, t])
    assert [a.target for a in node.args[1] if isinstance(a, fx.Node)] == [aten.sym_size.int] * 2
    assert result_of(build, node, torch.randn(4, 6)).shape == (4, 1, 6)


def test_what_stands_behind_is_not_read():
    build, x = graph_of(torch.randn(3, 10))
    build.anchor = x
    with pytest.raises(LookupError, match="size of nothing in front of"):
        size_node(build, value(x).shape[1])


def test_what_is_read_is_not_computed():
    build, x = graph_of(torch.randn(3, 10))
    b, t = value(x).shape
    build(aten.reshape.default, x, [-1])
    size_node(build, b * t)
    assert not any(n.target is operator.mul for n in build.emitted)
