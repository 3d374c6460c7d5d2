"""Chains of outer views, slices of the last dimension, and chains applied again."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.views import is_cast
from megacpp_compile.matchers.views import consumers, is_outer_view, lane_slice, replay
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

draw = Draws(__name__)
X = draw(2, 3, 4)


@pytest.mark.parametrize(("f", "outer"), [
    (lambda x: x.reshape(6, 4), True), (lambda x: x.reshape(2, 12), False), (lambda x: x.transpose(0, 1), True),
    (lambda x: x.transpose(0, 2), False), (lambda x: x.permute(1, 0, 2), True), (lambda x: x.permute(0, 2, 1), False),
    (lambda x: x.unsqueeze(1), True), (lambda x: x[:, :, None], True), (lambda x: x[..., None], False),
    (lambda x: x[:1].squeeze(0), True), (lambda x: x.clone(), True), (lambda x: x[:, :2], False),
    (lambda x: x.unsqueeze(1).expand(2, 5, 3, 4), False), (lambda x: x + 1, False),
])  # fmt: skip
def test_outer_views(f, outer):
    graph = trace(f, X)
    assert is_outer_view(graph.output) == outer
    assert not is_outer_view(graph.inputs[0])


@pytest.mark.parametrize(("f", "expected"), [
    (lambda x: x[..., 1:3], (1, 2)), (lambda x: x[..., -3:], (1, 3)), (lambda x: x.narrow(-1, 2, 1), (2, 1)),
    (lambda x: x.split([1, 3], dim=-1)[1], (1, 3)), (lambda x: x.split(2, dim=2)[1], (2, 2)),
    (lambda x: x.chunk(2, dim=-1)[0], (0, 2)), (lambda x: x[..., ::2], None), (lambda x: x[:, 1:], None),
    (lambda x: x.split([1, 2], dim=1)[1], None), (lambda x: x.unbind(-1)[0], None), (lambda x: x.sin(), None),
])  # fmt: skip
def test_slices_of_the_last_dimension(f, expected):
    graph = trace(f, X)
    found = lane_slice(graph.output)
    assert found == (None if expected is None else (graph.inputs[0], *expected))


def test_consumers_are_found_behind_chains():
    graph = trace(lambda x, w: (x.reshape(6, 4).bfloat16() @ w, x.sin()), X, torch.randn(4, 5).bfloat16())
    found = {user: (read, chain) for user, read, chain in consumers(graph.inputs[0], lambda n: is_outer_view(n) or is_cast(n))}
    product, sine = graph.outputs
    read, chain = found.pop(product)
    assert [n.target for n in chain] == [aten.reshape.default, chain[1].target] and is_cast(chain[1]) and read is chain[-1]
    assert found == {sine: (graph.inputs[0], [])}


def test_a_chain_is_replayed_on_another_width_without_its_casts():
    graph = trace(lambda x, other: (x.transpose(0, 1).bfloat16().clone().reshape(6, 4), other.sin()), X, torch.randn(2, 3, 7))
    end, other = graph.outputs
    chain = [end]
    while chain[0].args[0] is not graph.inputs[0]:
        chain.insert(0, chain[0].args[0])
    assert any(is_cast(n) for n in chain)
    build = Builder(graph.graph, value(other).fake_mode, graph.graph.output_node(), other)
    made = replay(build, chain, other)
    assert value(made).shape == (6, 7) and value(made).dtype == torch.float32
    assert [n.target for n in build.emitted] == [aten.transpose.int, aten.reshape.default]
