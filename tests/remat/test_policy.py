"""`CheckpointingPolicy`: what it takes, what it refuses and with which words."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from megacpp_compile.config.checkpointing import KINDS, CheckpointingPolicy
from megacpp_compile.errors import BadOptionError
from megacpp_compile.remat.plan import StepContext
from megacpp_compile.remat.tagging import TagForRemat


def test_of():
    assert CheckpointingPolicy.of(None) is None
    assert CheckpointingPolicy.of("selective") == CheckpointingPolicy() == CheckpointingPolicy.of({})
    assert {getattr(CheckpointingPolicy.of("full"), k) for k in KINDS} == {"full"}
    conv = CheckpointingPolicy.of("conv_bc_only")
    assert (conv.mblock, conv.ablock) == ("conv_bc_only", "selective")
    assert CheckpointingPolicy.of(conv.to_dict()) == conv


REFUSED = [
    ("selectiv", "Did you mean 'selective'"), ({"ablok": "full"}, "Did you mean 'ablock'"),
    ({"ablock": "conv_bc_only"}, "policy.ablock"), ({"last_layer": "nevr"}, "Did you mean 'never'"),
    ({"recompute_kv_upproj": 1}, "True or False"), ({"same_on_ranks": 1}, "True or False"),
    (3, "a CheckpointingPolicy"), ({"peak_gib": 0}, "above 0"), ({"peak_gib": "72"}, "GiB"),
    ({"peak_gib": 72, "budget": 0.5}, "policy.budget is given"), ({"reserve_gib": -1}, "from 0"),
    ({"offload": "input"}, "Did you mean 'inputs'"), ({"fp8_wrapper": "te"}, "'te_checkpoint'"),
    ({"depth_loop": "never"}, r"policy\.depth_loop"), ({"recompute": "core_atn"}, "Did you mean 'core_attn'"),
    ({"recompute": ("mlp", 3)}, "policy.recompute"), ({"recompute": 3}, "names among"),
    *(({"stream_group": size}, r"policy\.stream_group") for size in (0, -2, 1.5, True, "2")),
]  # fmt: skip


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=str)
def test_refused(value, words):
    with pytest.raises(BadOptionError, match=words):
        CheckpointingPolicy.of(value)
    if isinstance(value, dict) and value.keys() <= {field.name for field in dataclasses.fields(CheckpointingPolicy)}:
        with pytest.raises(BadOptionError, match=words):
            CheckpointingPolicy(**value)


def test_the_last_layer():
    policy = CheckpointingPolicy(ablock="full", eblock="none")
    assert [policy.entry("ablock", last) for last in (False, True)] == ["full", "never"]
    assert policy.entry("eblock", True) == "none"
    assert CheckpointingPolicy(eblock="none", last_layer="full").entry("eblock", True) == "full"


def test_the_pass_keys_caches_by_policy_and_kinds():
    """Its `uuid` is part of the keys of Inductor's caches; a key can only be made of what pickles."""
    one, other, limited = CheckpointingPolicy(), CheckpointingPolicy(budget=0.5), CheckpointingPolicy(peak_gib=1)
    given = (one, {}), (other, {}), (one, {"a": "mblock"}), (one, {}, made_up)
    made = [TagForRemat(*args) for args in given]
    assert len({repr(p.uuid()) for p in made}) == 4
    # What else is on the device counts for a limit, and for nothing else.
    around = [TagForRemat(p, {}, around=StepContext(given=n)) for p in (one, limited) for n in (0, 1)]
    assert len({repr(p.uuid()) for p in around}) == 3
    told = TagForRemat(one, {}, None, lambda plan, where, peak: None)
    assert pickle.loads(pickle.dumps(told)).uuid() == told.uuid() == made[0].uuid()


def made_up(graph):
    """A pass of the user's that runs before."""
