"""States between pieces of a sequence: a rank that has all of them is its own neighbour. Two ranks are
tests/sharding/test_sequences.py."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings._entering_states import entering_states

PLACES = [1, 2, 0]  # of a rank's three pieces


def operands(rand, decay):
    state = rand(2 * len(PLACES), 3, 4, 5, dtype=torch.float64, grad=True)
    shape = {"factor": (3, 1, 1), "channels": (3, 4, 1), "elements": (3, 4, 5), "matrix": (3, 4, 4)}.get(decay)
    return state, rand(2 * len(PLACES), *shape, dtype=torch.float64, grad=True) if shape else None, decay == "matrix"


def by_hand(state, decay, matrix):
    """Piece by piece in order of their places."""
    states = state.unflatten(0, (2, -1))
    entering, found = torch.zeros_like(states[:, 0]), {}
    for place in range(len(PLACES)):
        i = PLACES.index(place)
        found[i] = entering
        left = 0
        if decay is not None:
            d = decay.unflatten(0, (2, -1))[:, i]
            left = d @ entering if matrix else d * entering
        entering = states[:, i] + left
    return torch.stack([found[i] for i in range(len(PLACES))], 1).flatten(0, 1)


@pytest.mark.parametrize("decay", [None, "factor", "channels", "elements", "matrix"])
def test_what_enters_a_piece_is_what_those_before_leave(rand, alone, decay):
    state, decay, matrix = operands(rand, decay)
    args = state, decay, matrix, PLACES, PLACES, alone
    opcheck(entering_states, args)
    got, want = entering_states(*args)[0], by_hand(state, decay, matrix)
    given = [t for t in (state, decay) if t is not None]
    seed = torch.rand_like(want)
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(t, given, seed) for t in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_piece_that_holds_infinities_reaches_those_behind_it_alone(rand, alone):
    state, decay, matrix = (t.detach() if isinstance(t, torch.Tensor) else t for t in operands(rand, "factor"))
    state[PLACES.index(1)] = torch.inf
    entered = entering_states(state, decay, matrix, PLACES, PLACES, alone)[0].unflatten(0, (2, -1))[0]
    assert [bool(entered[PLACES.index(place)].isfinite().all()) for place in range(3)] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_a_convolution_keep_their_dtype(rand, alone, dtype):
    last = rand(2, 3, 7, dtype=dtype)
    entered = entering_states(last, None, False, [0, 1], [0, 1], alone)[0]
    assert entered.dtype == dtype and torch.equal(entered[1], last[0]) and not entered[0].any()
