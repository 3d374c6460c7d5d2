"""One spelling per idea: what canonicalization makes of ops that have another name or do nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.frontend.canonicalize.whole_slices import whole_slices
from tests.frames import Function, check, check_graph, run
from tests.matchers.graphs import aten, trace
from tests.passes.contract import assert_autocast, assert_dynamic, assert_fires
from tests.passes.experts import DIM, MoE, Ungated, where_index_add
from tests.seeds import Draws

draw = Draws(__name__)
X = draw(2, 5, 4)


def test_tiles_are_repeats():
    for repeats, whole in (((1, 3, 1), [1, 3, 1]), ((2, 1), [1, 2, 1]), ((2, 1, 1, 1), [2, 1, 1, 1])):
        traced = trace(lambda x, repeats=repeats: x.tile(repeats), X)
        assert traced.only(aten.repeat.default).args[1] == whole
        assert torch.equal(traced(X)[0], X.tile(repeats))


@pytest.mark.parametrize(("equation", "whole", "x", "w"), [
    ("... c, h d c -> ... h d", "abc,hdc->abhd", X, draw(3, 6, 4)), ("btc,hdc", "btc,hdc->bdht", X, draw(3, 6, 4)),
    ("...c,hdc", "abc,hdc->abdh", X, draw(3, 6, 4)), ("a...,hd...->ah", "a...,hd...->ah", X[0], draw(3, 4)),
    ("btc,hdc->bthd", "btc,hdc->bthd", X, draw(3, 6, 4)),
    ("...tc,...sc->...ts", "abtc,bsc->abts", draw(2, 1, 5, 4), draw(3, 5, 4)),
], ids=["ellipsis", "no output", "neither", "a summed ellipsis", "in full", "an ellipsis of ranks"])  # fmt: skip
def test_equations_in_full(equation, whole, x, w):
    traced = trace(lambda x, w: torch.einsum(equation, x, w), x, w)
    assert traced.only(aten.einsum.default).args[0] == whole
    assert torch.equal(traced(x, w)[0], torch.einsum(equation, x, w))


def test_the_last_rows_of_as_many_are_all():
    traced = trace(lambda x: (x[:, -5:].sin(), x[..., -5:, :].sin(), x[:, -3:].sin()), X)
    assert traced.only(aten.slice.Tensor).args[2] == -3
    for got, want in zip(traced(X), (X.sin(), X.sin(), X[:, -3:].sin()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("other", [False, True], ids=["its own", "another's"])
def test_the_last_rows_of_a_symbolic_number(other):
    gm = make_fx(lambda x, y: x[:, -(y if other else x).shape[1] :].sin(), tracing_mode="symbolic")(X, X[:, :3])
    whole_slices(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)) == other
    assert torch.equal(gm(X, X[:, :3]), X[:, -3 if other else 0 :].sin())


def added(x, dim=-1, index=0):
    y = x.exp()
    y.select(dim, index).add_(1)
    return y


# By the input's shape and the ops that are counted: functions, and how often each calls the ops in the end.
LEFT = {
    # concatenations with an empty tensor
    ((3, 4), aten.cat.default): {
        "empty": (lambda x: torch.cat((torch.tensor([]), x.new_empty(0), x), -2).exp(), 0),
        "two more": (lambda x: torch.cat((x.new_zeros(0), x, x), -2).exp(), 1),
        "of a wider dtype": (lambda x: torch.cat((x.new_empty(0, dtype=torch.float64), x), -2).exp(), 1),
        "of an input": (lambda x: torch.cat((x[0, :0], x), -2).exp(), 1),
        "a view of it is returned": (lambda x: torch.cat((x.new_empty(0), x), -2).mT, 1),
        "read by strides": (lambda x: torch.cat((x.new_empty(0), x.mT), -2).as_strided((2, 2), (1, 2)).exp(), 1),
    },
    # dropouts that drop nothing
    ((3, 4), aten.dropout.default): {
        "drops none": (lambda x: F.dropout(x.exp(), 0.0).exp(), 0),
        "in evaluation": (lambda x: F.dropout(x.exp(), 0.5, training=False).exp(), 0),
        "drops": (lambda x: F.dropout(x.exp(), 0.5).exp(), 1),
        "is returned": (lambda x: F.dropout(x, 0.0), 1),
    },
    # writes over the only entry of a dimension, which is read in its place
    ((3, 4, 1), aten.select_scatter.default): {
        "read again": (lambda x: added(x)[..., 0] * 2, 0),
        "by another name": (lambda x: added(x, 2, -1).select(-1, 0).sin(), 0),
        "as it is": (lambda x: added(x).sin(), 0),
        "both": (lambda x: added(x).sin()[..., 0] + added(x)[..., 0], 0),
        "twice": (lambda x: (added(x).mul_(2)[..., 0].add_(x[..., 0])).cos(), 0),
        "one of several entries": (lambda x: added(x, 0).sin(), 1),
        "an output": (added, 1),
        "what is not computed": (lambda x: x.new_zeros(3, 4, 1).select_scatter(x[..., 0], -1, 0).view(12), 1),
        "of another dtype": (lambda x: x.exp().select_scatter(x[..., 0].double().sin(), -1, 0).sin(), 1),
    },
    # zeros that are concatenated behind a tensor, which pad it
    ((3, 4, 5), aten.pad.default, aten.cat.default): {
        "zeros": (lambda x: torch.cat((x.exp(), torch.zeros(3, 2, 5)), 1), 1, 0),
        "new zeros, in front of the last dimensions": (lambda x: torch.cat([x.exp(), x.new_zeros(2, 4, 5)]), 1, 0),
        "full of zeros, from the end": (lambda x: torch.cat((x.exp(), torch.full((3, 4, 1), 0.0)), -1), 1, 0),
        "like a part": (lambda x: torch.cat((x.exp(), torch.zeros_like(x[:, :1])), 1), 1, 0),
        "ones": (lambda x: torch.cat((x.exp(), torch.ones(3, 2, 5)), 1), 0, 1),
        "zeros in front": (lambda x: torch.cat((torch.zeros(3, 2, 5), x.exp()), 1), 0, 1),
        "more parts": (lambda x: torch.cat((x.exp(), x, torch.zeros(3, 2, 5)), 1), 0, 1),
        "zeros of another dtype": (lambda x: torch.cat((x.exp(), torch.zeros(3, 2, 5, dtype=torch.float64)), 1), 0, 1),
        "zeros alone": (lambda x: torch.cat((torch.zeros(3, 2, 5), torch.zeros(3, 2, 5)), 1) + x[:, :1], 0, 1),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("of", "f", "left"), [(of, f, left) for of, cases in LEFT.items() for f, *left in cases.values()],
    ids=[name for cases in LEFT.values() for name in cases],
)  # fmt: skip
def test_what_is_left(of, f, left):
    shape, *targets = of
    traced = trace(f, x := torch.randn(shape))
    assert [len(traced.graph.find_nodes(op="call_function", target=target)) for target in targets] == left
    torch.manual_seed(1)
    got = traced(x)
    got = got[0] if isinstance(got, tuple | list) else got
    torch.manual_seed(1)
    want = f(x)
    assert got.equal(want) and got.dtype == want.dtype and got.stride() == want.stride()


def test_symbolic_numbers_of_zeros():
    f = lambda x: torch.cat((x.exp(), x.new_zeros(x.shape[0], -x.shape[1] % 4, 5)), 1)  # noqa: E731
    frames = run(Function(f), (torch.randn(2, 6, 5),), dynamic=True)
    (analysis,) = frames.analyses
    (pad,) = analysis.captured.gm.graph.find_nodes(op="call_function", target=aten.pad.default)
    assert isinstance(pad.args[1][-1], fx.Node)
    for length in (6, 7, 9):
        x = torch.randn(3, length, 5)
        assert frames.compiled(x).equal(f(x))


# --- idioms behind them


class Prefill(nn.Module):
    """A normed latent that is written to an empty cache before it is projected up."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        latent = F.rms_norm(self.down(x), (4,), self.gain)
        cached = torch.cat((torch.tensor([]), latent.unsqueeze(1)), -2)
        return self.up(cached), cached, latent


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_latent_behind_an_empty_cache(dynamic):
    frames = check(Prefill(), (torch.randn(2, 3, 8),), dynamic=dynamic)
    assert frames.fired == {"down_norm_up": 1}
    _, cached, latent = frames.compiled(torch.randn(2, 3, 8))
    assert cached.untyped_storage().data_ptr() != latent.untyped_storage().data_ptr()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("p", "training", "sites"), [(0.0, True, 1), (0.5, False, 1), (0.5, True, 0)])
