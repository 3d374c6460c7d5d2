"""`megacpp::ssd_scan`: registration, gradients, the recurrence, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch

from megacpp_compile.lowerings.ssd_scan import cpu_autograd, cpu_chunks, ssd_scan, ssd_scan_backward
from megacpp_compile.lowerings.ssd_scan.reference import ssd_scan as reference
from megacpp_compile.lowerings.ssd_scan.reference import ssd_scan_backward as reference_backward

from .agreement import TIMES_ROUNDING, faults
from .contract import agree, assert_keeps, assert_unread, detached, differentiate, gradcheck, leaves, seeds_for, widened
from .rounding import moved_by_rounding

HEADS, P, N = 4, 3, 5
OPTIONAL = list(itertools.product((False, True), repeat=2))  # skip, initial state
CHUNK = 16
SINGLE = torch.finfo(torch.float32).eps


def arguments(rand, *, b=2, t=19, heads=HEADS, groups=2, skip=True, initial=True, dtype=torch.float64, chunk=CHUNK):
    """Operands of one call; dt and A as in a model: positive, and negative float32."""
    wide = torch.promote_types(dtype, torch.float32)
    x = rand(b, t, heads, P, dtype=dtype, grad=True)
    dt = rand(b, t, heads, dtype=wide).abs().requires_grad_()
    A = (-rand(heads, dtype=wide).abs() - 0.1).requires_grad_()
    B, C = (rand(b, t, groups, N, dtype=dtype, grad=True) for _ in range(2))
    D = rand(heads, dtype=wide, grad=True) if skip else None
    state = rand(b, heads, P, N, dtype=wide, grad=True) if initial else None
    return x, dt, A, B, C, D, state, chunk, dtype


def recurrence(x, dt, A, B, C, D, state, *_):
    """The op by its definition, one position after the other, in the dtype it is given."""
    b, t, heads, p = x.shape
    group = torch.arange(heads) // (heads // B.shape[2])
    state = x.new_zeros(b, heads, p, B.shape[-1]) if state is None else state
    y, entering = [x[:, :0]], []
    for i in range(t):
        entering.append(state)
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i], B[:, i, group])
        state = (dt[:, i] * A).exp()[..., None, None] * state + added
        read = torch.einsum("bhpn,bhn->bhp", state, C[:, i, group])
        y.append((read if D is None else read + D[:, None] * x[:, i]).unsqueeze(1))
    entering = torch.stack(entering[::CHUNK], 1) if entering else state.new_zeros(b, 0, *state.shape[1:])
    return torch.cat(y, 1), state, entering


def both(rand, args, formula=recurrence, results=3):
    """Results and gradients of the op, and of its formula."""
    seeds = seeds_for(rand, ssd_scan, args, 2)
    return (differentiate(f, args, seeds, results) for f in (ssd_scan, formula))


@pytest.mark.parametrize("t", [0, 5, 37])
def test_a_state_in_columns_leaves_one_in_rows(rand, t):
    """The strides of what comes out are those the op says, whatever those of its operands are."""
    args = list(detached(arguments(rand, t=t)))
    args[6] = args[6].mT.contiguous().mT
    final = ssd_scan(*args)[1]
    assert final.is_contiguous()
    args[6] = args[6].contiguous()
    torch.testing.assert_close(final, ssd_scan(*args)[1])


@pytest.mark.parametrize(("skip", "initial"), OPTIONAL)
def test_gradcheck(rand, skip, initial):
    gradcheck(ssd_scan, arguments(rand, b=1, t=18, heads=2, groups=1, skip=skip, initial=initial), fast_mode=True)


@pytest.mark.parametrize("t", [0, 1, 2, 15, 16, 17, 47, 64])
@pytest.mark.parametrize(("skip", "initial"), OPTIONAL)
def test_against_the_recurrence(rand, t, skip, initial):
    for got, want in zip(*both(rand, arguments(rand, t=t, skip=skip, initial=initial)), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_heads_read_their_group(rand, groups):
    agree(*both(rand, arguments(rand, heads=8, groups=groups)), 1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_chunk_size_is_free(rand, chunk):
    """It decides where states are kept, not what comes out; many chunks at once as well as one."""
    agree(*both(rand, arguments(rand, b=1, t=290, chunk=chunk), results=2), 1e-11)


def roundings(args, seeds, results):
    """As `agreement.disagreements` allows, by output of `differentiate`."""
    moved = moved_by_rounding(lambda *a: differentiate(reference, a, seeds, results), args, SINGLE)
    return [TIMES_ROUNDING * m for m in moved]


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 8), (torch.bfloat16, 1)], ids=str)
def test_lower_precision(rand, dtype, units):
    """Rounding alone: the recurrence sees the same rounded operands, in float64. The reference computes in float32 and
    rounds once."""
    args = arguments(rand, t=70, dtype=dtype)
    wide, seeds = widened(args), seeds_for(rand, ssd_scan, args, 2, dtype)
    got, want = differentiate(ssd_scan, args, seeds, 3), differentiate(recurrence, wide, seeds, 3)
    assert [o.dtype for o in got] == [dtype, torch.float32, torch.float32, *(t.dtype for t in leaves(args))]
    assert not faults(got, want, units * torch.finfo(dtype).eps, lambda: roundings(wide, seeds, 3))


def test_out_dtype(rand):
    args = arguments(rand, dtype=torch.bfloat16)
    wide, narrow = ssd_scan(*args[:-1], torch.float32)[0], ssd_scan(*args)[0]
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.end_to_end
def test_strong_decay_over_long_sequences(rand):
    """Decays far below the smallest number become zero, never NaN, and what is near stays near."""
    args = list(arguments(rand, b=1, t=600, dtype=torch.float32, chunk=256))
    args[2] = torch.tensor([-16.0, -3.0, -0.5, 0.0]).requires_grad_()
    wide, seeds = widened(args), seeds_for(rand, ssd_scan, args, 2)
    got, want = differentiate(ssd_scan, args, seeds), differentiate(recurrence, wide, seeds)
    assert not faults(got, want, 8 * SINGLE, lambda: roundings(wide, seeds, 2))


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_that_nobody_reads(rand, used):
    assert_unread(ssd_scan, recurrence, arguments(rand), used)


@pytest.mark.parametrize(("skip", "initial"), OPTIONAL)
def test_keeps_operands_and_states_only(rand, skip, initial):
    args = arguments(rand, skip=skip, initial=initial)
    assert not assert_keeps(ssd_scan, args, args, 2)[2].requires_grad


def test_strided_operands(rand):
    """As in a model: slices of one projection, whose heads and channels lie side by side."""
    b, t, groups = 2, 21, 2
    _, dt, A, *_, D, state, chunk, dtype = arguments(rand, b=b, t=t)
    wide = rand(b, t, HEADS * P + 2 * groups * N, grad=True)

    def call(function):
        x, B, C = wide.split([HEADS * P, groups * N, groups * N], -1)
        operands = (x.view(b, t, HEADS, P), dt, A, B.view(b, t, groups, N), C.view(b, t, groups, N), D, state)
        y, final, _ = function(*operands, chunk, dtype)
        return torch.autograd.grad(y.square().sum() + final.square().sum(), (wide, dt))

    torch.testing.assert_close(call(ssd_scan), call(recurrence))


# Two in a chunk and more, one that begins with a chunk, one over chunks, numbers that come again and that descend.
SEQ_IDX = [[7] * 3 + [1] * 4 + [7] * 9 + [2] * 21 + [3], [0] * 16 + [5] + [0] * 20 + [-1]]


def by_document(x, dt, A, B, C, D, state, chunk, dtype, seq_idx):
    """Each document by itself: a call of the recurrence of its own, the first from the state that is given."""
    rows = []
    for i, numbers in enumerate(seq_idx.tolist()):
        own, parts = None if state is None else state[i : i + 1], []
        for _, tokens in itertools.groupby(range(len(numbers)), numbers.__getitem__):
            of = slice((at := list(tokens))[0], at[-1] + 1)
            x_own, steps, B_own, C_own = (t[i : i + 1, of] for t in (x, dt, B, C))
            y, own, _ = recurrence(x_own, steps, A, B_own, C_own, D, own)
            parts.append((y, own))
            own = None
        rows.append((torch.cat([y for y, _ in parts], 1), parts[-1][1]))
    return *(torch.cat(made) for made in zip(*rows, strict=True)), None


@pytest.mark.parametrize(("integer", "initial"), [(torch.int32, True), (torch.int64, False)], ids=str)
def test_documents(rand, integer, initial):
    seq_idx = torch.tensor(SEQ_IDX, dtype=integer)
    args = *arguments(rand, t=seq_idx.shape[1], initial=initial), seq_idx
    torch.testing.assert_close(*both(rand, args, by_document, 2), rtol=1e-9, atol=1e-10)


def test_one_document_is_none(rand):
    """The first goes on from the initial state, whatever its number is."""
    args = arguments(rand, t=33)
    seeds = seeds_for(rand, ssd_scan, args, 2)
    got, want = (differentiate(ssd_scan, a, seeds, 3) for a in ((*args, torch.full((2, 33), 4)), args))
    assert all(map(torch.equal, got, want))


def test_nothing_of_a_document_reaches_the_next(rand):
    """Not even what a decay of exp(-60) would leave of it."""
    args = arguments(rand, b=1, t=40, initial=False, dtype=torch.float32)
    seq_idx = (torch.arange(40) >= 20)[None].int()
    loud = args[0].detach().clone()
    loud[:, :20] *= 1e30
    dy = torch.ones_like(loud)
    dy[:, :20] = 0
    results = []
    for x in (args[0].detach(), loud):
        y, final, states = ssd_scan(x, *args[1:], seq_idx)
        grads = ssd_scan_backward(dy, final, x, *args[1:-2], states, CHUNK, seq_idx)
        results.append((y[:, 20:], final, *(g[:, 20:] for g in (*grads[:2], *grads[3:5]))))
    torch.testing.assert_close(*results)


def test_gradcheck_documents(rand):
    args = arguments(rand, b=1, t=18, heads=2, groups=1)
    seq_idx = torch.tensor([[0] * 5 + [1] * 6 + [2] * 7])
    gradcheck(ssd_scan, (*args, seq_idx), fast_mode=True)


@pytest.mark.parametrize(("t", "length"), [(40, 64), (100, 64), (300, 64), (9000, 256)])
def test_chunks_of_a_cpu(rand, t, length):
    """They are shorter than the op's up to some thousand tokens; results, states and gradients are the reference's."""
    args = list(detached(arguments(rand, t=t, chunk=256, **({"b": 1, "heads": 2, "groups": 1} if t > 1000 else {}))))
    dy, dfinal = seeds_for(rand, reference, args, 2)
    assert cpu_chunks._length(t, 256) == length
    got, want = cpu_chunks.ssd_scan(*args), reference(*args)
    assert got[2].shape[1] == -(-t // 256)
    agree(got, want, 1e-12)
    backward = (dy, dfinal, *args[:7], want[2], 256)
    agree(cpu_chunks.ssd_scan_backward(*backward), reference_backward(*backward), 1e-12)


@pytest.mark.parametrize(("t", "chunk", "initial"), [(40, 16, False), (128, 64, True), (192, 64, False), (300, 256, True)])
@pytest.mark.parametrize("alike", [False, True], ids=["steps", "one_step"])
def test_autograd_on_a_cpu(rand, t, chunk, initial, alike):
    """What autograd makes of the forward is the op's backward; a step of one, as retention has, is not repeated."""
    args = arguments(rand, b=2, t=t, heads=2, groups=1, chunk=chunk, initial=initial)
    if alike:
        args = args[0], torch.ones(1, 1, 1, dtype=torch.float64).expand(2, t, 2), *args[2:]
    seeds = seeds_for(rand, reference, args, 2)
    got, want = (differentiate(f, args, seeds, 3) for f in (cpu_autograd.ssd_scan, ssd_scan))
    agree(got, want, 1e-12)


def test_autograd_on_a_cpu_with_documents(rand):
    seq_idx = torch.tensor(SEQ_IDX)
    args = *arguments(rand, t=seq_idx.shape[1]), seq_idx
    seeds = seeds_for(rand, reference, args, 2)
    got, want = (differentiate(f, args, seeds, 3) for f in (cpu_autograd.ssd_scan, ssd_scan))
    agree(got, want, 1e-12)
