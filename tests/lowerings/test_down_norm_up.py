"""`megacpp::down_norm_up`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from megacpp_compile.lowerings.down_norm_up import down_norm_up, down_norm_up_backward

from . import BOTH, STRIDES, addresses, pairwise, relative_error, saved_by, strided

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


def tensors(args):
    """Those arguments that ask for a gradient, the list of ups flattened."""
    flat = [*args[:4], *args[4]]
    return [t for t in flat if t is not None and t.requires_grad]


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


def differentiate(function, args, seeds):
    """Outputs, and gradients of every tensor argument against the cotangents `seeds` of ups and rest."""
    up, rest, rrms, *_ = function(*args)
    outs = [*up, rest]
    loss = sum((o * s.to(o)).sum() for o, s in zip(outs, seeds, strict=True))
    return [*outs, rrms], list(torch.autograd.grad(loss, tensors(args), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize(("place", "bias", "gain"), PAIRS)
def test_opcheck(rand, place, bias, gain):
    opcheck(down_norm_up, arguments(rand, place=place, bias=bias, gain=gain))


@pytest.mark.parametrize("ups", [(4,), (4, 6, 5)], ids=["one_up", "three_ups"])
@pytest.mark.parametrize("outer", [(1,), (2, 1), (0, 3), (2, 1, 3)], ids=str)
def test_opcheck_shapes(rand, ups, outer):
    opcheck(down_norm_up, arguments(rand, outer=outer, ups=ups, place="rest_before"))


def test_opcheck_other_dtypes(rand):
    for dtype in (torch.float32, torch.bfloat16):
        opcheck(down_norm_up, arguments(rand, dtype=dtype))


def test_opcheck_weights_without_gradient(rand):
    x, *weights = arguments(rand)
    frozen = [w.detach() if isinstance(w, torch.Tensor) else w for w in weights]
    frozen[3] = [w.detach() for w in weights[3]]
    opcheck(down_norm_up, (x, *frozen))


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_inputs(rand, kind):
    x = strided(rand, kind, 2, 3, D)
    _, w_down, *others = arguments(rand)
    args = (x, w_down.detach().t().contiguous().t().requires_grad_(), *others)
    opcheck(down_norm_up, args)
    seeds = [rand(*o.shape) for o in (*formula(*args)[0], formula(*args)[1])]
    for got, want in zip(*(sum(differentiate(f, args, seeds), []) for f in (down_norm_up, formula)), strict=True):
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize(("place", "bias", "gain"), PAIRS)
def test_gradcheck(rand, place, bias, gain):
    args = arguments(rand, place=place, bias=bias, gain=gain)
    leaves = tensors(args)

    def function(*leaves):
        it = iter(leaves)
        x, w_down = next(it), next(it)
        b_down, w_norm = next(it) if bias else None, next(it) if gain else None
        up, rest, *_ = down_norm_up(x, w_down, b_down, w_norm, list(it), *args[5:])
        return *up, rest

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("bias", "gain"), OPTIONAL)
def test_against_the_formula(rand, dtype, tolerance, place, bias, gain):
    """Rounding alone: the formula sees the same rounded inputs, in float64."""
    args = arguments(rand, outer=(2, 7), place=place, bias=bias, gain=gain, dtype=dtype)
    wide = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in args]
    wide[4] = [w.detach().double().requires_grad_() for w in args[4]]
    up, rest, _ = formula(*wide)
    seeds = [rand(*o.shape, dtype=dtype) for o in (*up, rest)]
    outputs, gradients = differentiate(down_norm_up, args, seeds)
    expected, expected_gradients = differentiate(formula, wide, seeds)
    assert [o.dtype for o in outputs] == [*[dtype] * 3, torch.promote_types(dtype, torch.float32)]
    for got, want in zip(outputs + gradients, expected + expected_gradients, strict=True):
        assert relative_error(got, want) < tolerance or not want.numel()
    assert [g.dtype for g in gradients] == [t.dtype for t in tensors(args)]


def test_up_weights_may_have_a_dtype_of_their_own(rand):
    x, w_down, b_down, w_norm, w_up, *rest = arguments(rand, dtype=torch.bfloat16)
    w_up = [w.detach().float().requires_grad_() for w in w_up]
    args = (x, w_down, b_down, w_norm.detach().float().requires_grad_(), w_up, *rest)
    opcheck(down_norm_up, args)
    up, other, *_ = down_norm_up(*args)
    assert [u.dtype for u in up] == [torch.float32] * 2 and other.dtype == torch.bfloat16
    grads = torch.autograd.grad(sum(u.sum() for u in up) + other.sum(), tensors(args))
    assert [g.dtype for g in grads] == [t.dtype for t in tensors(args)]


@pytest.mark.parametrize("used", ["first_up", "rest", "second_up"])
def test_outputs_that_nobody_reads(rand, used):
    args = arguments(rand)

    def pick(function):
        up, rest, *_ = function(*args)
        out = {"first_up": up[0], "second_up": up[1], "rest": rest}[used]
        return torch.autograd.grad(out.square().sum(), tensors(args), allow_unused=True, materialize_grads=True)

    for got, want in zip(pick(down_norm_up), pick(formula), strict=True):
        torch.testing.assert_close(got, want)


def test_rrms_has_no_gradient(rand):
    assert not down_norm_up(*arguments(rand))[2].requires_grad


@pytest.mark.parametrize(("bias", "gain"), OPTIONAL)
def test_keeps_inputs_and_rrms_only(rand, bias, gain):
    args = arguments(rand, bias=bias, gain=gain)
    outputs = []
    kept = saved_by(lambda: outputs.append(down_norm_up(*args)))
    assert kept == addresses(*tensors(args), outputs[0][2])


@pytest.mark.parametrize(("place", "bias", "gain"), PAIRS)
def test_latent_kept_on_request(rand, place, bias, gain):
    """Same results and gradients, and the latent's buffer beside what is kept otherwise."""
    args = arguments(rand, place=place, bias=bias, gain=gain)
    opcheck(down_norm_up, (*args, True))
    seeds = [rand(*o.shape) for o in (*formula(*args)[0], formula(*args)[1])]
    plain, keeping = (
        sum(differentiate(f, args, seeds), []) for f in (down_norm_up, lambda *a: down_norm_up(*a, True))
    )
    for a, b in zip(plain, keeping, strict=True):
        torch.testing.assert_close(a, b)
    outputs = []
    kept = saved_by(lambda: outputs.append(down_norm_up(*args, True)))
    *_, rrms, latent = outputs[0]
    assert kept == addresses(*tensors(args), rrms, latent)
    x, w_down, b_down, *_, start, size = args
    want = torch.nn.functional.linear(x, w_down, b_down)[..., start : start + size]
    torch.testing.assert_close(latent, want.detach())


