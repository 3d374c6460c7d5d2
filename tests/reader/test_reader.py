"""What the reader says of a value, held against what the values are: each answer is applied to the operands again."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.filled import padded_in_front
from megacpp_compile.fx.views import COPIES, RESHAPES, is_cast
from megacpp_compile.fx.walks import ancestors, descendants
from megacpp_compile.reader.dims import long_places, permutation, reduced_dims, regrouped, repetition
from megacpp_compile.reader.links import above, chain, through, widens
from megacpp_compile.reader.parts import part_of
from megacpp_compile.reader.products import BROADCAST, contraction
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

draw = Draws(__name__)
X, M, V, W = draw(2, 3, 4), draw(4, 5), draw(4), draw(5, 4)
B, C = draw(2, 4, 5), draw(1, 4, 5)


@pytest.mark.parametrize("f", [
    lambda x: x.transpose(0, -1), lambda x: x.permute(-1, 0, 1), lambda x: x[0].t(), lambda x: x.mT,
    lambda x: x.movedim(0, 2), lambda x: x.movedim((0, 1), (2, 0)),
])  # fmt: skip
def test_permutations(f):
    node = trace(f, X).output
    assert torch.equal((X if node.args[0].op == "placeholder" else X[0]).permute(permutation(node)), f(X))


def test_what_is_no_permutation():
    assert permutation(trace(lambda x: x.reshape(4, 3, 2), X).output) is None


@pytest.mark.parametrize(("f", "expected"), [
    (lambda x: x[:, :1].expand(-1, 5, -1), ([1, 5, 1], False)), (lambda x: x.expand(6, 2, 3, 4), ([6, 1, 1, 1], False)),
    (lambda x: x.repeat(5, 1, 2, 3), ([5, 1, 2, 3], False)), (lambda x: x.repeat_interleave(3, 1), ([1, 3, 1], True)),
    (lambda x: x[0, 0].repeat_interleave(3), ([3], True)), (lambda x: x.repeat_interleave(3), None),
    (lambda x: x.reshape(2, 1, 12), None),
])  # fmt: skip
def test_repetitions(f, expected):
    node = trace(f, X).output
    assert repetition(node) == expected
    if expected is not None:
        source = X if node.args[0].op == "placeholder" else X[:, :1] if X.dim() == value(node.args[0]).dim() else X[0, 0]
        times, inside = expected
        made = source.expand(*(1,) * (len(times) - source.dim()), *source.shape)
        for dim, n in enumerate(times):
            made = made.repeat_interleave(n, dim) if inside else torch.cat([made] * n, dim)
        assert torch.equal(made, f(X))


@pytest.mark.parametrize(("here", "there", "expected"), [
    ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]), ((2, 12), (2, 1, 3, 4), [([0], [0]), ([1], [2, 3])]),
    ((4, 6), (3, 8), [([0, 1], [0, 1])]), ((1, 5), (5,), [([1], [0])]), ((2, 3), (4,), None), ((2, 3), (2,), None),
    ((), (1,), []),
])  # fmt: skip
def test_reshapes_are_runs_of_dimensions_with_as_many_elements(here, there, expected):
    assert regrouped(here, there) == expected


@pytest.mark.parametrize("f", [
    lambda x: x[:, 1:], lambda x: x[..., -3:], lambda x: x[:, :, ::2], lambda x: x[:, -9:2], lambda x: x[1],
    lambda x: x[:, -1], lambda x: x.split([1, 3], -1)[1], lambda x: x.split(2, 2)[1], lambda x: x.chunk(2, -1)[1],
    lambda x: x.unbind(1)[2],
])  # fmt: skip
def test_parts(f):
    traced = trace(f, X)
    part = part_of(traced.output)
    assert part is not None and part.source is traced.inputs[0] and part.whole == X.shape[part.dim]
    places = [part.start + part.step * i for i in range(part.size)]
    taken = X.index_select(part.dim, torch.tensor(places))
    assert torch.equal(taken if part.kept else taken.squeeze(part.dim), f(X))


def test_what_is_no_part():
    assert part_of(trace(lambda x: x.max(-1).values, X).output) is None
    assert part_of(trace(lambda x: x.reshape(6, 4), X).output) is None


@pytest.mark.parametrize(("f", "args"), [
    (torch.matmul, (X, M)), (torch.matmul, (X, V)), (torch.matmul, (V, M)), (torch.matmul, (V, B)), (torch.bmm, (X, B)),
    (torch.matmul, (X, C)), (torch.mm, (X[0], M)), (torch.mv, (X[0], V)), (torch.nn.functional.linear, (X, W)),
    (lambda x, b: torch.einsum("bti,bio->bot", x, b), (X, B)), (lambda x, b: torch.einsum("bti,bio->t", x, b), (X, B)),
    (lambda x, b: torch.einsum("bti,cio->tobc", x, b), (X, B)),
    (lambda x, b: torch.tensordot(x, b, ([0, 2], [0, 1])), (X, B)),
    (lambda x, m, w: torch.einsum("bti,io,oj->btj", x, m, w), (X, M, W)),
])  # fmt: skip
def test_products_are_their_factors_over_the_dimensions_of_the_result(f, args):
    traced = trace(f, *args)
    product = contraction(traced.output)
    assert product is not None and [factor.node for factor in product.factors] == traced.inputs
    given = []
    for factor, x in zip(product.factors, args, strict=True):
        repeated = [d for d, place in enumerate(factor.dims) if place == BROADCAST]
        given += [x.squeeze(repeated), [place % 32 for place in factor.dims if place != BROADCAST]]
    torch.testing.assert_close(torch.einsum(*given, list(range(f(*args).dim()))), f(*args))


@pytest.mark.parametrize(("f", "args"), [
    (torch.addmm, (draw(5), X[0], M)), (torch.baddbmm, (draw(2, 3, 5), X, B)),
    (torch.nn.functional.linear, (X, W, draw(5))),
])  # fmt: skip
def test_what_is_added_to_a_product(f, args):
    product = contraction(trace(f, *args).output)
    assert product is not None and product.bias is not None and len(product.factors) == 2
    assert contraction(trace(lambda x: x * 2, X).output) is None


def test_a_diagonal_is_no_product():
    assert contraction(trace(lambda x, m: torch.einsum("btt,io->bio", x, m), draw(2, 3, 3), M).output) is None


@pytest.mark.parametrize("f", [
    lambda x: x.sum(-1),
    lambda x: x.sum((0, -1), keepdim=True),
    lambda x: x.amax(1),
    lambda x: x.mean((-2,)),
])  # fmt: skip
def test_reductions(f):
    node = trace(f, X).output
    dims, keep = reduced_dims(node)
    assert f(X).shape == X.sum(dims, keepdim=keep).shape


def test_dimensions_of_size_1():
    assert long_places(trace(lambda x: x[:, None].reshape(2, 3, 1, 4), X).output) == {0: 0, 2: 1, 3: 3}
    assert long_places(trace(lambda x: x.reshape(3, 2, 4), X).output) is None


def test_chains_of_links():
    traced = trace(lambda x: x.bfloat16().reshape(6, 4).float().clone().sin(), X)
    end, x = traced.output.args[0], traced.inputs[0]
    assert through(end, is_cast, RESHAPES, COPIES) is x and above(end, x) == chain(end, is_cast, RESHAPES, COPIES)[:-1]
    copied = chain(end, aten.clone.default, widens)
    assert len(copied) == 3 and copied[-1].target in RESHAPES
    assert through(end, lambda n: n is end and x) is x and through(2.0, is_cast) == 2.0


def test_walks():
    traced = trace(lambda x, y: (x.sin() * y, x.cos()), X, X + 1)
    (product, cosine), (x, y) = traced.outputs, traced.inputs
    assert set(ancestors([product])) == {product, product.args[0], x, y}
    assert set(ancestors([product], lambda n: n is not y)) == {product, product.args[0], x}
    assert {product, cosine} < set(descendants([x])) and cosine not in descendants([y])


@pytest.mark.parametrize(("f", "expected"), [
    (lambda x: torch.nn.functional.pad(x, (0, 0, 2, 0)), 2),
    (lambda x: torch.nn.functional.pad(x, (0, 0, 1, 3)), 1),
    (lambda x: torch.cat([x.new_zeros(2, 2, 4), x], 1), 2),
    (lambda x: torch.nn.functional.pad(x, (1, 0, 2, 0)), None),
    (lambda x: torch.nn.functional.pad(x, (0, 0, 2, 0), value=1.0), None),
    (lambda x: torch.cat([x, x], 1), None),
])  # fmt: skip
def test_padding_in_front(f, expected):
    traced = trace(f, X)
    assert padded_in_front(traced.output, 1) == (None if expected is None else (traced.inputs[0], expected))
