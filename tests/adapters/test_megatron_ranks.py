"""`plain_mla` on two tensor-parallel ranks: results and gradients of the whole model, one graph, every site."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.adapters import megatron_ranks as ranks
from tests.ranks import ON_ONE_WORKER
from tests.tiers import case_of

pytestmark = [pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo"), ON_ONE_WORKER, pytest.mark.rare("te_dynamic")]


READ = ()  # no test reads a case but its own


@pytest.fixture(scope="module")
def seen(request):
    """What ranks saw of the cases that this run's tests are about."""
    about = {case_of(item) for item in request.session.items}
    return ranks.outcomes(tuple(name for name in (*ranks.CASES, *ranks.OTHERS) if name in about))


@pytest.mark.parametrize("case", [*ranks.CASES, *ranks.OTHERS])
def test_results_and_gradients_are_those_of_one_rank(seen, case):
    """Relative to each tensor's norm, in float32."""
    for rank in seen:
        assert max(rank[case]["errors"].values()) <= 3e-6, rank[case]["errors"]


@pytest.mark.parametrize("case", ranks.CASES)
def test_every_module_is_plain_and_can_be_megatron_s_again(seen, case):
    for rank in seen:
        assert not rank[case]["left"] and rank[case]["undone"]
        assert {"linear, of ranks", "embedding, of ranks", "its loss: cross_entropy, of ranks"} <= set(rank[case]["now"])


@pytest.mark.parametrize("case", [name for name, case in ranks.CASES.items() if case.compiled])
def test_one_graph_with_every_site_on_every_rank(seen, case):
    # Where ranks gather a latent, its projection and its norm are not in one place.
    sites = {"mla_rope_q": 1, "mla_rope_kv": 1, "linear_cross_entropy": 1}
    if ranks.CASES[case].te:
        sites["down_norm_up"] = 2
    for rank in seen:
        assert (rank[case]["graphs"], rank[case]["breaks"]) == (1, 0)
        assert rank[case]["fired"] == sites, rank[case]["misses"]
