"""`CheckpointingPolicy`: what it takes, what it refuses and with which words."""

from __future__ import annotations

import pytest

from megacpp_compile.errors import BadOptionError
from megacpp_compile.remat.policy import KINDS, CheckpointingPolicy


def test_of():
    assert CheckpointingPolicy.of(None) is None
    assert CheckpointingPolicy.of("selective") == CheckpointingPolicy() == CheckpointingPolicy.of({})
    assert {getattr(CheckpointingPolicy.of("full"), k) for k in KINDS} == {"full"}
    conv = CheckpointingPolicy.of("conv_bc_only")
    assert (conv.mblock, conv.ablock) == ("conv_bc_only", "selective")
    assert CheckpointingPolicy.of(conv.to_dict()) == conv


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("selectiv", "Did you mean 'selective'"),
        ({"ablok": "full"}, "Did you mean 'ablock'"),
        ({"ablock": "conv_bc_only"}, "policy.ablock"),
        ({"last_layer": "nevr"}, "Did you mean 'never'"),
        ({"recompute_kv_upproj": 1}, "True or False"),
        (3, "a CheckpointingPolicy"),
    ],
)
def test_refused(value, words):
    with pytest.raises(BadOptionError, match=words):
        CheckpointingPolicy.of(value)


def test_the_last_layer():
    policy = CheckpointingPolicy(ablock="full", eblock="none")
    assert [policy.entry("ablock", last) for last in (False, True)] == ["full", "never"]
    assert policy.entry("eblock", True) == "none"
    assert CheckpointingPolicy(eblock="none", last_layer="full").entry("eblock", True) == "full"
