"""Attention whose heads are over ranks: a site for each layer, and results and gradients are those of eager ranks."""

from __future__ import annotations

import pytest
import torch

from tests.sharding import attention
from tests.sharding.seen import ON_RANKS

# What each run has is a mask or more of each kind, and what is refused.
EVERY = ("grouped_bias", "latent_window", "whole_sinks", "whole_bias_of_all", "whole_sinks_of_all")
pytestmark = [*ON_RANKS, pytest.mark.rare(*(case for case in attention.CASES if case not in EVERY))]
CASES_OF = attention
# Cases that a test reads by name.
READ = EVERY[-2:]


@pytest.fixture(autouse=True)
def _flattens_heads(request):
    if request.getfixturevalue("case").startswith("whole") and torch.torch_version.TorchVersion(torch.__version__) < (2, 12):
        pytest.skip("DTensors of this torch flatten no heads that are sharded, in eager neither")


@pytest.mark.parametrize("case", sorted(attention.CASES))
def test_each_layer_is_a_site_and_results_and_gradients_are_those_of_eager(seen, case):
    """Relative to each tensor's largest value, in float32."""
    for rank in seen(case):
        assert rank["error"] <= 1e-5, rank["errors"]
        assert rank["ops"] == ["megacpp::attention"] * attention.CASES[case].fires, rank["misses"]
        assert all(captured for captured, _ in rank["frames"])


@pytest.mark.parametrize(("case", "call"), [("whole_bias_of_all", "add"), ("whole_sinks_of_all", "cat")])
def test_what_ranks_have_whole_beside_their_own_heads_is_a_near_miss(seen, case, call):
    """DTensor cuts it, and gathers its gradient. Heads are no tokens: nothing is said of these."""
    for rank in seen(case):
        ((tag, reason),) = rank["misses"]
        assert tag == "dtensor" and f"a DTensor's {call} of tensors placed (S(1)), (R) stands between" in reason
