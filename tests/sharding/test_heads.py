"""Heads whose words are sharded over ranks: loss and gradients are those of one rank, and no rank has all logits."""

from __future__ import annotations

import pytest
import torch

from tests.sharding import heads
from tests.sharding.seen import ON_RANKS

pytestmark = [*ON_RANKS, pytest.mark.rare("bias", "scaled", "shifted", "words_second")]
CASES_OF = heads
# Cases that tests read by name.
READ = ("kept", "log_sum_exps", "logsumexp_alone", *heads.OPS)


@pytest.mark.parametrize("case", sorted(heads.CASES))
def test_fires_on_every_rank_and_loss_and_gradients_are_those_of_one(seen, case):
    """Relative to each tensor's largest value, in float32."""
    for rank in seen(case):
        assert rank["error"] <= 1e-6, rank["errors"]
        assert rank["ops"] == ["megacpp::linear_cross_entropy"] * heads.CASES[case].fires, rank["misses"]


def test_what_keeps_the_logits_is_said(seen):
    for rank in seen("kept"):
        assert [m[1] for m in rank["misses"]] == ["logits-kept"]


def test_log_sum_exps_of_sharded_words_are_local_calls(seen):
    """With a loss beside them or none: nothing is left to DTensor, which gathers all logits."""
    for case in ("log_sum_exps", "logsumexp_alone"):
        assert [rank["misses"] for rank in seen(case)] == [[], []]


@pytest.mark.parametrize("call", sorted(heads.OPS))
def test_parts_of_the_op_make_the_whole(seen, call):
    """Beside the op on all words, in the dtype of the call."""
    for rank in seen(call):
        assert rank["error"] <= (1e-6 if heads.OPS[call].dtype is torch.float32 else 1e-12), rank["errors"]
    assert len({rank["loss"] for rank in seen(call)}) == 1, "the same on every rank, bit for bit"
