"""`megacpp::selective_scan`: registration, gradients, the recurrence, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.selective_scan import cpu_autograd, selective_scan
from megacpp_compile.lowerings.selective_scan.reference import selective_scan as reference

from .agreement import TIMES_ROUNDING, faults
from .contract import agree, assert_keeps, assert_unread, differentiate, gradcheck, leaves, seeds_for, widened
from .rounding import moved_by_rounding

OPTIONAL = list(itertools.product((False, True), repeat=2))  # skip, initial state
SINGLE = torch.finfo(torch.float32).eps


def arguments(rand, *, b=2, t=19, d=6, n=5, skip=True, initial=True, dtype=torch.float64, chunk=16):
    """Operands of one call; dt and A as in a model: positive, and negative float32."""
    wide = torch.promote_types(dtype, torch.float32)
    u = rand(b, t, d, dtype=dtype, grad=True)
    dt = rand(b, t, d, dtype=wide).abs().requires_grad_()
    A = (-rand(d, n, dtype=wide).abs() - 0.1).requires_grad_()
    B, C = (rand(b, t, n, dtype=dtype, grad=True) for _ in range(2))
    D = rand(d, dtype=wide, grad=True) if skip else None
    state = rand(b, d, n, dtype=wide, grad=True) if initial else None
    return u, dt, A, B, C, D, state, chunk, dtype


def recurrence(u, dt, A, B, C, D, state, chunk, *_):
    """The op by its definition, one position after the other, in the dtype it is given."""
    b, t, d = u.shape
    state = u.new_zeros(b, d, A.shape[1]) if state is None else state
    y, entering = [u[:, :0]], []
    for i in range(t):
        entering.append(state)
        state = (dt[:, i, :, None] * A).exp() * state + (dt[:, i] * u[:, i])[..., None] * B[:, i, None]
        read = torch.einsum("bdn,bn->bd", state, C[:, i])
        y.append((read if D is None else read + D * u[:, i]).unsqueeze(1))
    entering = torch.stack(entering[::chunk], 1) if entering else state.new_zeros(b, 0, *state.shape[1:])
    return torch.cat(y, 1), state, entering


def both(rand, args, results=3):
    """Results and gradients of the op, and of its formula."""
    seeds = seeds_for(rand, selective_scan, args, 2)
    return (differentiate(f, args, seeds, results) for f in (selective_scan, recurrence))


@pytest.mark.parametrize(("skip", "initial"), OPTIONAL)
def test_gradcheck(rand, skip, initial):
    gradcheck(selective_scan, arguments(rand, b=1, t=18, d=2, n=3, skip=skip, initial=initial), fast_mode=True)


@pytest.mark.parametrize("t", [0, 1, 2, 15, 16, 17, 47, 64])
@pytest.mark.parametrize(("skip", "initial"), OPTIONAL)
def test_against_the_recurrence(rand, t, skip, initial):
    for got, want in zip(*both(rand, arguments(rand, t=t, skip=skip, initial=initial)), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 64, 256])
def test_chunk_size_is_free(rand, chunk):
    """It decides where states are kept, not what comes out; many chunks at once as well as one."""
    agree(*both(rand, arguments(rand, b=1, t=130, chunk=chunk)), 1e-11)


def roundings(args, seeds, results):
    """As `agreement.disagreements` allows, by output of `differentiate`."""
    moved = moved_by_rounding(lambda *a: differentiate(reference, a, seeds, results), args, SINGLE)
    return [TIMES_ROUNDING * m for m in moved]


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 8), (torch.bfloat16, 1)], ids=str)
def test_lower_precision(rand, dtype, units):
    """Rounding alone: the recurrence sees the same rounded operands, in float64. The reference computes in float32 and
    rounds once."""
    args = arguments(rand, t=70, dtype=dtype)
    wide, seeds = widened(args), seeds_for(rand, selective_scan, args, 2, dtype)
    got, want = differentiate(selective_scan, args, seeds, 3), differentiate(recurrence, wide, seeds, 3)
    assert [o.dtype for o in got] == [dtype, torch.float32, torch.float32, *(t.dtype for t in leaves(args))]
    assert not faults(got, want, units * torch.finfo(dtype).eps, lambda: roundings(wide, seeds, 3))


@pytest.mark.end_to_end
def test_strong_decay_over_long_sequences(rand):
    """Decays far below the smallest number become zero, never NaN, and what is near stays near."""
    args = list(arguments(rand, b=1, t=600, d=4, n=3, dtype=torch.float32, chunk=256))
    args[2] = torch.tensor([-160.0, -16.0, -0.5, 0.0])[:, None].expand(4, 3).contiguous().requires_grad_()
    wide, seeds = widened(args), seeds_for(rand, selective_scan, args, 2)
    got, want = differentiate(selective_scan, args, seeds, 2), differentiate(recurrence, wide, seeds, 2)
    assert not faults(got, want, 8 * SINGLE, lambda: roundings(wide, seeds, 2))


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_that_nobody_reads(rand, used):
    assert_unread(selective_scan, recurrence, arguments(rand), used)


@pytest.mark.parametrize(("skip", "initial"), OPTIONAL)
def test_keeps_operands_and_states_only(rand, skip, initial):
    args = arguments(rand, skip=skip, initial=initial)
    assert not assert_keeps(selective_scan, args, args, 2)[2].requires_grad


def test_strided_operands(rand):
    """As in a model: slices of one projection, and channels before tokens."""
    _, dt, A, *_, D, state, chunk, dtype = arguments(rand, t=21)
    wide, tokens_last = rand(2, 21, 10, grad=True), rand(2, 6, 21, grad=True)

    def call(function):
        y, final, _ = function(tokens_last.mT, dt, A, *wide.split(5, -1), D, state, chunk, dtype)
        return torch.autograd.grad(y.square().sum() + final.square().sum(), (wide, tokens_last, dt))

    torch.testing.assert_close(call(selective_scan), call(recurrence))


def test_operands_that_do_not_go_together(rand):
    u, dt, A, *others, chunk, dtype = arguments(rand)
    with pytest.raises(OperandError, match=r"\[b, t, d\] twice"):
        selective_scan(u, dt[0], A, *others, chunk, dtype)
    with pytest.raises(OperandError, match="chunk_size is 0"):
        selective_scan(u, dt, A, *others, 0, dtype)


@pytest.mark.parametrize(("t", "skip", "initial"), [(1, True, False), (19, False, True), (32, True, True)])
def test_autograd_on_a_cpu(rand, t, skip, initial):
    """What autograd makes of steps is the op's backward."""
    args = arguments(rand, t=t, skip=skip, initial=initial)
    seeds = seeds_for(rand, reference, args, 2)
    got, want = (differentiate(f, args, seeds, 3) for f in (cpu_autograd.selective_scan, selective_scan))
    agree(got, want, 1e-12)
