"""`megacpp::gated_linear_attention`: registration, gradients, the recurrence, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.gated_linear_attention import gated_linear_attention, gated_linear_attention_backward
from megacpp_compile.lowerings.ssd_scan import ssd_scan

from . import addresses, relative_error, saved_by
from .agreement import TIMES_ROUNDING, faults
from .delta_cases import DECAYS, GATES, attention
from .delta_recurrence import linear_attention
from .rounding import moved_by_rounding
from .test_gated_delta_rule import differentiable, differentiate, tensors, wide


def arguments(rand, *, dtype=torch.float64, **options):
    """Operands of one call as leaves, the settings behind them."""
    return tuple(a.detach().requires_grad_() if differentiable(a) else a for a in attention(rand, dtype, **options))


def seeds_for(rand, args):
    with torch.no_grad():
        o, final = gated_linear_attention(*args)[:2]
    return rand(*o.shape), rand(*final.shape)


def assert_as_the_recurrence(rand, args, tolerance=1e-11):
    seeds = seeds_for(rand, args)
    results = (differentiate(f, args, seeds) for f in (gated_linear_attention, linear_attention))
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape and got.isfinite().all()
        assert relative_error(got, want) < tolerance or (got - want).abs().max() < tolerance


@pytest.mark.parametrize(
    "options",
    [{"gate": "none", "initial": False}, {}, {"gate": "channel", "t": 33}, {"t": 0}, {"b": 0}, {"t": 1},
     {"documents": (5, 0, 20), "gate": "channel"}, {"dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_opcheck(rand, options):
    args = arguments(rand, **options)
    opcheck(gated_linear_attention, args)
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    do, dfinal = seeds_for(rand, args)
    states = gated_linear_attention(*args)[2]
    given = do, dfinal if options.get("initial", True) else None, *args[:6], states, *args[6:-1]
    opcheck(gated_linear_attention_backward, given)


@pytest.mark.parametrize("t", [0, 5, 37])
def test_a_state_in_columns_leaves_one_in_rows(rand, t):
    """The strides of what comes out are those the op says, whatever those of its operands are."""
    args = [a.detach() if isinstance(a, Tensor) else a for a in arguments(rand, t=t)]
    args[4] = args[4].mT.contiguous().mT
    final = gated_linear_attention(*args)[1]
    assert final.is_contiguous()
    args[4] = args[4].contiguous()
    torch.testing.assert_close(final, gated_linear_attention(*args)[1])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("initial", [False, True])
def test_gradcheck(rand, initial, gate):
    args = arguments(rand, b=1, t=18, hk=1, hv=2, k=3, v=2, initial=initial, gate=gate)

    def function(*leaves):
        it = iter(leaves)
        return gated_linear_attention(*(next(it) if differentiable(a) else a for a in args))[:2]

    assert torch.autograd.gradcheck(function, tensors(args), fast_mode=True)


@pytest.mark.parametrize("t", [0, 1, 15, 16, 17, 47])
@pytest.mark.parametrize("gate", GATES)
def test_against_the_recurrence(rand, t, gate):
    for initial in (False, True):
        assert_as_the_recurrence(rand, arguments(rand, t=t, gate=gate, initial=initial, v=12))


@pytest.mark.parametrize("documents", [(7,), (16, 1, 0, 20), (0, 0)], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_documents_have_states_of_their_own(rand, documents, gate):
    for initial in (False, True):
        assert_as_the_recurrence(rand, arguments(rand, documents=documents, gate=gate, initial=initial, k=12))


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("gate", GATES)
def test_chunk_size_is_free(rand, chunk, gate):
    assert_as_the_recurrence(rand, arguments(rand, b=1, t=300, hk=1, hv=2, k=6, v=5, gate=gate, chunk=chunk))


def test_a_constant_decay_is_a_scan_with_a_step_of_one(rand):
    """The one case that both ops can say: RetNet's and lightning attention's."""
    q, k, v, _, state, _, _, chunk, dtype = attention(rand, torch.float64, hk=2, hv=2)
    rates = -rand(2).abs()
    o, final, _ = gated_linear_attention(q, k, v, rates.expand(2, 24, 2), state, None, 1.0, chunk, dtype)
    steps = v.new_ones(v.shape[:3])
    y, left, _ = ssd_scan(v, steps, rates, k, q, None, state.mT.contiguous(), chunk, dtype)
    torch.testing.assert_close(o, y)
    torch.testing.assert_close(final, left.mT)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 8), (torch.bfloat16, 1)], ids=str)
def test_lower_precision(rand, dtype, units, decay, gate):
    """Rounding alone, as in the delta rule's test of that name."""
    args = arguments(rand, b=1, t=150, hk=1, hv=2, dtype=dtype, decay=decay, gate=gate, chunk=64)
    exact = wide(args)
    seeds = tuple(s.to(dtype) for s in seeds_for(rand, args))
    got, want = differentiate(gated_linear_attention, args, seeds), differentiate(linear_attention, exact, seeds)
    assert [x.dtype for x in got] == [dtype, torch.float32, *(x.dtype for x in tensors(args))]

    def rounding():
        function = lambda *given: differentiate(linear_attention, given, seeds)  # noqa: E731
        return [TIMES_ROUNDING * m for m in moved_by_rounding(function, exact, torch.finfo(torch.float32).eps)]

    assert not faults(got, want, units * torch.finfo(dtype).eps, rounding)


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_that_nobody_reads(rand, used):
    args = arguments(rand, gate="channel")
    got, want = (
        torch.autograd.grad(f(*args)[used].square().sum(), tensors(args), allow_unused=True, materialize_grads=True)
        for f in (gated_linear_attention, linear_attention)
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("initial", [False, True])
def test_keeps_operands_and_states_only(rand, initial):
    args = arguments(rand, initial=initial, documents=(4, 20))
    outputs = []
    kept = saved_by(lambda: outputs.append(gated_linear_attention(*args)))
    states = outputs[0][2]
    assert not states.requires_grad
    assert kept == addresses(*(a for a in args if isinstance(a, Tensor)), states)


def test_autocast_does_not_reach_inside(rand):
    args = arguments(rand, dtype=torch.float32)
    want = gated_linear_attention(*args)
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_linear_attention(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_operands_that_do_not_go_together(rand):
    *args, chunk, dtype = arguments(rand)
    with pytest.raises(OperandError, match="chunk_size is 20"):
        gated_linear_attention(*args, 20, dtype)
