"""Results and gradients of mixers over a sequence in parts are those of the whole."""

from __future__ import annotations

import pytest

from tests.sharding import sequences
from tests.sharding.seen import ON_RANKS

pytestmark = [
    *ON_RANKS, pytest.mark.end_to_end,
    pytest.mark.rare(
        "scan", "scan_in_two_pieces", "convolution", "delta_rule_of_channels", "delta_rule_by_token",
        "linear_attention_of_channels", "layers_dynamic", "inference", "selective_scan_in_two_pieces",
    ),
]  # fmt: skip
CASES_OF = sequences
READ = ()


@pytest.mark.parametrize("case", sorted(sequences.CASES))
def test_results_and_gradients_are_those_of_the_whole_sequence(seen, case):
    """Beside float64, with four times the error of float32 eager over the whole, or what rounding a few times makes."""
    for rank in seen(case):
        assert all(e <= max(4 * rank["eager"][n], 1e-6) for n, e in rank["errors"].items()), (rank["errors"], rank["eager"])
        assert sorted(rank["ops"]) == sorted(sequences.CASES[case].ops) and not rank["misses"]
