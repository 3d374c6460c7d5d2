"""The parts of a layer, each matched alone: an expert, a matrix of gates, a mask, and a contraction's factors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.experts import Expert, match_expert
from megacpp_compile.matchers.moe.gate_matrix import match_chosen, match_chosen_gate, match_column
from megacpp_compile.matchers.moe.gemms import match_linear_gemm
from megacpp_compile.matchers.moe.routing import Mask, match_mask, scores_of
from megacpp_compile.reader.factors import factors, over, seen_as
from tests.passes import experts
from tests.passes.experts import DIM

from .capture import result, view_of

aten = torch.ops.aten


def returned(function, *args):
    return result(view_of(function, *args))


@pytest.mark.parametrize("make, activation, layout", [
    (lambda: experts.Expert(), "silu", "pair"), (lambda: experts.Expert(lambda h: h * h.sigmoid()), "silu", "pair"),
    (lambda: experts.Expert(F.gelu), "gelu", "pair"), (lambda: experts.Ungated(), "relu2", "single"),
    (lambda: experts.Fused(), "silu", "gate_up"), (lambda: experts.Fused(up_first=True), "silu", "up_gate"),
], ids=["pair", "silu by hand", "gelu", "ungated", "fused", "up first"])  # fmt: skip
def test_an_expert(make, activation, layout):
    node = result(view_of(make(), torch.randn(5, DIM)))
    expert = match_expert(node, match_linear_gemm)
    assert isinstance(expert, Expert), expert
    assert (expert.activation, expert.layout, expert.node) == (activation, layout, node)
    assert expert.x.op == "placeholder" and value(expert.x).shape == (5, DIM)
    assert len(expert.ups) == (2 if layout == "pair" else 1)


@pytest.mark.parametrize("make, tag", [
    (lambda: experts.Expert(F.softplus), "activation"),
    (lambda: experts.Expert(lambda h: F.silu(h.clamp(max=h.amax()))), "clamp"),
    (lambda: experts.Expert(lambda h: F.silu(h + 1)), "projections"),
], ids=["activation", "clamp", "projections"])  # fmt: skip
def test_no_expert(make, tag):
    failure = match_expert(result(view_of(make(), torch.randn(5, DIM))), match_linear_gemm)
    assert isinstance(failure, MatchFailure) and failure.tag == tag


def test_biases():
    """Of linears, which `Expert.down` has as a sum."""
    module = experts.Expert(bias=True)
    module.down = experts.Summed(experts.HIDDEN, DIM)
    expert = match_expert(result(view_of(module, torch.randn(5, DIM))), match_linear_gemm)
    assert isinstance(expert, Expert), expert
    assert [tuple(value(g.bias.tensor).shape) for g in (*expert.ups, expert.down)] == [(16,), (16,), (8,)]
    assert expert.biased and len(expert.parameters) == 6


def test_what_ends_in_no_gemm_is_not_even_nearly_an_expert():
    assert match_expert(returned(torch.tanh, torch.randn(5, DIM)), match_linear_gemm) is None


def scattered(scores):
    gates, indices = scores.topk(2, -1)
    return torch.zeros_like(scores).scatter(-1, indices, gates)


def one_hots(scores):
    gates, indices = scores.topk(2, -1)
    return (F.one_hot(indices, DIM).to(gates.dtype) * gates[..., None]).sum(1)


def softmax_of_chosen(scores):
    gates, indices = scores.topk(2, -1)
    return torch.full_like(scores, float("-inf")).scatter(-1, indices, gates).softmax(-1) * 2.5


@pytest.mark.parametrize("matrix, given", [(scattered, True), (one_hots, True), (softmax_of_chosen, False)])
def test_a_matrix_of_gates(matrix, given):
    found = match_chosen(returned(matrix, torch.randn(5, DIM)))
    assert scores_of(found.indices).op == "placeholder"
    assert (found.gates is not None) == given and (not given or found.gates.args == (found.indices.args[0], 0))


def softmax_of_all(scores):
    return scores.softmax(-1)


def scattered_over_ones(scores):
    gates, indices = scores.topk(2, -1)
    return torch.ones_like(scores).scatter(-1, indices, gates)


def scattered_to_what_may_come_twice(scores):
    gates, indices = scores.topk(2, -1)
    return torch.zeros_like(scores).scatter(-1, indices // 2, gates)


@pytest.mark.parametrize("matrix", [softmax_of_all, scattered_over_ones, scattered_to_what_may_come_twice])
def test_no_matrix_of_gates(matrix):
    assert match_chosen(returned(matrix, torch.randn(5, DIM))) is None


@pytest.mark.parametrize("column", [lambda m: m[:, 2, None], lambda m: m[:, 2:3], lambda m: m.unbind(-1)[2], lambda m: m.t()[2]])
def test_a_column(column):
    matrix, number = match_column(returned(lambda m: column(m), torch.randn(5, DIM)))
    assert matrix.op == "placeholder" and number == 2


def test_no_column():
    assert match_column(returned(lambda m: m[2, :, None], torch.randn(5, DIM))) is None


def test_the_gates_of_one_expert():
    def own(scores):
        gates, indices = scores.topk(2, -1)
        return torch.where(indices == 3, gates, 0.0).sum(-1, keepdim=True)

    indices, gates, expert = match_chosen_gate(returned(own, torch.randn(5, DIM)))
    assert (indices.args[1], gates.args[1], expert) == (1, 0, 3)
    assert match_chosen_gate(returned(lambda s: torch.where(s > 3, s, 0.0).sum(-1), torch.randn(5, DIM))) is None


@pytest.mark.parametrize("mask, dims, says", [
    (lambda i: i == 3, "ts", {"expert": 3}), (lambda i: F.one_hot(i, DIM).permute(2, 1, 0)[3], "st", {"expert": 3}),
    (lambda i: F.one_hot(i, DIM), "tse", {}), (lambda i: i[..., None] == torch.arange(DIM), "tse", {}),
    (lambda i: (i == 3).any(-1), "t", {"expert": 3, "any": True}),
    (lambda i: i[:, 1] == 3, "t", {"expert": 3, "choice": 1}),
], ids=["equal", "one hot of an expert", "one hots", "numbers", "any choice", "second choice"])  # fmt: skip
def test_a_mask(mask, dims, says):
    found = match_mask(returned(lambda x: mask(x.topk(2, -1).indices), torch.randn(5, DIM)))
    assert found == Mask(found.indices, tuple(dims), **says)
    assert scores_of(found.indices).op == "placeholder"


def test_no_mask():
    assert match_mask(returned(lambda x: x.topk(2, -1).indices > 3, torch.randn(5, DIM))) is None


@pytest.mark.parametrize("contraction", [
    lambda o, g: torch.einsum("ted,te->td", o, g), lambda o, g: (o * g[..., None]).sum(1),
    lambda o, g: torch.bmm(o.mT, g[..., None]).squeeze(-1),
], ids=["einsum", "sum of products", "bmm"])  # fmt: skip
def test_factors(contraction):
    node = returned(lambda o, g: contraction(o, g), torch.randn(5, 3, DIM), torch.randn(5, 3))
    dims = over(node)
    ((tokens,), (channels,)) = dims
    parts = factors(node, dims, lambda axes: {tokens, channels} <= axes)
    (gate,) = (p for p in parts if channels not in p.axes)
    (outputs,) = (p for p in parts if channels in p.axes)
    (route,) = gate.axes - {tokens}
    assert len(parts) == 2 and route.size == 3
    assert seen_as(gate, ((tokens,), (route,)))[0].op == "placeholder"
    assert seen_as(outputs, ((tokens,), (route,), (channels,)))[0].op == "placeholder"
    assert seen_as(outputs, ((route,), (tokens,), (channels,))) is None


def test_a_sum_over_another_axis_has_other_factors():
    node = returned(lambda o, g: (o * g[..., None]).sum(0), torch.randn(5, 3, DIM), torch.randn(5, 3))
    dims = over(node)
    parts = factors(node, dims, lambda axes: {a for d in dims for a in d} <= axes)
    (gate,) = (p for p in parts if p.axes.isdisjoint(dims[1]))
    (summed,) = gate.axes - set(dims[0])
    assert (dims[0][0].size, summed.size) == (3, 5)
