"""Which tests run a part of their parameters where the whole suite is asked for, so that it stays quick.

`make test-all` runs all of them, and so does whatever names files or tests, such as `pytest tests/passes`.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

ONE_OF = 3

# Tests that take seconds since every spelling, shape or dtype is traced or compiled by itself; by file. By default the
# first set of parameters runs, and every third after it.
THINNED: dict[str, tuple[str, ...]] = {
    "decode/test_transformers_cache.py": ("test_generates_the_same_tokens",),
    "docs/test_python_blocks.py": ("test_a_block_runs",),
    "frontend/test_autocast.py": ("test_region",),
    "frontend/test_expert_loops.py": (
        "test_loops_that_depend_on_data_fuse", "test_sizes_that_are_read_as_numbers",
        "test_what_an_expert_without_tokens_would_change_breaks_the_graph",
        "test_what_else_depends_on_parts_of_sorted_slots",
    ),  # fmt: skip
    "frontend/test_hidden_writes.py": ("test_hidden_writes_fall_back",),
    "lowerings/test_compiled_for_hopper.py": ("test_a_recurrence",),
    "lowerings/test_down_norm_up.py": ("test_low_rank_path_and_other_readers", "test_opcheck_shapes"),
    "lowerings/test_gated_delta_rule.py": ("test_against_the_recurrence", "test_opcheck", "test_opcheck_shapes"),
    "lowerings/test_gated_linear_attention.py": ("test_opcheck",),
    "lowerings/test_linear_cross_entropy.py": (
        "test_gradcheck", "test_in_compiled_graphs", "test_opcheck", "test_opcheck_grads",
    ),  # fmt: skip
    "lowerings/test_lowerings_agree.py": ("test_agrees_with_the_reference",),
    "lowerings/test_mla_decode.py": ("test_compiles_for_hopper",),
    "lowerings/test_mla_decode_gluon.py": ("test_compiles_for_hopper",),
    "lowerings/test_mla_rope_kv.py": ("test_shapes",),
    "lowerings/test_mla_rope_q.py": ("test_layouts",),
    "lowerings/test_moe.py": ("test_opcheck",),
    "lowerings/test_moe_sorted.py": ("test_opcheck",),
    "lowerings/test_signed_by_inductor.py": ("test_kernels_with_floats",),
    "lowerings/test_sparse_mla_gluon.py": ("test_compiles_for_hopper",),
    "lowerings/test_sparse_mla_gluon_backward.py": ("test_compiles_for_hopper",),
    "matchers/moe/test_spellings.py": ("test_loops",),
    "matchers/test_recurrences.py": ("test_kind_to_remat", "test_recognised", "test_steps_are_counted"),
    "passes/test_attention_sites.py": ("test_flash_attention_4_by_the_option",),
    "passes/test_causal_conv1d.py": ("test_fires",),
    "passes/test_down_norm_up.py": ("test_fires",),
    "passes/test_empty_batches.py": ("test_fires_and_is_empty",),
    "passes/test_gallery.py": ("test_gallery",),
    "passes/test_gated_delta_rule.py": (
        "test_lengths", "test_linear_attention_is_none", "test_no_business_of_this_pass", "test_refuses",
        "test_spellings",
    ),  # fmt: skip
    "passes/test_gated_rms_norm.py": ("test_dynamic_shapes", "test_fires", "test_variants"),
    "passes/test_linear_cross_entropy.py": (
        "test_autocast", "test_dtypes", "test_dynamic_lengths", "test_fires", "test_verified_at_lengths_that_vary",
    ),  # fmt: skip
    "passes/test_mla_decode.py": (
        "test_fires", "test_in_half_precision", "test_is_the_same_attention_in_float64",
        "test_one_graph_serves_all_lengths", "test_what_is_another_attention_stays",
    ),  # fmt: skip
    "passes/test_mla_decode_adapters.py": ("test_is_the_same_attention_in_float64",),
    "passes/test_mla_rope_kv.py": (
        "test_fires", "test_refuses_tables_that_differ_by_head", "test_refuses_what_is_no_rotation",
    ),  # fmt: skip
    "passes/test_mla_rope_q.py": ("test_fires", "test_refuses_what_is_no_rotation"),
    "passes/test_moe.py": (
        "test_experts", "test_fires", "test_fires_on_batches", "test_fires_on_one_choice", "test_fires_on_one_token",
        "test_fires_on_stacked_weights", "test_refuses", "test_refuses_at_once", "test_refuses_of_stacked_weights",
        "test_sorted_rows",
    ),  # fmt: skip
    "passes/test_moe_sorted.py": ("test_a_whole_layer", "test_fires_at_every_length"),
    "passes/test_near_misses.py": ("test_near_miss",),
    "passes/test_packed.py": ("test_positions_of_queries_and_keys",),
    "passes/test_packed_conv.py": ("test_fires",),
    "passes/test_packed_scan.py": ("test_refuses", "test_spellings", "test_states_in_and_out"),
    "passes/test_precision_rows.py": ("test_routed_experts_in_float8",),
    "passes/test_rope_qk.py": (
        "test_fires", "test_normed_queries_and_keys", "test_results_that_leave_the_frame_have_eagers_strides",
    ),  # fmt: skip
    "passes/test_spellings.py": (
        "test_grouped_query_attention", "test_latent_attention", "test_latent_attention_of_any_make",
    ),  # fmt: skip
    "passes/test_ssd_scan.py": ("test_refuses", "test_spellings"),
    "passes/test_token_loop.py": ("test_refuses",),
    "passes/test_token_loop_first_steps.py": ("test_refuses_other_first_steps", "test_spelling_in_float64"),
    "passes/test_token_loop_scans.py": (
        "test_refuses", "test_scan", "test_what_a_step_makes_of_its_output_excuses_nothing",
        "test_what_a_step_makes_of_its_output_stays_behind_the_op",
    ),  # fmt: skip
    "test_end_to_end.py": ("test_trains_as_exactly_as_eager",),
}


# Cases, by file and by a test's parameter `case`, that are left out: each is seconds of two ranks, and what is particular
# to it other cases have beside other things.
RARE: dict[str, tuple[str, ...]] = {
    "sharding/test_dtensors.py": (
        "tensor_parallel_no_grad", "checkpointed", "gathered_gain", "dtensor_out", "local_experts",
        "on_dtensors_sequence",
    ),
}  # fmt: skip


def left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """What a run of the whole suite leaves out of `items`: nothing under `TEST_ALL=1`."""
    tests = Path(__file__).parent
    asked = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    if os.environ.get("TEST_ALL") or asked != {tests}:
        return []
    seen: Counter[str] = Counter()
    found = []
    for item in items:
        file = item.path.relative_to(tests).as_posix() if item.path.is_relative_to(tests) else ""
        name = getattr(item, "originalname", item.name)
        if name in THINNED.get(file, ()):
            key = f"{file}::{name}"
            if seen[key] % ONE_OF:
                found.append(item)
            seen[key] += 1
        elif case_of(item) in RARE.get(file, ()):
            found.append(item)
    return found


def case_of(item: pytest.Item) -> str | None:
    """The value of the test's parameter `case`."""
    return item.callspec.params.get("case") if hasattr(item, "callspec") else None