def test_outputs_own_their_memory(rand):
    """`rest` must not keep the whole down-projection alive, nor an output alias another."""
    up, rest, rrms, _ = down_norm_up(*arguments(rand))
    outs = [*up, rest, rrms]
    assert len(addresses(*outs)) == len(outs)
    assert rest.untyped_storage().nbytes() == rest.nbytes


def test_autocast_does_not_reach_inside(rand):
    args = arguments(rand, dtype=torch.float32)
    want = down_norm_up(*args)
    with torch.autocast("cpu", torch.bfloat16):
        got = down_norm_up(*args)
    for a, b in zip([*got[0], *got[1:]], [*want[0], *want[1:]], strict=True):
        assert torch.equal(a, b)


def test_second_use_of_the_same_inputs(rand):
    """Nothing is written in place: calling twice gives the same."""
    args = arguments(rand)
    before = [t.detach().clone() for t in tensors(args)]
    seeds = [rand(*o.shape) for o in (*formula(*args)[0], formula(*args)[1])]
    first, second = (sum(differentiate(down_norm_up, args, seeds), []) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(args), strict=True))


def test_opcheck_backward(rand):
    x, w_down, b_down, w_norm, w_up, eps, start, size = (
        [w.detach() for w in a] if isinstance(a, list) else a.detach() if isinstance(a, torch.Tensor) else a
        for a in arguments(rand)
    )
    up, rest, rrms, _ = down_norm_up(x, w_down, b_down, w_norm, w_up, eps, start, size)
    latent = (x @ w_down.t())[..., start : start + size]
    for optional, kept in (((b_down, w_norm), []), ((None, None), [latent])):
        seeds = [torch.ones_like(u) for u in up], torch.ones_like(rest)
        opcheck(down_norm_up_backward, (*seeds, x, w_down, *optional, w_up, rrms, start, size, *kept))


@pytest.fixture
def alone():
    """The name of a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("normed", [None, torch.float64])
def test_a_group_of_one_rank_changes_nothing(rand, alone, normed):
    args = arguments(rand, ups=(3, 2))
    opcheck(down_norm_up, (*args, False, None, None, normed, alone))
    leaves = tensors(args)
    gradients = []
    for group in (None, alone):
        up, rest, _, _ = down_norm_up(*args, False, None, None, normed, group)
        outs = [*up, rest]
        seeds = [torch.ones_like(t) * (i + 1) for i, t in enumerate(outs)]
        gradients.append(torch.autograd.grad(outs, leaves, seeds, retain_graph=True))
        gradients.append(torch.autograd.grad(outs[-2:], leaves, seeds[-2:], allow_unused=True, materialize_grads=True))
    for a, b in zip(gradients[:2], gradients[2:], strict=True):
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other)


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
    leaves = [*tensors(args), x_side, w_side]
    for read in ([0], [2], [3], [0, 2], list(range(len(want)))):  # ups, the normed latent, what is not normed, latent
        seeds = [rand(*want[i].shape, dtype=x.dtype) for i in read]
        gradients = [
            torch.autograd.grad(
                [outs[i] for i in read], leaves, seeds, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for outs in (got, want)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip([*got, rrms], [*want, root], strict=True):
        torch.testing.assert_close(a, b)


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
    got, leaves = [*up, rest], [*tensors(args), x_side, w_side]
    assert rest.dtype == rrms.dtype == torch.float64 and kept.numel() == 0
    seeds = [rand(*w.shape, dtype=w.dtype) for w in want]
    gradients = [torch.autograd.grad(outs, leaves, seeds) for outs in (got, want)]
    for a, b in zip([*got, *gradients[0]], [*want, *gradients[1]], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
