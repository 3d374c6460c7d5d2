"""`readers`: which score product reads a head, and as what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.attention import is_attention, leaves_graph, readers
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

draw = Draws(__name__)
Q, K = draw(2, 3, 5, 8), draw(2, 3, 5, 8)


def sides(graph):
    return [[(r.node.target, r.side) for r in readers(n)] for n in graph.inputs[:2]]


def test_attention_tells_queries_and_keys():
    graph = trace(lambda q, k: F.scaled_dot_product_attention(q, k, k * 2), Q, K)
    sdpa = aten.scaled_dot_product_attention.default
    assert sides(graph) == [[(sdpa, "q")], [(sdpa, "k")]]
    assert is_attention(graph.output) and not is_attention(graph.inputs[0])


def test_values_are_no_reader():
    graph = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), Q, K, K)
    assert readers(graph.inputs[2]) == []


@pytest.mark.parametrize(("f", "target"), [
    (lambda q, k: q @ k.transpose(-1, -2), aten.matmul.default),
    (lambda q, k: (q * 0.5).reshape(6, 5, 8).bmm(k.reshape(6, 5, 8).transpose(1, 2)), aten.bmm.default),
    (lambda q, k: torch.baddbmm(torch.zeros(6, 5, 5), q.reshape(6, 5, 8), k.reshape(6, 5, 8).mT), aten.baddbmm.default),
    (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k.bfloat16().float()), aten.einsum.default),
], ids=["matmul", "bmm", "baddbmm", "einsum"])  # fmt: skip
def test_products_tell_operands(f, target):
    graph = trace(f, Q, K)
    if target is aten.baddbmm.default:
        product = graph.only(target)
        assert [r.side for r in readers(product.args[1])] == ["0"] and [r.side for r in readers(product.args[2])] == ["1"]
    else:
        assert sides(graph) == [[(target, "0")], [(target, "1")]]


def test_norms_and_gains_in_between_are_passed():
    graph = trace(lambda q, k, g: F.scaled_dot_product_attention(F.rms_norm(q, (8,)), g * k, k), Q, K, torch.randn(8))
    assert [[r.side for r in readers(n)] for n in graph.inputs[:2]] == [["q"], ["k"]]


@pytest.mark.parametrize("append", [
    lambda past, k: torch.cat((past, k), 2), lambda past, k: past.index_copy(2, torch.arange(5), k),
    lambda past, k: torch.slice_scatter(past, k, 2, 1, 6),
], ids=["cat", "index_copy", "slice_scatter"])  # fmt: skip
def test_keys_among_those_of_a_cache_are_read(append):
    graph = trace(lambda q, k, past: F.scaled_dot_product_attention(q, kv := append(past, k), kv), Q, K, draw(2, 3, 9, 8))
    assert [[r.side for r in readers(n)] for n in graph.inputs[:2]] == [["q"], ["k"]]


def test_channels_beside_others_are_not_followed():
    graph = trace(lambda q, k: F.scaled_dot_product_attention(torch.cat((q, q), -1), torch.cat((k, k), -1), k), Q, K)
    assert sides(graph) == [[], []]


def test_a_product_with_weights_reads_no_head():
    graph = trace(lambda q, w: q.reshape(2, 15, 8).bmm(w.unflatten(0, (2, 8))), Q, draw(16, 8))
    assert readers(graph.inputs[0], frozenset(graph.inputs[1:])) == [] != readers(graph.inputs[0])


def test_what_mixes_heads_ends_the_search():
    graph = trace(lambda q, k: F.scaled_dot_product_attention(q + k, q.softmax(-1), k), Q, K)
    assert sides(graph) == [[], []]


def test_leaves_graph():
    graph = trace(lambda q, k: (q.transpose(1, 2) * 2.0, k + 1), Q, K)
    assert [leaves_graph(n) for n in graph.inputs] == [True, False]


@pytest.mark.parametrize(("rows", "read"), [
    (lambda k: k[:, :, -3:], True), (lambda k: k[:, :, ::2], True), (lambda k: k[:, :, torch.tensor([0, 3])], True),
    (lambda k: k.index_select(-2, torch.tensor([0, 3])), True), (lambda k: k[..., torch.arange(8).flip(0)], False),
    (lambda k: k[..., :4].repeat(1, 1, 1, 2), False), (lambda k: k.index_select(3, torch.arange(8).flip(0)), False),
], ids=["window", "stride", "index", "index_select", "channels", "some_channels", "selected_channels"])  # fmt: skip
def test_some_of_the_rows_are_read_as_keys(rows, read):
    graph = trace(lambda q, k: F.scaled_dot_product_attention(q, rows(k), rows(k)), Q, K)
    assert [r.side for r in readers(graph.inputs[1])] == (["k"] if read else [])
