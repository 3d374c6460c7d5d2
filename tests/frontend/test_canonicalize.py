"""One spelling per idea: what canonicalization makes of ops that have another name or do nothing."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.frontend.canonicalize.whole_slices import whole_slices
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

draw = Draws(__name__)
X = draw(2, 5, 4)


def results(graph, *args):
    return GraphModule(torch.nn.Module(), graph)(*args)


def test_tiles_are_repeats():
    for repeats, whole in (((1, 3, 1), [1, 3, 1]), ((2, 1), [1, 2, 1]), ((2, 1, 1, 1), [2, 1, 1, 1])):
        traced = trace(lambda x, repeats=repeats: x.tile(repeats), X)
        assert traced.only(aten.repeat.default).args[1] == whole
        assert torch.equal(results(traced.graph, X)[0], X.tile(repeats))


@pytest.mark.parametrize(
    ("equation", "whole"),
    [
        ("... c, h d c -> ... h d", "abc,hdc->abhd"),
        ("btc,hdc", "btc,hdc->bdht"),
        ("...c,hdc", "abc,hdc->abdh"),
        ("a...,hd...->ah", None),
        ("btc,hdc->bthd", "btc,hdc->bthd"),
    ],
    ids=["ellipsis", "no output", "neither", "an ellipsis that is summed", "in full"],
)
def test_equations_in_full(equation, whole):
    w = draw(3, 6, 4)
    if whole is None:
        x, w, whole = X[0], w[:, 0], "a...,hd...->ah"
    else:
        x = X
    traced = trace(lambda x, w: torch.einsum(equation, x, w), x, w)
    assert traced.only(aten.einsum.default).args[0] == whole
    assert torch.equal(results(traced.graph, x, w)[0], torch.einsum(equation, x, w))


def test_an_ellipsis_of_several_ranks():
    x, y = draw(2, 1, 5, 4), draw(3, 5, 4)
    traced = trace(lambda x, y: torch.einsum("...tc,...sc->...ts", x, y), x, y)
    assert traced.only(aten.einsum.default).args[0] == "abtc,bsc->abts"
    assert torch.equal(results(traced.graph, x, y)[0], torch.einsum("...tc,...sc->...ts", x, y))


def test_the_last_rows_of_as_many_are_all():
    traced = trace(lambda x: (x[:, -5:].sin(), x[..., -5:, :].sin(), x[:, -3:].sin()), X)
    assert traced.only(aten.slice.Tensor).args[2] == -3
    for got, want in zip(results(traced.graph, X), (X.sin(), X.sin(), X[:, -3:].sin()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("other", [False, True], ids=["its own", "another's"])
def test_the_last_rows_of_a_symbolic_number(other):
    gm = make_fx(lambda x, y: x[:, -(y if other else x).shape[1] :].sin(), tracing_mode="symbolic")(X, X[:, :3])
    whole_slices(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)) == other
    assert torch.equal(gm(X, X[:, :3]), X[:, -3 if other else 0 :].sin())
