"""`megacpp::gated_delta_rule`: registration, gradients, the recurrence, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.gated_delta_rule import STATES_EVERY, gated_delta_rule, gated_delta_rule_backward

from . import BOTH, addresses, pairwise, relative_error, saved_by
from .agreement import TIMES_ROUNDING, faults
from .delta_cases import DECAYS, GATES, rule
from .delta_recurrence import delta_rule, normalised
from .rounding import moved_by_rounding

OPTIONAL = list(itertools.product(BOTH, repeat=2))  # beta, initial state
# For what `opcheck` and numeric gradients ask; the recurrence is compared with in every combination.
PAIRS = pairwise(GATES, BOTH, BOTH)
DOCUMENTS = [(7,), (16, 1, 0, 20), (0, 33, 2), (0, 0)]
CHUNK = 16


def arguments(rand, *, dtype=torch.float64, **options):
    """Operands of one call as leaves, the settings behind them."""
    return tuple(a.detach().requires_grad_() if differentiable(a) else a for a in rule(rand, dtype, **options))


def differentiable(a):
    return isinstance(a, Tensor) and a.is_floating_point()


def tensors(args):
    return [a for a in args if differentiable(a)]


def differentiate(function, args, seeds):
    """o, the final state, and gradients of every operand against the cotangents `seeds` of those two."""
    o, final = function(*args)[:2]
    loss = sum((x * s.to(x)).sum() for x, s in zip((o, final), seeds, strict=True))
    grads = torch.autograd.grad(loss, tensors(args), allow_unused=True, materialize_grads=True)
    return [o, final, *grads]


def seeds_for(rand, args):
    with torch.no_grad():
        o, final = gated_delta_rule(*args)[:2]
    return rand(*o.shape), rand(*final.shape)


def wide(args):
    return tuple(a.detach().double().requires_grad_() if differentiable(a) else a for a in args[:-1]) + (torch.float64,)


def assert_as_the_recurrence(rand, args, tolerance=1e-10):
    seeds = seeds_for(rand, args)
    for got, want in zip(*(differentiate(f, args, seeds) for f in (gated_delta_rule, delta_rule)), strict=True):
        assert got.shape == want.shape and got.isfinite().all()
        assert relative_error(got, want) < tolerance or (got - want).abs().max() < tolerance**1.5


@pytest.mark.parametrize(("gate", "beta", "initial"), PAIRS)
def test_opcheck(rand, beta, initial, gate):
    opcheck(gated_delta_rule, arguments(rand, beta=beta, initial=initial, gate=gate))


@pytest.mark.parametrize(
    "options",
    [{"t": 0}, {"t": 1}, {"b": 0}, {"t": 32, "hk": 1}, {"t": 33, "chunk": 32, "gate": "channel"}, {"eps": None},
     {"documents": (5, 0, 20)}],
    ids=str,
)  # fmt: skip
def test_opcheck_shapes(rand, options):
    opcheck(gated_delta_rule, arguments(rand, **options))


@pytest.mark.parametrize("t", [0, 5, 37])
def test_a_state_in_columns_leaves_one_in_rows(rand, t):
    """The strides of what comes out are those the op says, whatever those of its operands are."""
    args = [a.detach() if isinstance(a, Tensor) else a for a in arguments(rand, t=t)]
    args[5] = args[5].mT.contiguous().mT
    final = gated_delta_rule(*args)[1]
    assert final.is_contiguous()
    args[5] = args[5].contiguous()
    torch.testing.assert_close(final, gated_delta_rule(*args)[1])


def test_opcheck_bfloat16(rand):
    opcheck(gated_delta_rule, arguments(rand, dtype=torch.bfloat16))


def test_opcheck_operands_without_gradient(rand):
    q, *others = arguments(rand)
    opcheck(gated_delta_rule, (q, *(o.detach() if isinstance(o, Tensor) else o for o in others)))


@pytest.mark.parametrize("gate", GATES)
def test_opcheck_backward(rand, gate):
    for beta, initial in ((False, False), (True, True)):
        options = {"documents": (5, 12, 0)} if initial else {}
        args = arguments(rand, beta=beta, initial=initial, gate=gate, **options)
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        _, _, states, inverse = gated_delta_rule(*args)
        do, dfinal = seeds_for(rand, args)
        given = do, dfinal if initial else None, *args[:7], states, inverse, *args[7:-1]
        opcheck(gated_delta_rule_backward, given)


@pytest.mark.parametrize(("gate", "beta", "initial"), PAIRS)
def test_gradcheck(rand, beta, initial, gate):
    args = arguments(rand, b=1, t=18, hk=1, hv=2, k=3, v=2, beta=beta, initial=initial, gate=gate)

    def function(*leaves):
        it = iter(leaves)
        return gated_delta_rule(*(next(it) if differentiable(a) else a for a in args))[:2]

    assert torch.autograd.gradcheck(function, tensors(args), fast_mode=True)


@pytest.mark.parametrize("t", [0, 1, 2, 15, 16, 17, 47, 64])
@pytest.mark.parametrize("gate", GATES)
def test_against_the_recurrence(rand, t, gate):
    for beta, initial in OPTIONAL:
        assert_as_the_recurrence(rand, arguments(rand, t=t, gate=gate, beta=beta, initial=initial, v=12))


@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_documents_have_states_of_their_own(rand, documents, gate):
    for initial in (False, True):
        assert_as_the_recurrence(rand, arguments(rand, documents=documents, gate=gate, initial=initial, k=12))


def test_documents_are_as_by_themselves(rand):
    """Also where a segment of states goes from one document into the next."""
    lengths = [3, 90, 0, 17, 33]
    *operands, cu_seqlens, scale, eps, chunk, dtype = rule(rand, torch.float64, documents=lengths)
    settings = scale, eps, chunk, dtype
    o, final = gated_delta_rule(*operands, cu_seqlens, *settings)[:2]
    *rows, states = operands
    for i, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
        own = (x[:, start : start + length] for x in rows)
        alone, left = gated_delta_rule(*own, states[i : i + 1], None, *settings)[:2]
        torch.testing.assert_close(o[:, start : start + length], alone)
        torch.testing.assert_close(final[i : i + 1], left)


@pytest.mark.parametrize(("hk", "hv"), [(1, 8), (2, 8), (4, 8), (8, 8), (3, 6)])
def test_value_heads_read_their_key_head(rand, hk, hv):
    for gate in GATES:
        assert_as_the_recurrence(rand, arguments(rand, hk=hk, hv=hv, k=6, v=5, gate=gate))


@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
def test_normalised_inside_is_normalised_before(rand, eps):
    args = arguments(rand, eps=eps, gate="channel")
    q, k, *others = args
    outside = (*(normalised(x, eps) for x in (q, k)), *others[:6], None, *others[7:])
    seeds = seeds_for(rand, args)
    inside = differentiate(gated_delta_rule, args, seeds)
    want = differentiate(lambda *a: gated_delta_rule(*outside), args, seeds)
    for got, expected in zip(inside, want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("gate", GATES)
def test_chunk_size_is_free(rand, chunk, gate):
    """It decides where states are kept, not what comes out; many chunks at once as well as one."""
    args = arguments(rand, b=1, t=300, hk=1, hv=2, k=6, v=5, gate=gate, chunk=chunk)
    assert_as_the_recurrence(rand, args)


@pytest.mark.parametrize("documents", [None, (40, 0, 200, 50)], ids=str)
def test_states_enter_every_eighth_chunk(rand, documents):
    options = {"t": 290, "b": 1} if documents is None else {"documents": documents}
    args = arguments(rand, hk=1, hv=2, **options)
    _, _, states, _ = gated_delta_rule(*args)
    q, k, v, g, beta, initial, cu_seqlens, *_ = args
    lengths = [290] if documents is None else documents
    chunks = [(i, CHUNK * c) for i, n in enumerate(lengths) for c in range(-(-n // CHUNK))]
    begins = [0] if cu_seqlens is None else cu_seqlens.tolist()
    for row, (sequence, inside) in enumerate(chunks[::STATES_EVERY]):
        part = slice(begins[sequence], begins[sequence] + inside)
        own = (x[:, part] for x in (q, k, v, g, beta))
        _, want = delta_rule(*own, initial[sequence : sequence + 1], None, *args[7:])
        torch.testing.assert_close(states[0, row], want[0])
    assert not states[:, len(chunks[::STATES_EVERY]) :].any()


def test_inverse_is_that_of_what_tokens_take_from_one_another(rand):
    args = arguments(rand, b=1, t=40, gate="none", initial=False)
    inverse = gated_delta_rule(*args)[3]
    assert inverse.shape == (1, 40, 4, CHUNK)
    k = normalised(args[1], 1e-6).repeat_interleave(2, 2)
    for start in (0, 16, 32):
        n = min(CHUNK, 40 - start)
        keys, beta = (x[0, start : start + n].transpose(0, 1) for x in (k, args[4]))
        L = (beta.unsqueeze(-1) * (keys @ keys.mT)).tril(-1)
        rows = inverse[0, start : start + n].transpose(0, 1)
        torch.testing.assert_close(rows[..., :n], torch.linalg.inv(torch.eye(n) + L))
        assert not rows[..., n:].any()


def plainly_rounded(args, seeds, unit):
    """By the recurrence, which autograd differentiates."""
    function = lambda *given: differentiate(delta_rule, given, seeds)  # noqa: E731
    return [TIMES_ROUNDING * m for m in moved_by_rounding(function, args, unit)]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 8), (torch.bfloat16, 1)], ids=str)
def test_lower_precision(rand, dtype, units, decay, gate):
    """Rounding alone: the recurrence sees the same rounded operands, in float64. The reference computes in float32 and
    rounds once. Gates from 1e-4 to 1: what is far decays to zero, never to NaN, and what is near stays near."""
    args = arguments(rand, b=1, t=150, hk=1, hv=2, dtype=dtype, decay=decay, gate=gate, chunk=64)
    exact = wide(args)
    seeds = tuple(s.to(dtype) for s in seeds_for(rand, args))
    got, want = differentiate(gated_delta_rule, args, seeds), differentiate(delta_rule, exact, seeds)
    assert [x.dtype for x in got] == [dtype, torch.float32, *(x.dtype for x in tensors(args))]
    single = torch.finfo(torch.float32).eps
    assert not faults(got, want, units * torch.finfo(dtype).eps, lambda: plainly_rounded(exact, seeds, single))


def test_long_sequences_stay_finite(rand):
    """Gates near 1 and keys as long as they may be, in half precision."""
    args = arguments(rand, b=1, t=2000, hk=1, hv=1, dtype=torch.bfloat16, decay="even", chunk=64)
    seeds = seeds_for(rand, args)
    got, want = differentiate(gated_delta_rule, args, seeds), differentiate(gated_delta_rule, wide(args), seeds)
    assert not faults(got, want, 2 * torch.finfo(torch.bfloat16).eps)


def test_out_dtype(rand):
    args = arguments(rand, dtype=torch.bfloat16)
    single, half = gated_delta_rule(*args[:-1], torch.float32)[0], gated_delta_rule(*args)[0]
    assert (single.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(single.bfloat16(), half)


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_that_nobody_reads(rand, used):
    args = arguments(rand, gate="channel")
    got, want = (
        torch.autograd.grad(f(*args)[used].square().sum(), tensors(args), allow_unused=True, materialize_grads=True)
        for f in (gated_delta_rule, delta_rule)
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize(("beta", "initial"), OPTIONAL)
def test_keeps_operands_states_and_inverse_only(rand, beta, initial):
    args = arguments(rand, beta=beta, initial=initial, documents=(4, 20))
    outputs = []
    kept = saved_by(lambda: outputs.append(gated_delta_rule(*args)))
    _, _, states, inverse = outputs[0]
    assert not states.requires_grad and not inverse.requires_grad
    assert kept == addresses(*(a for a in args if isinstance(a, Tensor)), states, inverse)


@pytest.mark.parametrize("gate", GATES)
def test_strided_operands(rand, gate):
    """As in a model: slices of one projection, whose heads and channels lie side by side."""
    b, t, hk, hv, k, v = 2, 21, 2, 4, 6, 5
    _, _, _, g, beta, state, *settings = arguments(rand, b=b, t=t, hk=hk, hv=hv, k=k, v=v, gate=gate)
    projected = rand(b, t, 2 * hk * k + hv * v, grad=True)
    leaves = [x for x in (projected, g, beta, state) if x is not None]

    def call(function):
        q, key, value = projected.split([hk * k, hk * k, hv * v], -1)
        operands = q.view(b, t, hk, k), key.view(b, t, hk, k), value.view(b, t, hv, v), g, beta, state
        o, final = function(*operands, *settings)[:2]
        return torch.autograd.grad(o.square().sum() + final.square().sum(), leaves)

    for got, want in zip(call(gated_delta_rule), call(delta_rule), strict=True):
        torch.testing.assert_close(got, want)


def test_autocast_does_not_reach_inside(rand):
    args = arguments(rand, dtype=torch.float32)
    want = gated_delta_rule(*args)
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_delta_rule(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"v": (1, 5, 3, 16)}, "3 value heads"),
        ({"g": (1, 5, 4, 8)}, "8 channels"),
        ({"q": (2, 5, 2, 16), "cu_seqlens": (3,)}, "one row"),
        ({"k": (1, 5, 1, 16)}, r"\[b, t, hk, k\] twice"),
        ({"chunk_size": 48}, "chunk_size is 48"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operands_that_do_not_go_together(wrong, words, device):
    sizes = {"q": (1, 5, 2, 16), "k": (1, 5, 2, 16), "v": (1, 5, 4, 16), "g": None, "cu_seqlens": None, **wrong}
    chunk = sizes.pop("chunk_size", 16)
    q, k, v, g, cu_seqlens = (None if size is None else torch.zeros(size, device=device) for size in sizes.values())
    with pytest.raises(OperandError, match=words):
        gated_delta_rule(q, k, v, g, None, None, cu_seqlens, 1.0, None, chunk, torch.float32)
