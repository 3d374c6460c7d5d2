"""`megacpp::compressed_linear`: registration, the formula, its signs, that its gradients are unbiased and how noisy, and
what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.compressed_linear import compressed_linear
from megacpp_compile.lowerings.compressed_linear.signs import WORD, magnitude, philox, signs

from . import STRIDES, strided
from .contract import agree, assert_keeps, differentiate, leaves, tolerances, widened

D, TOKENS = 12, 10


def arguments(rand, bias=True, outer=(2, 3), d=6, ups=(4, 5), dtype=torch.float64, draw=5, rank=3, seed=11):
    w = [rand(n, d, dtype=dtype, grad=True) for n in ups]
    b = [rand(n, dtype=dtype, grad=True) for n in ups] if bias else []
    drawn = None if draw is None else torch.tensor(draw)
    return rand(*outer, d, dtype=dtype, grad=True), w, b, drawn, rank, seed


def linears(x, w, b, *_):
    return [F.linear(x, one, b[i] if b else None) for i, one in enumerate(w)]


def projector(d, draw, rank, seed):
    """c S S^T, in float64."""
    s = signs(d, rank, draw, seed, torch.ones((), dtype=torch.float64))
    return s @ s.t() / (rank * magnitude(rank) ** 2)


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_input(rand, kind):
    _, *others = arguments(rand)
    opcheck(compressed_linear, (strided(rand, kind, 2, 3, 6), *others), test_utils=("test_schema", "test_faketensor"))


def test_refuses(rand):
    x, w, b, draw, rank, seed = arguments(rand)
    for wrong in ((x, [], b, draw, rank, seed), (x[0, 0], w, b, draw, rank, seed),
                  (x, [w[0], rand(4, 7)], b, draw, rank, seed), (x, w, b[:1], draw, rank, seed),
                  (x.float(), w, b, draw, rank, seed), (x, w, b, draw.int(), rank, seed),
                  (x, w, b, draw[None], rank, seed), (x, w, b, draw, 0, seed), (x, w, b, draw, 7, seed),
                  (x, w, b, draw, rank, -1)):
        with pytest.raises(OperandError):
            compressed_linear(*wrong)


@pytest.mark.parametrize(("counter", "key", "words"),
                         [((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
                          ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
                          ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
                           (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))], ids=["zeros", "ones", "pi"])  # fmt: skip
def test_philox(counter, key, words):
    """The vectors that Random123 publishes with its generators."""
    found = philox(tuple(map(torch.tensor, counter)), key[0] | key[1] << 32)
    assert [int(word) for word in found] == list(words)


def test_signs_are_all_there_is_to_them():
    """Of one size in every dtype, as often plus as minus, and independent: no two rows or columns are alike by more than
    chance, of which six standard deviations are."""
    s = signs(96, 80, None, 3, torch.ones((), dtype=torch.float64)) / magnitude(80)
    assert torch.equal(s.abs(), torch.ones_like(s))
    assert abs(float(s.sum())) < 6 * s.numel() ** 0.5
    for gram, n in ((s @ s.t(), 80), (s.t() @ s, 96)):
        assert float((gram - gram.diagonal().diag()).abs().max()) < 6 * n**0.5
    low = signs(96, 80, None, 3, torch.ones((), dtype=torch.bfloat16))
    assert torch.equal(low.double() / magnitude(80), s)


def test_signs_change_with_everything():
    like = torch.ones(())
    made = [signs(16, 16, draw, seed, like) for seed in (0, 1, 1 << 40)
            for draw in (None, *map(torch.tensor, (1, 1 << 40, -1)))]  # fmt: skip
    assert len({tuple(s.sign().flatten().tolist()) for s in made}) == len(made)
    assert torch.equal(signs(16, 16, torch.tensor(0), 0, like), made[0]), "no draw is draw 0"
    assert torch.equal(signs(9, 16, None, 0, like), made[0][:9]), "a matrix of fewer rows is the top of it"


@tolerances(1e-13, 1e-6, 1e-2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_against_linears(rand, dtype, tolerance, bias, rank):
    """Outputs, and gradients of x and biases, are those of linears; weights' are theirs projected. Rounding alone: the
    linears see the same rounded inputs, in float64."""
    args = arguments(rand, bias, dtype=dtype, rank=rank)
    seeds = [rand(2, 3, n, dtype=dtype) for n in (4, 5)]
    got, want = differentiate(compressed_linear, args, seeds), differentiate(linears, widened(args), seeds)
    want[3:5] = [w @ projector(6, *args[3:]) for w in want[3:5]]
    assert [t.dtype for t in got[2:]] == [t.dtype for t in leaves(args)]
    agree(got, want, tolerance)


def estimates(rand, rank, count):
    """(the exact gradient of a weight, its estimates by `count` seeds)."""
    x, w, seed = rand(TOKENS, D), rand(4, D, grad=True), rand(TOKENS, 4)
    found = []
    for i in range(count):
        (y,), _ = compressed_linear(x, [w], [], None, rank, i)
        found.append(torch.autograd.grad((y * seed).sum(), w)[0])
    return seed.t() @ x, torch.stack(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", [3, 6])
def test_unbiased(rand, rank):
    """The mean over seeds comes to the exact gradient as the standard error of the mean does, element by element, and is
    off by no more in the whole than (d - 1) / r of the gradient's square, over the seeds."""
    exact, found = estimates(rand, rank, 250)
    error = found.std(0) / len(found) ** 0.5
    assert float(((found.mean(0) - exact).abs() / error).max()) < 5
    off = float((found.mean(0) - exact).norm() / exact.norm())
    assert off < 2 * math.sqrt((D - 1) / rank / len(found))


@pytest.mark.end_to_end
def test_noise_falls_as_the_root_of_the_rank(rand):
    """And has the variance that the contract says; at r = d it is there all the same."""
    for rank in (1, 3, D):
        exact, found = estimates(rand, rank, 200)
        noise = float((found - exact).square().sum((1, 2)).mean() / exact.square().sum())
        assert noise == pytest.approx((D - 1) / rank, rel=0.25)


def test_the_same_seed_makes_the_same_gradient_through_a_checkpoint(rand):
    args = arguments(rand)
    seeds = [rand(2, 3, n) for n in (4, 5)]
    want, again = (differentiate(compressed_linear, args, seeds) for _ in range(2))
    call = lambda x, *a: checkpoint(lambda x: compressed_linear(x, *a)[0], x, use_reentrant=False)  # noqa: E731
    over = differentiate(call, args, seeds)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, again, over, strict=True))


def test_touches_no_random_state(rand):
    args = arguments(rand)
    before = torch.get_rng_state()
    compressed_linear(*args)[0][0].sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_keeps_the_projection_and_not_its_input(rand):
    args = arguments(rand)
    z = assert_keeps(compressed_linear, args, (args[1], args[3]), 2)[2]
    assert z.shape == (2, 3, args[4]) and not z.requires_grad


def test_a_linear_nobody_used(rand):
    args = arguments(rand)
    grads = torch.autograd.grad(compressed_linear(*args)[0][0].sum(), leaves(args), allow_unused=True)
    assert grads[2] is None and grads[4] is None and grads[1].any()
