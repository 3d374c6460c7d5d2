"""`megacpp::down_norm_up`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.down_norm_up import down_norm_up

from . import BOTH, STRIDES, addresses, pairwise, strided
from .contract import assert_is, assert_keeps, assert_unread, detached, differentiate, gradcheck, leaves, tolerances

EPS = 1e-3  # large enough that its place matters
D, SIZE, REST = 8, 5, 3

# Where the latent stands in the down-projection: (start, channels that are not normed)
PLACES = {"all_channels": (0, 0), "rest_behind": (0, REST), "rest_before": (REST, REST)}
OPTIONAL = list(itertools.product(BOTH, repeat=2))  # bias, gain
# For what `opcheck` and numeric gradients ask; the formula is compared with in every combination.
PAIRS = pairwise(PLACES, BOTH, BOTH)


def arguments(rand, *, outer=(2, 3), place="rest_behind", bias=True, gain=True, ups=(4, 6), dtype=torch.float64, **kw):
    start, rest = PLACES[place]
    make = lambda *s: rand(*s, dtype=dtype, **{"grad": True, **kw})  # noqa: E731
    x, w_down = make(*outer, D), make(SIZE + rest, D)
    b_down, w_norm = make(SIZE + rest) if bias else None, make(SIZE) if gain else None
    return x, w_down, b_down, w_norm, [make(n, SIZE) for n in ups], EPS, start, SIZE


def formula(x, w_down, b_down, w_norm, w_up, eps, start, size):
    """The op by its definition, one GEMM after the other, all in the dtype it is given."""
    down = torch.einsum("...d,kd->...k", x, w_down)
    if b_down is not None:
        down = down + b_down
    latent = down[..., start : start + size]
    rest = torch.cat((down[..., :start], down[..., start + size :]), -1)
    root = ((latent * latent).sum(-1, keepdim=True) / size + eps).sqrt()
    normed = latent / root * (1 if w_norm is None else w_norm)
    return [torch.einsum("...c,nc->...n", normed, w) for w in w_up], rest, 1 / root


def seeds_for(rand, args, dtype=None):
    """Cotangents of ups and rest."""
    return [rand(*x.shape, dtype=dtype) for x in (*formula(*args)[0], formula(*args)[1])]


def test_opcheck_weights_without_gradient(rand):
    x, *weights = arguments(rand)
    opcheck(down_norm_up, (x, *detached(weights)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STRIDES)
def test_strided_inputs(rand, kind):
    x = strided(rand, kind, 2, 3, D)
    _, w_down, *others = arguments(rand)
    args = (x, w_down.detach().t().contiguous().t().requires_grad_(), *others)
    opcheck(down_norm_up, args)
    assert_is(down_norm_up, formula, rand, args, 1e-12, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "bias", "gain"), PAIRS)
def test_gradcheck(rand, place, bias, gain):
    gradcheck(down_norm_up, arguments(rand, place=place, bias=bias, gain=gain))


@tolerances(1e-12, 2e-6, 2e-2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("bias", "gain"), OPTIONAL)
def test_against_the_formula(rand, dtype, tolerance, place, bias, gain):
    args = arguments(rand, outer=(2, 7), place=place, bias=bias, gain=gain, dtype=dtype)
    got = assert_is(down_norm_up, formula, rand, args, tolerance, 3, 4, dtype)
    assert [t.dtype for t in got[:4]] == [*[dtype] * 3, torch.promote_types(dtype, torch.float32)]


def test_up_weights_may_have_a_dtype_of_their_own(rand):
    x, w_down, b_down, w_norm, w_up, *rest = arguments(rand, dtype=torch.bfloat16)
    w_up = [w.detach().float().requires_grad_() for w in w_up]
    args = (x, w_down, b_down, w_norm.detach().float().requires_grad_(), w_up, *rest)
    opcheck(down_norm_up, args)
    up, other, *_ = down_norm_up(*args)
    assert [u.dtype for u in up] == [torch.float32] * 2 and other.dtype == torch.bfloat16
    grads = torch.autograd.grad(sum(u.sum() for u in up) + other.sum(), leaves(args))
    assert [g.dtype for g in grads] == [t.dtype for t in leaves(args)]


@pytest.mark.parametrize("used", [0, 1, 2], ids=["first_up", "second_up", "rest"])
def test_outputs_that_nobody_reads(rand, used):
    assert_unread(down_norm_up, formula, arguments(rand), used)


def test_rrms_has_no_gradient(rand):
    assert not down_norm_up(*arguments(rand))[2].requires_grad


@pytest.mark.parametrize(("bias", "gain"), OPTIONAL)
def test_keeps_inputs_and_rrms_only(rand, bias, gain):
    args = arguments(rand, bias=bias, gain=gain)
    assert_keeps(down_norm_up, args, args, 3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("place", "bias", "gain"), PAIRS)
def test_latent_kept_on_request(rand, place, bias, gain):
    args = arguments(rand, place=place, bias=bias, gain=gain)
    seeds = seeds_for(rand, args)
    plain, keeping = (differentiate(down_norm_up, given, seeds, 4) for given in (args, (*args, True)))
    torch.testing.assert_close(plain, keeping)
    latent = assert_keeps(down_norm_up, (*args, True), args, 3, 4)[4]
    x, w_down, b_down, *_, start, size = args
    want = torch.nn.functional.linear(x, w_down, b_down)[..., start : start + size]
    torch.testing.assert_close(latent, want.detach())


def test_outputs_own_their_memory(rand):
    """`rest` must not keep the whole down-projection alive, nor an output alias another."""
    up, rest, rrms, _ = down_norm_up(*arguments(rand))
    outs = [*up, rest, rrms]
    assert len(addresses(*outs)) == len(outs)
    assert rest.untyped_storage().nbytes() == rest.nbytes


def test_second_use_of_the_same_inputs(rand):
    args = arguments(rand)
    before = [t.detach().clone() for t in leaves(args)]
    seeds = seeds_for(rand, args)
    first, second = (differentiate(down_norm_up, args, seeds, 4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, leaves(args), strict=True))


@pytest.mark.parametrize("normed", [None, torch.float64])
def test_a_group_of_one_rank_changes_nothing(rand, alone, normed):
    args = arguments(rand, ups=(3, 2))
    opcheck(down_norm_up, (*args, False, None, None, normed, alone))
    operands = leaves(args)
    gradients = []
    for group in (None, alone):
        up, rest, _, _ = down_norm_up(*args, False, None, None, normed, group)
        outs = [*up, rest]
        seeds = [torch.ones_like(t) * (i + 1) for i, t in enumerate(outs)]
        gradients.append(torch.autograd.grad(outs, operands, seeds, retain_graph=True))
        gradients.append(differentiate(lambda *_, outs=outs[-2:]: outs, args, seeds[-2:], 0))
    for a, b in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keep", [False, True])
def test_low_rank_path_and_other_readers(rand, place, keep):
    """With a path beside the down-projection, the normed latent a result and, if it is kept, the latent too."""
    *args, start, size = arguments(rand, place=place)
    x, w_down, b_down, w_norm, w_up, eps = args
    x_side, w_side = (rand(*s, dtype=x.dtype, grad=True) for s in ((2, 3, 2), (len(w_down), 2)))
    given = (*args, start, size, keep, x_side, w_side, x.dtype)
    opcheck(down_norm_up, given)
    up, rest, rrms, latent = down_norm_up(*given)
    both = torch.cat((x, x_side), -1), torch.cat((w_down, w_side), 1)
    identity = torch.eye(size, dtype=x.dtype)
    wanted, wanted_rest, root = formula(*both, b_down, w_norm, [*w_up, identity], eps, start, size)
    raw = torch.nn.functional.linear(*both, b_down)[..., start : start + size]
    got = [*up, rest, *([latent] if keep else [])]
    want = [*wanted, wanted_rest, *([raw] if keep else [])]
    operands = leaves(given)
    for read in ([0], [2], [3], [0, 2], list(range(len(want)))):  # ups, the normed latent, what is not normed, latent
        seeds = [rand(*want[i].shape, dtype=x.dtype) for i in read]
        gradients = [
            torch.autograd.grad(
                [outs[i] for i in read], operands, seeds, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for outs in (got, want)
        ]
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close([*got, rrms], [*want, root])


def test_low_rank_path_added_in_a_wider_dtype(rand):
    """The sum, what is not normed and the latent are in that dtype, and backward recomputes the latent in it."""
    *args, start, size = arguments(rand, dtype=torch.float32)
    x, w_down, b_down, w_norm, w_up, eps = args
    x_side, w_side = (rand(*s, dtype=x.dtype, grad=True) for s in ((2, 3, 2), (len(w_down), 2)))
    given = (*args, start, size, False, x_side, w_side, None, None, torch.float64)
    opcheck(down_norm_up, given)
    down = torch.nn.functional.linear(x, w_down, b_down).double() + torch.nn.functional.linear(x_side, w_side)
    latent, rest = down[..., start : start + size], torch.cat((down[..., :start], down[..., start + size :]), -1)
    normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps)
    normed = normed if w_norm is None else normed * w_norm
    want = [*(normed.to(w.dtype) @ w.t() for w in w_up), rest]
    up, rest, rrms, kept = down_norm_up(*given)
    got, operands = [*up, rest], leaves(given)
    assert rest.dtype == rrms.dtype == torch.float64 and kept.numel() == 0
    seeds = [rand(*w.shape, dtype=w.dtype) for w in want]
    gradients = [torch.autograd.grad(outs, operands, seeds) for outs in (got, want)]
    for a, b in zip([*got, *gradients[0]], [*want, *gradients[1]], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
