"""Delayed scaling of weights that ranks share: each rank has a past, and what ranks hold alike they scale alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megacpp_compile.precision import maxima, scaling_state
from tests.ranks import ON_ONE_WORKER
from tests.sharding import delayed
from tests.thinned import case_of

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo"),
    ON_ONE_WORKER,
]
NAMES = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]
KEYS = {f"{name}:{kind}" for name in NAMES for kind in "xwg"}
# Ranks hold parts of these cases' weights while they multiply, and the same input.
IN_PARTS = ("tensor_parallel", "fsdp2_tensor_parallel")
READ = ()  # no test reads a case but its own


@pytest.fixture(scope="module")
def seen(request):
    """What ranks saw of the cases that this run's tests are about."""
    about = {case_of(item) for item in request.session.items}
    return delayed.outcomes(tuple(name for name in delayed.CASES if name in about))


def ranks(seen, case):
    for rank in seen[case]:
        assert "failed" not in rank, rank["failed"]
    return seen[case]


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_has_delayed_scaling_and_is_as_near_as_current_scaling(seen, case):
    for rank in ranks(seen, case):
        assert {(effective, reason) for _, effective, reason in rank["rows"]} == {("fp8_delayed", "")}
        errors = rank["errors"]
        assert 0 < errors["fp8_delayed"] < 1.15 * errors["fp8_current"] < 0.2, errors


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_the_past_has_the_plain_models_names_and_this_ranks_numbers(seen, case):
    """Of a weight in parts the largest magnitude of this rank's part, of one that was gathered the whole's."""
    for rank in ranks(seen, case):
        state = rank["state"]
        assert set(state) == KEYS
        assert state["blocks.0.up.weight:x"][: delayed.STEPS].tolist() == rank["x"][::-1]
        for name in NAMES:
            largest = rank["own" if case in IN_PARTS else "largest"][name]
            assert state[f"{name}:w"][0] == torch.tensor(largest).bfloat16()


@pytest.mark.parametrize("case", IN_PARTS)
def test_what_ranks_hold_alike_is_alike(seen, case):
    """Bit for bit: results, gradients and scales of replicas, while those of parts may differ."""
    one, other = ranks(seen, case)
    assert all(map(torch.equal, one["last"], other["last"]))
    same = {key: torch.equal(one["state"][key], other["state"][key]) for key in KEYS}
    assert all(same[key] for key in KEYS if key.endswith(("up.weight:x", "down.weight:g")))
    assert not all(same[key] for key in KEYS if key.endswith(":w"))


@pytest.mark.parametrize("case", sorted(set(delayed.CASES) - set(IN_PARTS)))
def test_gathered_weights_have_one_scale_and_inputs_one_a_rank(seen, case):
    one, other = ranks(seen, case)
    same = {key: torch.equal(one["state"][key], other["state"][key]) for key in KEYS}
    assert all(same[key] for key in KEYS if key.endswith(":w"))
    assert not any(same[key] for key in KEYS if key.endswith("up.weight:x"))


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_the_maximum_over_ranks_is_a_state_of_the_whole(seen, case):
    one, other = (rank["state"] for rank in ranks(seen, case))
    merged = {key: torch.maximum(one[key], other[key]) for key in KEYS}
    for name in NAMES:
        assert merged[f"{name}:w"][0] == torch.tensor(seen[case][0]["largest"][name]).bfloat16()
    scaling_state.load_scaling_state(model := delayed.Model(), merged)
    assert all(len(maxima.LOADED[weight]) == 3 for weight in model.parameters())


@pytest.mark.parametrize("case", sorted(delayed.CASES))
def test_goes_on_after_a_restart_bit_for_bit(seen, case):
    assert all(rank["restarted"] for rank in ranks(seen, case))


@pytest.mark.parametrize("case", delayed.CACHED)
def test_weights_cast_once_change_nothing(seen, case):
    """A rank casts the part that it holds of what FSDP2 gathers in front of a frame; not what the frame gathers."""
    said = "cast in every call, as a weight is computed or gathered here"
    for rank in ranks(seen, case):
        same, notes = rank["cached"]
        assert same and notes == {said if case == "traced_fsdp" else "weights cast once in cached_weight_casts()"}
