"""Delayed scaling of weights that ranks share: each rank has a past, and what ranks hold alike they scale alike."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.precision import maxima, scaling_state
from tests.precision.models import equal
from tests.sharding import delayed
from tests.sharding.seen import ON_RANKS

pytestmark = [*ON_RANKS, pytest.mark.rare("fsdp2_mixed", "fsdp2_tensor_parallel", "by_hand")]
CASES_OF = delayed
NAMES = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]
KEYS = {f"{name}:{kind}" for name in NAMES for kind in "xwg"}
# Ranks hold parts of these cases' weights while they multiply, and the same input.
IN_PARTS = ("tensor_parallel", "fsdp2_tensor_parallel")
READ = ()  # no test reads a case but its own


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_is_as_near_as_current_scaling_and_goes_on_after_a_restart_bit_for_bit(seen, case):
    for rank in seen(case):
        assert {(effective, reason) for _, effective, reason in rank["rows"]} == {("fp8_delayed", "")}
        errors = rank["errors"]
        assert 0 < errors["fp8_delayed"] < 1.15 * errors["fp8_current"] < 0.2, errors
        assert rank["restarted"]


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_the_past_has_the_plain_models_names_and_this_ranks_numbers(seen, case):
    """Of a weight in parts the largest magnitude of this rank's part, of one that was gathered the whole's; the maximum
    over ranks is a state of the whole."""
    for rank in seen(case):
        state = rank["state"]
        assert set(state) == KEYS
        assert state["blocks.0.up.weight:x"][: delayed.STEPS].tolist() == rank["x"][::-1]
        for name in NAMES:
            largest = rank["own" if case in IN_PARTS else "largest"][name]
            assert state[f"{name}:w"][0] == torch.tensor(largest).bfloat16()
    one, other = (rank["state"] for rank in seen(case))
    merged = {key: torch.maximum(one[key], other[key]) for key in KEYS}
    for name in NAMES:
        assert merged[f"{name}:w"][0] == torch.tensor(seen(case)[0]["largest"][name]).bfloat16()
    scaling_state.load_scaling_state(model := delayed.Model(), merged)
    assert all(len(maxima.LOADED[weight]) == 3 for weight in model.parameters())


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_what_ranks_hold_alike_is_alike(seen, case):
    """Bit for bit: results, gradients and scales of replicas, while those of parts may differ; of gathered weights
    there is one scale, and of inputs one a rank."""
    one, other = seen(case)
    same = {key: torch.equal(one["state"][key], other["state"][key]) for key in KEYS}
    weights = [same[key] for key in KEYS if key.endswith(":w")]
    if case in IN_PARTS:
        assert equal(one["last"], other["last"]) and not all(weights)
        assert all(same[key] for key in KEYS if key.endswith(("up.weight:x", "down.weight:g")))
    else:
        assert all(weights) and not any(same[key] for key in KEYS if key.endswith("up.weight:x"))


@pytest.mark.parametrize("case", delayed.CACHED)
def test_weights_cast_once_change_nothing(seen, case):
    """A rank casts the part that it holds of what FSDP2 gathers in front of a frame; not what the frame gathers."""
    said = "cast in every call, as a weight is computed or gathered here"
    for rank in seen(case):
        same, notes = rank["cached"]
        assert same and notes == {said if case == "traced_fsdp" else "weights cast once in cached_weight_casts()"}
