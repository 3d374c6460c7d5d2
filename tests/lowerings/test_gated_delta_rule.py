"""`gated_delta_rule`, and what `gated_linear_attention` keeps alike: gradients, the recurrence, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.gated_delta_rule import STATES_EVERY, cpu_autograd, gated_delta_rule
from megacpp_compile.lowerings.gated_linear_attention import gated_linear_attention

from . import BOTH, pairwise, relative_error
from .agreement import TIMES_ROUNDING, faults
from .contract import (
    agree,
    as_leaves,
    assert_keeps,
    assert_unread,
    differentiate,
    gradcheck,
    leaves,
    seeds_for,
    widened,
)
from .delta_cases import DECAYS, GATES, attention, rule
from .delta_recurrence import delta_rule, linear_attention, normalised
from .rounding import moved_by_rounding


class Op(NamedTuple):
    """An op, its definition, what makes its arguments, where among them the state is, and how far off results may be:
    relative to their norm, or in their elements."""

    call: Callable[..., Any]
    recurrence: Callable[..., Any]
    make: Callable[..., Any]
    state: int
    tolerance: float
    slack: float

    def arguments(self, rand, dtype=torch.float64, **options):
        """Operands of one call as leaves, the settings behind them."""
        return as_leaves(self.make(rand, dtype, **options))


RULE = Op(gated_delta_rule, delta_rule, rule, 5, 1e-10, 1e-15)
ATTENTION = Op(gated_linear_attention, linear_attention, attention, 4, 1e-11, 1e-11)
EITHER = pytest.mark.parametrize("op", [RULE, ATTENTION], ids=["rule", "attention"])
GATE = pytest.mark.parametrize("gate", GATES)
OPTIONAL = list(itertools.product(BOTH, repeat=2))  # beta, initial state
# For what numeric gradients ask; the recurrence is compared with in every combination.
PAIRS = pairwise(GATES, BOTH, BOTH)
DOCUMENTS = [(7,), (16, 1, 0, 20), (0, 33, 2), (0, 0)]
CHUNK = 16
arguments = RULE.arguments


def assert_as_the_recurrence(rand, op, **options):
    args = op.arguments(rand, **options)
    seeds = seeds_for(rand, op.call, args, 2)
    for got, want in zip(*(differentiate(f, args, seeds) for f in (op.call, op.recurrence)), strict=True):
        assert got.shape == want.shape and got.isfinite().all()
        assert relative_error(got, want) < op.tolerance or (got - want).abs().max() < op.slack


@EITHER
@pytest.mark.parametrize("t", [0, 5, 37])
def test_a_state_in_columns_leaves_one_in_rows(rand, op, t):
    """The strides of what comes out are those the op says, whatever those of its operands are."""
    args = list(op.make(rand, torch.float64, t=t))
    args[op.state] = args[op.state].mT.contiguous().mT
    final = op.call(*args)[1]
    assert final.is_contiguous()
    args[op.state] = args[op.state].contiguous()
    torch.testing.assert_close(final, op.call(*args)[1])


@EITHER
@pytest.mark.parametrize(("gate", "beta", "initial"), PAIRS)
def test_gradcheck(rand, op, beta, initial, gate):
    args = op.arguments(rand, b=1, t=18, hk=1, hv=2, k=3, v=2, beta=beta, initial=initial, gate=gate)
    gradcheck(op.call, args, fast_mode=True)


@pytest.mark.sampled(3)
@EITHER
@pytest.mark.parametrize("t", [0, 1, 2, 15, 16, 17, 47, 64])
@GATE
def test_against_the_recurrence(rand, op, t, gate):
    for beta, initial in OPTIONAL if op is RULE else ((True, False), (True, True)):
        assert_as_the_recurrence(rand, op, t=t, gate=gate, beta=beta, initial=initial, v=12)


@pytest.mark.sampled(3)
@EITHER
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
@GATE
def test_documents_have_states_of_their_own(rand, op, documents, gate):
    for initial in (False, True):
        assert_as_the_recurrence(rand, op, documents=documents, gate=gate, initial=initial, k=12)


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
        assert_as_the_recurrence(rand, RULE, hk=hk, hv=hv, k=6, v=5, gate=gate)


@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
def test_normalised_inside_is_normalised_before(rand, eps):
    args = arguments(rand, eps=eps, gate="channel")
    q, k, *others = args
    outside = (*(normalised(x, eps) for x in (q, k)), *others[:6], None, *others[7:])
    seeds = seeds_for(rand, gated_delta_rule, args, 2)
    inside = differentiate(gated_delta_rule, args, seeds)
    want = differentiate(lambda *a: gated_delta_rule(*outside), args, seeds)
    torch.testing.assert_close(inside, want)


@pytest.mark.sampled(3)
@EITHER
@pytest.mark.parametrize("chunk", [16, 32, 64])
@GATE
def test_chunk_size_is_free(rand, op, chunk, gate):
    """It decides where states are kept, not what comes out; many chunks at once as well as one."""
    assert_as_the_recurrence(rand, op, b=1, t=300, hk=1, hv=2, k=6, v=5, gate=gate, chunk=chunk)


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


@pytest.mark.sampled(5)
@EITHER
@GATE
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 8), (torch.bfloat16, 1)], ids=str)
def test_lower_precision(rand, op, dtype, units, decay, gate):
    """Rounding alone: the recurrence sees the same rounded operands, in float64. The reference computes in float32 and
    rounds once. Gates from 1e-4 to 1: what is far decays to zero, never to NaN, and what is near stays near."""
    args = op.arguments(rand, b=1, t=150, hk=1, hv=2, dtype=dtype, decay=decay, gate=gate, chunk=64)
    exact, seeds = widened(args), seeds_for(rand, op.call, args, 2, dtype)
    got, want = differentiate(op.call, args, seeds), differentiate(op.recurrence, exact, seeds)
    assert [x.dtype for x in got] == [dtype, torch.float32, *(x.dtype for x in leaves(args))]

    def rounding():
        """By the recurrence, which autograd differentiates."""
        function = lambda *given: differentiate(op.recurrence, given, seeds)  # noqa: E731
        return [TIMES_ROUNDING * m for m in moved_by_rounding(function, exact, torch.finfo(torch.float32).eps)]

    assert not faults(got, want, units * torch.finfo(dtype).eps, rounding)


def test_long_sequences_stay_finite(rand):
    args = arguments(rand, b=1, t=2000, hk=1, hv=1, dtype=torch.bfloat16, decay="even", chunk=64)
    seeds = seeds_for(rand, gated_delta_rule, args, 2)
    got, want = (differentiate(gated_delta_rule, given, seeds) for given in (args, widened(args)))
    assert not faults(got, want, 2 * torch.finfo(torch.bfloat16).eps)


def test_out_dtype(rand):
    args = arguments(rand, dtype=torch.bfloat16)
    single, half = gated_delta_rule(*args[:-1], torch.float32)[0], gated_delta_rule(*args)[0]
    assert (single.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(single.bfloat16(), half)


@EITHER
@pytest.mark.parametrize("used", [0, 1])
def test_outputs_that_nobody_reads(rand, op, used):
    assert_unread(op.call, op.recurrence, op.arguments(rand, gate="channel"), used)


@EITHER
@pytest.mark.parametrize(("beta", "initial"), OPTIONAL)
def test_keeps_operands_states_and_inverse_only(rand, op, beta, initial):
    args = op.arguments(rand, beta=beta, initial=initial, documents=(4, 20))
    behind = (2, 3) if op is RULE else (2,)
    outs = assert_keeps(op.call, args, args, *behind)
    assert not any(outs[i].requires_grad for i in behind)


@GATE
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

    torch.testing.assert_close(call(gated_delta_rule), call(delta_rule))


@pytest.mark.parametrize(("wrong", "words"),
                         [({"v": (1, 5, 3, 16)}, "3 value heads"), ({"g": (1, 5, 4, 8)}, "8 channels"),
                          ({"q": (2, 5, 2, 16), "cu_seqlens": (3,)}, "one row"),
                          ({"k": (1, 5, 1, 16)}, r"\[b, t, hk, k\] twice"), ({"chunk_size": 48}, "chunk_size is 48")],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operands_that_do_not_go_together(wrong, words, device):
    sizes = {"q": (1, 5, 2, 16), "k": (1, 5, 2, 16), "v": (1, 5, 4, 16), "g": None, "cu_seqlens": None, **wrong}
    chunk = sizes.pop("chunk_size", 16)
    q, k, v, g, cu_seqlens = (None if size is None else torch.zeros(size, device=device) for size in sizes.values())
    with pytest.raises(OperandError, match=words):
        gated_delta_rule(q, k, v, g, None, None, cu_seqlens, 1.0, None, chunk, torch.float32)


@pytest.mark.parametrize(
    ("gate", "t", "initial", "chunk"),
    [("head", 16, True, 16), ("channel", 5, False, 64), ("none", 1, True, 32), ("head", 17, False, 64),
     ("head", 40, True, 32), ("none", 150, False, 16), ("head", 200, False, 16), ("head", 530, True, 64)],
)  # fmt: skip
@pytest.mark.parametrize("beta", [False, True], ids=["no_beta", "beta"])
def test_autograd_on_a_cpu(rand, gate, t, initial, chunk, beta):
    """What autograd makes of steps and of chunks is the op's backward."""
    eps = 1e-6 if beta else None
    args = as_leaves(rule(rand, torch.float64, gate=gate, t=t, initial=initial, beta=beta, chunk=chunk, eps=eps))
    assert cpu_autograd.supports("gated_delta_rule", args) is None
    seeds = seeds_for(rand, gated_delta_rule, args, 2)
    got, want = (differentiate(f, args, seeds, 4) for f in (cpu_autograd.gated_delta_rule, gated_delta_rule))
    agree(got, want, 1e-11)
