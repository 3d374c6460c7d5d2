"""Ranks that communicate in a frame compile it alike, whatever becomes of it on one of them."""

from __future__ import annotations

import pytest

from tests.sharding import differing
from tests.sharding.seen import ON_RANKS

pytestmark = ON_RANKS
CASES_OF = differing
READ = ()
SITES = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}


def fired(rank):
    return {name: count for name, count in rank["sites"].items() if count}


@pytest.mark.parametrize(("case", "why"), [
    ("one_is_refused", "Inductor refused the rewritten graph: RuntimeError: this rank's own"),
    ("one_has_a_defect", "internal error: RuntimeError: this rank's own"),
])  # fmt: skip
def test_all_fall_back_where_one_does(case, why, seen):
    """Rewritten, the frame sums the gradient of what gate and up read once; as it came, twice: one rank would wait."""
    first, second = seen(case)
    assert fired(first) == fired(second) == {}
    assert second["frames"] == [[False, why]]
    assert first["frames"] == [[False, f"rank 1, which it communicates with, leaves it to the backend: {why}"]]


@pytest.mark.parametrize("case", ["one_has_other_options"])
def test_all_fall_back_where_another_fuses_something_else(case, seen):
    for rank, other in zip(seen(case), (1, 0), strict=True):
        ((captured, why),) = rank["frames"]
        assert not captured and why.startswith(f"rank {other}, which it communicates with, fuses ") and "options" in why
        assert why.count("down_norm_up 2") == 2 and why.count("mla_rope_kv 1") == 1


@pytest.mark.parametrize("case", ["one_is_strict_and_refused"])
def test_an_error_of_one_is_an_error_of_all(case, seen):
    first, second = (rank["error"] for rank in seen(case))
    assert not second.startswith("RanksDifferError") and "this rank's own" in second
    assert first.startswith("RanksDifferError: forward (ranks.py:")
    assert "communicates with rank 1, which failed to compile it: " in first and "this rank's own" in first


@pytest.mark.parametrize("case", ["one_does_not_come"])
def test_a_rank_that_does_not_come_is_an_error_and_no_hang(case, seen):
    first, second = (rank["error"] for rank in seen(case))
    assert second == "" and first.startswith("RanksDifferError: forward (differing.py:")
    assert "with rank 1, which did not compile it within 1 s. " in first and "`timeout`" in first


@pytest.mark.parametrize(("case", "sites"), [
    ("one_is_refused_later", {"down_norm_up": 1}), ("one_is_refused_the_second_time", SITES),
])  # fmt: skip
def test_all_fall_back_where_one_is_refused_when_all_compile_again(case, sites, seen):
    """Until then ranks are alike, and keep every site."""
    for rank in seen(case):
        one, two = rank["steps"]
        assert fired(one) == sites and one["frames"] == [[True, ""]]
        assert fired(two) == {} and "this rank's own" in two["frames"][0][1]


@pytest.mark.parametrize("case", ["one_is_refused_when_the_other_went_on"])
def test_a_rank_waits_for_none_that_went_on(case, seen):
    first, second = (rank["error"] for rank in seen(case))
    assert first == "" and second.startswith("RanksDifferError: forward (differing.py:")
    assert "rank 0, which runs down_norm_up 1 [" in second and "as agreed on before. This rank leaves it to the " in second
    assert "this rank's own" in second


@pytest.mark.parametrize("case", ["one_compiles_again"])
def test_a_rank_that_compiles_again_waits_for_nobody(case, seen):
    first, second = (rank["steps"] for rank in seen(case))
    assert [len(step["frames"]) for step in first] == [1, 0, 0]
    assert [fired(step) for step in second[:2]] == [{"down_norm_up": 1}] * 2


@pytest.mark.parametrize("case", ["under_ddp"])
def test_buckets_of_ddp_end_between_sites(case, seen):
    for rank in seen(case):
        assert fired(rank) == {"down_norm_up": 3}
        assert [captured for captured, _ in rank["frames"]].count(True) == 3  # a bucket each, and what is around DDP's call
