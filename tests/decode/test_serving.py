"""`ServingConfig` and records of prefill: what is refused, by which tag, and that what is left comes back as it was."""

from __future__ import annotations

import functools
import json

import pytest

from megacpp_compile.decode import serving
from megacpp_compile.decode.serving import PrefillRecord, ServingConfig, Verification
from megacpp_compile.errors import ServingConfigError, ServingRecordError

FULL = {"cache": "full", "decode_backend": "sdpa"}
NOTHING = {"cache": "none", "decode_backend": "none", "kv_layout": "none"}


def tag_of(make, **fields):
    with pytest.raises((ServingConfigError, ServingRecordError)) as caught:
        make(**fields)
    assert caught.value.tag in str(caught.value)
    return caught.value.tag


@pytest.mark.parametrize(("fields", "tag"), [
    ({"prefill_backend": "fa4", "kv_layout": "paged", **FULL}, "fa4_prefill_paged"),
    ({"prefill_backend": "fa4", "continuous_batching": True, **FULL}, "fa4_prefill_continuous"),
    ({"cache": "full", "decode_backend": "fa4"}, "fa4_decode_blocked"),
    ({"cache": "full", "decode_backend": "fa4", "kv_layout": "paged"}, "fa4_decode_not_contiguous"),
    ({"decode_backend": "fa3"}, "absorbed_no_flash"), ({"decode_backend": "fa4"}, "absorbed_no_flash"),
    ({"kv_layout": "paged"}, "latents_not_paged"), ({"kv_layout": "paged", **FULL}, "paged_unproven"),
    ({"continuous_batching": True}, "uniform_lengths"), ({"doc_ids": "decode", **FULL}, "doc_ids_in_decode"),
    ({"doc_ids": "prefill"}, "doc_ids_in_latents"), ({"cache": "full"}, "no_latents"),
    ({"cache": "full", "decode_backend": "sparse_mla"}, "no_latents"),
    ({"decode_backend": "sdpa"}, "decode_not_of_latents"), ({"codec": "fp8", **FULL}, "codec_without_latents"),
    ({"form": "absorbed", **FULL}, "form_without_latents"), ({"kv_layout": "none"}, "cache_without_layout"),
    ({**NOTHING, "kv_layout": "contiguous"}, "layout_without_cache"),
    ({**NOTHING, "decode_backend": "plain"}, "decode_without_cache"), ({"continuous_batching": "no"}, "unknown_name"),
])
def test_refused_combinations(fields, tag):
    assert tag_of(ServingConfig, **fields) == tag


@pytest.mark.parametrize("field", ["prefill_backend", "decode_backend", "kv_layout", "doc_ids", "cache", "codec", "form"])
def test_names_that_are_not_known(field):
    assert tag_of(ServingConfig, **{field: "nobody"}) == "unknown_name"


def test_what_refusals_say():
    with pytest.raises(ServingConfigError, match="did you mean 'turboquant'"):
        ServingConfig(codec="turboqant")
    with pytest.raises(ServingConfigError, match="there is no 'kv_layuot': did you mean 'kv_layout'"):
        ServingConfig.from_dict({"kv_layuot": "paged"})
    with pytest.raises(ServingConfigError) as caught:
        ServingConfig(cache="full", decode_backend="fa4")
    assert all(need in str(caught.value) for need in serving.FA4_DECODE_NEEDS) and len(serving.FA4_DECODE_NEEDS) == 5
    config = ServingConfig(prefill_backend="fa4", **FULL)
    assert tag_of(config.for_engine) == "fa4_prefill_in_engine" and ServingConfig().for_engine() == ServingConfig()


@pytest.mark.parametrize("fields", [
    {}, {"codec": "turboquant", "form": "absorbed"}, FULL, {**FULL, "doc_ids": "prefill", "continuous_batching": True},
    NOTHING, {"decode_backend": "sparse_mla"}, {"prefill_backend": "fa4", **FULL}, {"prefill_backend": "fa3"},
])
def test_what_is_left_comes_back(fields):
    config = ServingConfig(**fields)
    assert ServingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(AttributeError):
        config.cache = "none"


GOOD = {"machine": "an H200", "prompt_tokens": 7, "causal": True, "doc_ids": False, "requested": "fa4",
        "effective": "fa4", "decode_executed": False}  # fmt: skip


@pytest.mark.parametrize(("changed", "tag"), [
    ({}, None), ({"decode_executed": None, "decode_backend": "mla_decode"}, None),
    ({"effective": "sdpa", "fallback_reason": "no FA4"}, None), ({"verification": Verification(True, True)}, None),
    ({"kv_layout": "paged", "ran_layout": "paged"}, None), ({"machine": ""}, "no_machine"),
    ({"prompt_tokens": 0}, "no_length"), ({"prompt_tokens": True}, "no_length"), ({"causal": None}, "no_policy"),
    ({"doc_ids": None}, "no_policy"), ({"requested": "fa5", "effective": "fa5"}, "unknown_backend"),
    ({"effective": "sdpa"}, "no_fallback_reason"), ({"fallback_reason": "none"}, "reason_without_fallback"),
    ({"decode_executed": None}, "fa4_beside_unlabelled_decode"),
    ({"decode_executed": True}, "fa4_beside_unlabelled_decode"),
    ({"decode_executed": None, "requested": "sdpa", "effective": "sdpa"}, "unlabelled_decode"),
    ({"decode_backend": "sdpa", "requested": "sdpa", "effective": "sdpa"}, "unlabelled_decode"),
    ({"decode_executed": None, "decode_backend": "none"}, "unknown_backend"),
    ({"decode_executed": None, "decode_backend": "fa4"}, "fa4_decode_blocked"),
    ({"kv_layout": "paged"}, "layout_not_run"), ({"kv_layout": "pages"}, "unknown_layout"),
    ({"verification": Verification(False, True)}, "verification_not_bounded"),
    ({"verification": Verification(True, False)}, "verification_not_bounded"),
    ({"verification": Verification(True, True), "decode_executed": None, "decode_backend": "sdpa"},
     "verification_is_no_decode"),
])
def test_records_that_hold_and_those_that_do_not(changed, tag):
    make = functools.partial(PrefillRecord, **{**GOOD, **changed})
    assert tag_of(make) == tag if tag else make()


CALL = {"causal": True, "appends_keys": True, "appends_values": True, "batch": 2, "device": "cuda"}


@pytest.mark.parametrize(("changed", "tags"), [
    ({}, ()), ({"block_table": (2, 4)}, ()), ({"causal": False}, ("requires_causal",)),
    ({"sliding_window": 128}, ("no_sliding_window",)), ({"appends_keys": False}, ("requires_appended_k",)),
    ({"appends_values": False}, ("requires_appended_v",)), ({"block_table": (2,)}, ("block_table_rank",)),
    ({"block_table": (3, 4)}, ("block_table_batch",)), ({"device": "cpu"}, ("cuda_only",)),
    ({"causal": False, "device": "cpu"}, ("requires_causal", "cuda_only")),
])
def test_the_gate(changed, tags):
    assert serving.contiguous_decode_refuses(**{**CALL, **changed}) == tags


def test_names_are_those_of_what_there_is():
    from megacpp_compile.lowerings._registry import semantic_ops
    from megacpp_compile.nn.attention import BACKENDS

    ops = {name for _, name in semantic_ops().values()}
    assert set(serving.PREFILL) - {"fa3", "fa4"} <= set(BACKENDS)
    assert set(serving.DECODE) - {"none", "fa3", "fa4"} <= ops | set(BACKENDS)