def test_experts_that_end_in_a_dropout(p, training, sites):
    module = MoE(where_index_add, Ungated)
    module.experts = nn.ModuleList(nn.Sequential(expert, nn.Dropout(p)) for expert in module.experts)
    frames = check_graph(module.train(training), (torch.randn(11, DIM),))
    assert frames.fired.get("moe", 0) == sites
    assert frames.tags("moe") == (set() if sites else {"no-expert"})


class Experts(nn.Module):
    """Every choice has its own copy of the weights, and biases are added in place."""

    def __init__(self, add, dim=8, hidden=12, experts=4):
        super().__init__()
        self.add, self.router = add, nn.Linear(dim, experts)
        self.up, self.up_bias = nn.Parameter(torch.randn(experts, hidden, dim)), nn.Parameter(torch.randn(experts, hidden))
        self.down, self.down_bias = nn.Parameter(torch.randn(experts, dim, hidden)), nn.Parameter(torch.randn(experts, dim))

    def forward(self, x):
        gates, indices = self.router(x).softmax(-1).topk(2)
        ids = indices.flatten()
        h = self.add(torch.bmm(self.up[ids], x.repeat_interleave(2, 0)[..., None]), self.up_bias[ids])
        h = self.add(torch.bmm(self.down[ids], nn.functional.gelu(h)[..., None]), self.down_bias[ids])
        return (h.unflatten(0, (-1, 2)) * gates[..., None]).sum(1)


def to_the_entry(product, bias):
    return product[..., 0].add_(bias)


def to_the_squeezed(product, bias):
    product = product[:, :, 0]
    product += bias
    return product


@pytest.mark.parametrize("add", [to_the_entry, to_the_squeezed], ids=lambda f: f.__name__)
def test_experts_with_biases_added_in_place(add):
    assert_fires("moe", Experts(add).double(), (torch.randn(11, 8, dtype=torch.float64).requires_grad_(),))


def test_experts_of_any_number_of_tokens():
    assert_dynamic("moe", Experts(to_the_entry), lambda n: (torch.randn(n, 8).requires_grad_(),), everything=True)


def test_experts_under_autocast():
    assert_autocast("moe", Experts(to_the_entry), (torch.randn(200, 8).requires_grad_(),))
