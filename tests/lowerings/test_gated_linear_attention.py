"""`megacpp::gated_linear_attention` beside a scan, and what it refuses; all else is `test_gated_delta_rule.py`."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings.gated_linear_attention import cpu_autograd, gated_linear_attention
from megacpp_compile.lowerings.ssd_scan import ssd_scan

from .contract import agree, as_leaves, differentiate, seeds_for
from .delta_cases import attention
from .delta_recurrence import linear_attention


def test_a_constant_decay_is_a_scan_with_a_step_of_one(rand):
    """The one case that both ops can say: RetNet's and lightning attention's."""
    q, k, v, _, state, _, _, chunk, dtype = attention(rand, torch.float64, hk=2, hv=2)
    rates = -rand(2).abs()
    o, final, _ = gated_linear_attention(q, k, v, rates.expand(2, 24, 2), state, None, 1.0, chunk, dtype)
    steps = v.new_ones(v.shape[:3])
    y, left, _ = ssd_scan(v, steps, rates, k, q, None, state.mT.contiguous(), chunk, dtype)
    torch.testing.assert_close(o, y)
    torch.testing.assert_close(final, left.mT)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_of_minus_infinity_clears_the_state(rand, gate):
    args = list(attention(rand, torch.float64, gate=gate))
    args[3] = args[3].clone()
    args[3][:, 7], args[3][:, 18:20] = -torch.inf, -torch.inf
    o, final, _ = gated_linear_attention(*args)
    torch.testing.assert_close((o, final), linear_attention(*args))


def test_operands_that_do_not_go_together(rand):
    *args, _, dtype = attention(rand, torch.float64)
    with pytest.raises(OperandError, match="chunk_size is 20"):
        gated_linear_attention(*args, 20, dtype)


@pytest.mark.parametrize(("gate", "t"), [("head", 24), ("head", 100), ("channel", 16), (None, 24)])
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_autograd_on_a_cpu(rand, gate, t, state):
    """What autograd makes of the forward is the op's backward, with gates of minus infinity, too."""
    args = list(attention(rand, torch.float64, gate=gate, t=t))
    if gate == "head":
        args[3] = args[3].clone()
        args[3][:, 7] = -torch.inf
    args[4] = args[4] if state else None
    args = as_leaves(args)
    seeds = seeds_for(rand, gated_linear_attention, args, 2)
    got, want = (
        differentiate(f, args, seeds, 3) for f in (cpu_autograd.gated_linear_attention, gated_linear_attention)
    )
    agree(got, want, 1e-12)
