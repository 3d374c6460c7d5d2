"""`match_linear`: which operand is the weight, and which way round it lies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from megacpp_compile.fx.edit import Builder
from megacpp_compile.matchers.linear import is_projection, match_linear, match_projection
from tests.matchers.graphs import trace
from tests.seeds import Draws

draw = Draws(__name__)
X, ROWS, W, V, B = draw(2, 3, 4), draw(3, 4), draw(5, 4), draw(4, 5), draw(5)


@pytest.mark.parametrize(("f", "x", "w", "transposed"), [
    (lambda x, w, b: F.linear(x, w, b), X, W, False), (lambda x, w, b: x @ w.T, X, W, False),
    (lambda x, w, b: x @ w.transpose(-1, -2), X, W, False), (lambda x, w, b: x @ w.permute(1, 0), X, W, False),
    (lambda x, w, b: x @ w, X, V, True), (lambda x, w, b: torch.mm(x, w), ROWS, V, True),
    (lambda x, w, b: torch.addmm(b, x, w.t()), ROWS, W, False),
    (lambda x, w, b: torch.einsum("btd,od->bto", x, w), X, W, False),
    (lambda x, w, b: torch.einsum("do,btd->bto", w, x), X, V, True),
    (lambda x, w, b: torch.einsum("...d,od->...o", x, w), X, W, False),
    (lambda x, w, b: torch.tensordot(x, w, dims=([-1], [1])), X, W, False),
    (lambda x, w, b: torch.tensordot(x, w, dims=1), X, V, True),
])  # fmt: skip
def test_matches(f, x, w, transposed):
    graph = trace(f, x, w, B)
    found = match_linear(graph.output)
    assert (found.node, found.x, found.w) == (graph.output, *graph.inputs[:2])
    assert found.transposed == transposed and found.out_features == 5
    assert found.b in (None, graph.inputs[2]) and (found.b is not None) == any(n.users for n in graph.inputs[2:])


@pytest.mark.parametrize(("f", "args"), [
    (lambda x, y: x @ y, (X, draw(2, 4, 5))), (lambda x, w: x * w, (X, B[:4])),
    (lambda x, w, b: torch.addmm(b, x, w, alpha=2.0), (ROWS, V, B)),
    (lambda x, w, b: torch.addmm(b, x, w), (ROWS, V, draw(3, 5))),
    (lambda x, w: torch.einsum("btd,bd->bt", x, w), (X, W[:2])),
], ids=["batched", "elementwise", "scaled", "matrix_added", "no_outputs"])  # fmt: skip
def test_refuses(f, args):
    graph = trace(f, *args)
    assert match_linear(graph.output) is None and not is_projection(graph.output)
    assert match_linear(graph.inputs[0]) is None


HEADS = draw(3, 5, 4)  # [h, d, r]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("f", "x"), [
    (lambda x, w: torch.einsum("btr,hdr->bthd", x, w), X), (lambda x, w: torch.einsum("btr,hdr->hbdt", x, w), X),
    (lambda x, w: torch.einsum("hrd,btr->bhtd", w.transpose(1, 2), x), X),
    (lambda x, w: torch.einsum("hdr,btr->thbd", w, x.sin()), X),
    (lambda x, w: torch.einsum("tbr,or->bto", x, w.flatten(0, 1)), X),
    (lambda x, w: torch.einsum("bxtr,hdr->bhtd", x, w), X[:, None]),
    (lambda x, w: torch.einsum("btr,hder->bthed", x, w.unflatten(1, (5, 1))), X),
    (lambda x, w: torch.einsum("... r, h d r -> ... h d", x, w), X),
    (lambda x, w: torch.tensordot(x, w, dims=([2], [2])), X),
    (lambda x, w: torch.tensordot(w.transpose(1, 2), x.sin(), dims=([1], [-1])), X),
    (lambda x, w: x[:, None] @ w.transpose(1, 2), X),
], ids=[
    "in order", "permuted", "weight first", "weight of one shape first", "transposed", "one dimension summed",
    "two dimensions", "an ellipsis", "tensordot", "tensordot, weight first", "matmul",
])  # fmt: skip
def test_by_heads(f, x):
    """What it says of itself makes the same of the same."""
    traced = trace(f, x, HEADS)
    found, mode = match_projection(traced.output), traced.output.meta["val"].fake_mode
    assert match_linear(traced.output) is None and is_projection(traced.output) and found.out_features == 15
    build = Builder(traced.graph, mode, traced.graph.output_node(), traced.output)
    new = found.shaped(build, build(torch.ops.aten.linear.default, found.x, found.weight(build)))
    traced.graph.output((traced.output, new))
    traced.graph.erase_node(next(n for n in traced.graph.nodes if n.op == "output"))
    assert found.x.target in (torch.ops.aten.sin.default, "arg0_1", torch.ops.aten.unsqueeze.default)
    want, got = GraphModule(torch.nn.Module(), traced.graph)(x, HEADS)
    assert tuple(new.meta["val"].shape) == got.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("f", "x"), [
    (lambda x, w: torch.einsum("bhr,hdr->bhd", x, w), X), (lambda x, w: torch.einsum("btr,hdr->bhd", x, w), X),
    (lambda x, w: torch.einsum("btr,hdr->bth", x, w), X),
    (lambda x, w: torch.einsum("brt,hdr->bthd", x, w), X.transpose(1, 2)),
    (lambda x, w: torch.einsum("btr,hdr->bthd", x[..., :1], w), X),
    (lambda x, w: torch.einsum("btr,hdr->bthd", x, w[..., :1]), X),
    (lambda x, w: torch.tensordot(x.unflatten(-1, (4, 1)), w[..., None], dims=([2, 3], [2, 3])), X),
    (lambda x, w: torch.tensordot(x[:, :1].expand(-1, 3, -1), w, dims=([1], [0])), X),
    (lambda x, w: torch.einsum("bthr,hdr->btd", x, w), X.unsqueeze(2).expand(-1, -1, 3, -1)),
    (lambda x, w: x.unsqueeze(2).expand(-1, -1, 3, -1).transpose(1, 2) @ w.transpose(1, 2), X),
], ids=[
    "each head its own rows", "rows summed", "outputs summed", "channels not last",
    "one channel for all of the weight's", "one of the weight's for all channels", "two dimensions summed",
    "rows summed by tensordot", "contracts heads", "matmul",
])  # fmt: skip
def test_no_linear_by_heads(f, x):
    assert match_projection(trace(lambda x, w: f(x.sin(), w), x, HEADS).output) is None
