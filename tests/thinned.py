"""Which tests run a part of their parameters where the whole suite is asked for, so that it stays quick.

`make test-all` runs all of them, and so does whatever names files or tests, such as `pytest tests/passes`. What costs
milliseconds is not here. A test that costs seconds, as each of its spellings, shapes or dtypes is traced or compiled by
itself, runs its first set of parameters and every third after it: every fifth where all of them would take more than
three seconds, and every ninth where they would take more than twelve, unless it is about what a pass refuses. Of a grid a
diagonal runs, so that values of one parameter come beside several of another.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

# One set of parameters of so many runs -> tests, by file.
THINNED: dict[int, dict[str, tuple[str, ...]]] = {
    3: {
        "adapters/test_plain_mla.py": ("test_one_graph_with_every_site",),
        "backends/test_backward.py": (
            "test_a_graph_that_is_kept_is_differentiated_twice", "test_a_policy_that_fails_on_the_joint_graph",
        ),
        "backends/test_compiled_autograd.py": (
            "test_the_backward_is_lowered", "test_what_is_asked_of_the_model_is_not_asked_of_its_backward",
        ),
        "backends/test_cuda_graph_reports.py": ("test_inductor_s_own_reason",),
        "backends/test_float32_gradients.py": (
            "test_all_else_stays_as_it_is", "test_moved_on_its_way", "test_symbolic_sizes",
            "test_whatever_is_recomputed",
        ),
        "backends/test_held_ops.py": ("test_forward_and_backward",),
        "backends/test_weight_casts.py": ("test_is_cast_once_for_all_microbatches_of_a_step",),
        "config/test_given.py": ("test_a_config_is_accepted_and_counts", "test_every_way_warns"),
        "config/test_option_effects.py": ("test_shared_inputs_that_stay_by_themselves",),
        "config/test_rules.py": (
            "test_a_rule_for_one_layer_is_for_that_layer", "test_a_rule_without_a_hit_is_an_error",
        ),
        "corpus/test_delta_itself.py": ("test_spelling",),
        "decode/test_codecs.py": ("test_a_compiled_step_stores_the_same", "test_errors_are_those_of_the_laws"),
        "decode/test_plain_generate.py": ("test_generates_the_tokens_of_eager",),
        "decode/test_transformers_cache.py": ("test_generate_compiled", "test_generates_the_same_tokens"),
        "docs/test_commands.py": ("test_what_a_command_needs_stands_beside_it",),
        "docs/test_python_blocks.py": ("test_a_block_runs",),
        "frontend/test_autocast.py": ("test_verification_replays_a_site_in_its_region",),
        "frontend/test_dropped_outputs.py": ("test_evaluation_has_them",),
        "frontend/test_expert_loops.py": (
            "test_experts_without_tokens", "test_layers_of_a_model", "test_parts_of_no_slots",
            "test_what_gives_zeros_to_an_expert_without_tokens",
            "test_what_is_not_taken_computes_as_before_and_says_why",
        ),
        "frontend/test_idle_dropouts.py": ("test_experts_that_end_in_one",),
        "frontend/test_local_dtensors.py": (
            "test_calls_of_which_a_rank_computes_its_part_are_local",
            "test_gradients_of_what_ranks_share_are_summed_once", "test_others_stay_calls_on_dtensors",
        ),
        "frontend/test_loops_by_membership.py": ("test_experts_without_tokens", "test_stays"),
        "frontend/test_loops_with_two_values.py": ("test_fuses", "test_what_makes_a_difference"),
        "frontend/test_put_back.py": (
            "test_as_many_rows_as_the_permutation_has_numbers", "test_other_writes_are_left_as_they_are",
        ),
        "frontend/test_static_addresses.py": ("test_parameters_and_buffers_stay_in_place",),
        "frontend/test_transforms.py": ("test_inductor_takes_it_and_the_report_says_what_is_not_looked_at",),
        "frontend/test_unbacked_shapes.py": ("test_a_loop_has_one_near_miss_and_its_advice_is_right",),
        "frontend/test_unsaid_aliases.py": ("test_writes_reach_what_they_reach_in_eager",),
        "lowerings/test_causal_conv1d.py": ("test_documents", "test_layouts", "test_opcheck", "test_opcheck_shapes"),
        "lowerings/test_compiled_for_hopper.py": ("test_a_recurrence_over_symbolic_tokens", "test_signs"),
        "lowerings/test_compressed_linear.py": ("test_unbiased",),
        "lowerings/test_down_norm_up.py": (
            "test_gradcheck", "test_low_rank_path_and_other_readers", "test_opcheck", "test_strided_inputs",
        ),
        "lowerings/test_gated_delta_rule.py": (
            "test_against_the_recurrence", "test_chunk_size_is_free", "test_documents_have_states_of_their_own",
            "test_opcheck_backward",
        ),
        "lowerings/test_gated_linear_attention.py": (
            "test_chunk_size_is_free", "test_documents_have_states_of_their_own", "test_lower_precision",
        ),
        "lowerings/test_gated_rms_norm.py": ("test_gradcheck", "test_strided_inputs"),
        "lowerings/test_linear_cross_entropy.py": (
            "test_opcheck", "test_opcheck_grads", "test_opcheck_sizes", "test_strided_inputs",
        ),
        "lowerings/test_linear_cross_entropy_kernels.py": ("test_compiles_for_hopper",),
        "lowerings/test_linear_fp8_weight.py": ("test_opcheck",),
        "lowerings/test_mla_decode.py": ("test_compiles_for_hopper", "test_opcheck"),
        "lowerings/test_mla_rope_kv.py": (
            "test_opcheck_backward", "test_shapes", "test_strided_inputs", "test_table_shapes",
        ),
        "lowerings/test_mla_rope_q.py": ("test_dtypes", "test_shapes", "test_strided_inputs", "test_table_shapes"),
        "lowerings/test_moe.py": ("test_gradients_lie_as_promised",),
        "lowerings/test_moe_float8.py": ("test_opcheck", "test_results_lie_as_promised"),
        "lowerings/test_moe_sorted.py": ("test_gradients", "test_gradients_lie_as_promised"),
        "lowerings/test_norm_linear.py": ("test_opcheck", "test_strided_input"),
        "lowerings/test_rope_qk.py": ("test_dtypes", "test_shapes", "test_strided_inputs", "test_table_shapes"),
        "lowerings/test_rounding.py": ("test_one_rounding_to_bfloat16_is_found_in_float32",),
        "lowerings/test_sparse_mla.py": ("test_opcheck",),
        "lowerings/test_sparse_mla_gluon.py": ("test_compiles_for_hopper", "test_whom_it_serves"),
        "lowerings/test_sparse_mla_gluon_backward.py": ("test_compiles_for_hopper",),
        "lowerings/test_ssd_scan.py": ("test_chunk_size_is_free", "test_opcheck", "test_opcheck_shapes"),
        "matchers/moe/test_activation.py": ("test_products",),
        "matchers/moe/test_group_ends.py": ("test_ends",),
        "matchers/moe/test_near_misses.py": ("test_dense_experts", "test_gemms_over_all_weights"),
        "matchers/moe/test_spellings.py": (
            "test_dense_experts", "test_each_spelling_has_one_matcher", "test_gemms_over_all_weights",
            "test_loops_over_stacked_weights", "test_outputs_of_all_experts", "test_sorted_tokens",
        ),
        "matchers/test_linear.py": ("test_by_heads",),
        "matchers/test_recurrences.py": ("test_kind_to_remat",),
        "matchers/test_rope_lanes.py": ("test_lanes_are_what_the_graph_computes",),
        "matchers/test_rope_rotation.py": (
            "test_near_misses", "test_the_layout_is_read_off", "test_what_only_looks_like_one_of_these",
        ),
        "matchers/test_silu.py": ("test_refuses",),
        "matchers/test_ssd_scan.py": ("test_near_misses", "test_operands"),
        "memory/test_fields.py": (
            "test_models_nobody_here_wrote", "test_the_estimate_is_what_is_counted",
            "test_what_is_near_has_no_such_field",
        ),
        "memory/test_fit_out_of_memory.py": ("test_the_next_lever_serves",),
        "nn/test_attention.py": ("test_flex_attention_on_cpu",),
        "nn/test_expert_capacity.py": ("test_an_expert_that_does_not_exist",),
        "nn/test_fa4.py": ("test_a_plain_mla_block",),
        "passes/test_adapters.py": ("test_experts_with_paths_are_told",),
        "passes/test_attention_sites.py": (
            "test_flash_attention_4_by_the_option", "test_the_faster_by_measurement", "test_this_packages_own",
            "test_torchs_own",
        ),
        "passes/test_causal_conv1d.py": ("test_refuses",),
        "passes/test_compressed_linear.py": (
            "test_a_policy_that_recomputes_the_input_is_an_error", "test_compiled", "test_refuses",
            "test_refuses_what_stays_alive",
        ),
        "passes/test_down_norm_up.py": ("test_dynamic_shapes", "test_refuses", "test_refuses_near_miss"),
        "passes/test_driver.py": ("test_one_site_reads_another",),
        "passes/test_gallery.py": ("test_gallery",),
        "passes/test_gated_delta_rule.py": (
            "test_a_clamp_of_sums_of_gates_wants_to_know_their_sign", "test_a_single_token_that_is_padded_to_a_chunk",
            "test_names_what_changes_a_state", "test_refuses_other_clamps",
        ),
        "passes/test_gated_delta_rule_layers.py": (
            "test_dynamic", "test_layers_of_other_sizes_or_constants_are_proved_apart",
        ),
        "passes/test_gated_linear_attention.py": ("test_spelling", "test_states_in_and_out_in_float64"),
        "passes/test_gated_rms_norm.py": ("test_fires_in_bfloat16", "test_refuses"),
        "passes/test_heads_left_alone.py": (
            "test_refuses", "test_refuses_rows_of_unknown_number", "test_refuses_what_stands_between",
            "test_says_nothing",
        ),
        "passes/test_latents.py": (
            "test_low_rank_path_spelled_otherwise", "test_low_rank_paths", "test_other_paths_are_none",
            "test_read_by_something_else", "test_scaled_by_a_number_of_the_model",
        ),
        "passes/test_linear.py": ("test_composes_with_remat",),
        "passes/test_linear_cross_entropy.py": ("test_rows_that_are_added_up_are_a_sum",),
        "passes/test_mla_decode.py": (
            "test_a_cache_of_keys", "test_refused", "test_torch_s_causal_mask",
            "test_verified_against_the_plain_code", "test_what_is_another_attention_stays",
        ),
        "passes/test_mla_decode_adapters.py": ("test_of_keys_or_of_values_alone", "test_what_is_another_sum_stays"),
        "passes/test_mla_rope_kv.py": (
            "test_a_rotated_row_that_escapes_keeps_its_value", "test_dynamic_shapes", "test_fires_on_scaled_keys",
            "test_leaves_keys_alone_that_are_not_shared_or_not_rotated", "test_number_of_heads",
        ),
        "passes/test_mla_rope_q.py": (
            "test_dynamic_shapes", "test_fires", "test_fires_on_scaled_queries", "test_refuses",
            "test_refuses_near_miss",
        ),
        "passes/test_moe.py": (
            "test_fires_on_dimensions_of_one", "test_fires_on_one_choice_weighted_behind", "test_refuses_at_once",
            "test_refuses_one_token", "test_refuses_sorted_rows",
        ),
        "passes/test_moe_counted_rows.py": (
            "test_as_exact_as_eager_in_bfloat16", "test_fires_on_other_numbers_of_tokens",
        ),
        "passes/test_moe_equations.py": ("test_autocast", "test_over_choices_of_batches"),
        "passes/test_moe_sorted.py": (
            "test_a_layer_that_ends_in_what_no_compiler_looks_into", "test_fires", "test_fires_in_inference",
        ),
        "passes/test_moe_wide_biases.py": ("test_as_exact_as_eager",),
        "passes/test_norm_linear.py": ("test_fires", "test_refuses"),
        "passes/test_packed.py": ("test_how_rows_are_gathered", "test_tables_of_every_kind"),
        "passes/test_packed_conv.py": ("test_dtypes", "test_refused"),
        "passes/test_packed_scan.py": ("test_refuses", "test_states_in_and_out"),
        "passes/test_rope_qk.py": (
            "test_normed_queries_and_keys", "test_one_key_head", "test_refuses", "test_refuses_keys_turned_otherwise",
            "test_refuses_near_miss", "test_results_whose_strides_show_lie_as_the_plain_ones_did",
            "test_some_of_the_keys_are_read",
        ),
        "passes/test_sparse_mla.py": ("test_another_mask_is_no_news",),
        "passes/test_ssd_scan.py": ("test_lengths",),
        "passes/test_ssd_scan_retention.py": ("test_a_second_length", "test_bfloat16", "test_refuses"),
        "passes/test_token_loop.py": (
            "test_chunks_that_are_no_delta_rule_are_none_of_its_business",
            "test_neither_are_positions_that_are_no_tokens", "test_operands_that_heads_or_tokens_share",
            "test_states_in_and_out_in_float64",
        ),
        "passes/test_token_loop_first_steps.py": (
            "test_autocast_around_the_call", "test_bfloat16", "test_refuses_other_first_steps",
        ),
        "passes/test_token_loop_rates.py": ("test_tables_of_numbers_in_float64",),
        "passes/test_token_loop_scans.py": (
            "test_linear_attention_whose_products_are_made_in_front",
            "test_other_weights_than_the_step_are_linear_attention",
            "test_what_a_step_makes_of_its_output_excuses_nothing",
        ),
        "precision/test_hugging_face.py": ("test_gradients",),
        "precision/test_norms.py": ("test_who_reads_a_norm",),
        "precision/test_replace.py": ("test_outputs_and_gradients",),
        "precision/test_scaling_state.py": ("test_saved_under_one_wrapping_and_loaded_under_another",),
        "precision/test_sentinel.py": ("test_a_compiled_model_raises_no_alarm",),
        "regional/test_loss_region.py": ("test_fires",),
        "remat/test_auto.py": ("test_a_choice_of_latents_by_the_user_stands",),
        "remat/test_conflicts.py": ("test_a_router_in_a_checkpoint_chooses_once", "test_what_the_forward_writes"),
        "remat/test_depth_loops.py": ("test_what_is_a_loop",),
        "remat/test_offload.py": ("test_what_waits_in_main_memory",),
        "remat/test_operations.py": ("test_experts_run_again_with_the_choice_of_the_first_time",),
        "remat/test_region_budget.py": ("test_without_a_policy",),
        "sharding/test_ddp.py": ("test_every_site_fires_or_is_told_as_cut",),
        "test_cli.py": ("test_inputs_of_the_wrong_kind",),
        "test_end_to_end.py": ("test_small_sites_are_left_to_inductor", "test_trains_as_exactly_as_eager"),
        "test_explainer.py": ("test_explain_reports_what_compiling_does_around_sizes_that_values_decide",),
        "test_layout.py": ("test_inductor_is_behind_the_backends", "test_nothing_asks_for_a_device"),
        "test_pipeline.py": ("test_changing_shapes_recompile_no_more_than_in_dynamo_alone", "test_inference"),
        "test_surface.py": (
            "test_module_names_do_not_depend_on_the_name_of_self",
            "test_unmet_requirement_says_how_often_the_pass_fired",
        ),
        "trainers/test_enable.py": ("test_passes_fire",),
        "trainers/test_hugging_face.py": ("test_trainer",),
    },
    5: {
        "frontend/test_autocast.py": ("test_region",),
        "frontend/test_expert_loops.py": (
            "test_sizes_that_are_read_as_numbers", "test_what_an_expert_without_tokens_would_change_breaks_the_graph",
        ),
        "frontend/test_hidden_writes.py": (
            "test_hidden_writes_fall_back", "test_other_writes_are_captured",
            "test_without_gradients_nothing_is_hidden", "test_writes_to_what_nothing_has_read_run_ahead",
        ),
        "frontend/test_transforms.py": ("test_what_stands_around_it_is_rewritten",),
        "lowerings/test_compiled_for_hopper.py": ("test_a_recurrence",),
        "lowerings/test_down_norm_up.py": ("test_latent_kept_on_request", "test_opcheck_shapes"),
        "lowerings/test_gated_delta_rule.py": ("test_lower_precision", "test_opcheck", "test_opcheck_shapes"),
        "lowerings/test_gated_linear_attention.py": ("test_opcheck",),
        "lowerings/test_gated_rms_norm.py": ("test_opcheck",),
        "lowerings/test_linear_cross_entropy.py": ("test_gradcheck", "test_in_compiled_graphs"),
        "lowerings/test_mla_decode_gluon.py": ("test_compiles_for_hopper",),
        "lowerings/test_mla_rope_q.py": ("test_layouts",),
        "lowerings/test_moe.py": ("test_opcheck",),
        "lowerings/test_moe_sorted.py": ("test_opcheck",),
        "lowerings/test_sharded_loss.py": ("test_the_loss_alone_in_a_group_of_one_rank",),
        "matchers/moe/test_near_misses.py": ("test_loops",),
        "matchers/moe/test_spellings.py": ("test_loops_over_batches",),
        "matchers/test_recurrences.py": ("test_recognised", "test_steps_are_counted"),
        "matchers/test_selections.py": ("test_every_list_in_every_mask",),
        "memory/test_fit_out_of_memory.py": ("test_what_is_an_error_of_memory",),
        "passes/test_causal_conv1d.py": ("test_dynamic_shapes", "test_fires"),
        "passes/test_conditions.py": ("test_sites",),
        "passes/test_down_norm_up.py": ("test_fires",),
        "passes/test_gated_delta_rule.py": (
            "test_a_single_token_is_known_and_stays_plain", "test_lengths", "test_linear_attention_is_none",
            "test_no_business_of_this_pass", "test_refuses", "test_refuses_a_series_that_is_cut_off_late",
            "test_sizes",
        ),
        "passes/test_gated_linear_attention.py": ("test_refuses",),
        "passes/test_gated_rms_norm.py": (
            "test_a_length_in_chunks", "test_dynamic_shapes", "test_fires", "test_variants",
        ),
        "passes/test_linear_cross_entropy.py": (
            "test_autocast", "test_dtypes", "test_fires", "test_verified_at_lengths_that_vary",
        ),
        "passes/test_mla_decode.py": ("test_in_half_precision", "test_rows_hidden_by_data"),
        "passes/test_mla_rope_kv.py": (
            "test_fires", "test_refuses_tables_that_differ_by_head", "test_refuses_what_is_no_rotation",
        ),
        "passes/test_mla_rope_q.py": ("test_refuses_what_is_no_rotation",),
        "passes/test_moe.py": (
            "test_fires_on_one_choice", "test_fires_on_one_token", "test_fires_on_stacked_weights", "test_refuses",
            "test_refuses_batches", "test_refuses_of_stacked_weights", "test_refuses_other_rows", "test_sorted_rows",
        ),
        "passes/test_moe_sorted.py": ("test_fires_at_every_length",),
        "passes/test_near_misses.py": ("test_near_miss",),
        "passes/test_packed.py": (
            "test_dynamic", "test_positions_of_queries_and_keys", "test_what_looks_alike_keeps_tables_by_token",
        ),
        "passes/test_packed_conv.py": ("test_fires",),
        "passes/test_precision_rows.py": ("test_routed_experts_in_float8",),
        "passes/test_rope_qk.py": (
            "test_refuses_what_is_no_rotation", "test_results_that_leave_the_frame_have_eagers_strides",
        ),
        "passes/test_sparse_mla.py": ("test_refused",),
        "passes/test_ssd_scan.py": (
            "test_a_loop_over_chunks_is_one_scan", "test_other_forms", "test_refuses", "test_sizes", "test_spellings",
        ),
        "passes/test_token_loop.py": ("test_linear_attention", "test_refuses", "test_spelling"),
        "passes/test_token_loop_first_steps.py": ("test_lengths", "test_spelling_in_float64"),
        "passes/test_token_loop_normalisers.py": ("test_spelling_in_float64",),
        "passes/test_token_loop_scans.py": (
            "test_refuses", "test_sizes", "test_what_a_step_makes_of_its_output_stays_behind_the_op",
        ),
        "precision/test_hugging_face.py": ("test_replacement",),
        "sharding/test_async_tensors.py": ("test_it_enters_a_frame",),
        "sharding/test_ddp.py": ("test_require_counts_behind_wrappers",),
        "test_pipeline.py": ("test_half_precision",),
        "trainers/test_hugging_face.py": ("test_adapters_of_peft",),
    },
    9: {
        "frontend/test_expert_loops.py": (
            "test_loops_that_depend_on_data_fuse", "test_what_else_depends_on_parts_of_sorted_slots",
        ),
        "lowerings/test_lowerings_agree.py": ("test_agrees_with_the_reference",),
        "lowerings/test_signed_by_inductor.py": ("test_kernels_with_floats",),
        "matchers/moe/test_spellings.py": ("test_loops",),
        "matchers/test_ssd_scan.py": ("test_near_misses_show_at_every_size",),
        "passes/test_empty_batches.py": ("test_fires_and_is_empty",),
        "passes/test_gated_delta_rule.py": ("test_spellings",),
        "passes/test_linear_cross_entropy.py": ("test_dynamic_lengths",),
        "passes/test_mla_decode.py": (
            "test_fires", "test_is_the_same_attention_in_float64", "test_one_graph_serves_all_lengths",
        ),
        "passes/test_mla_decode_adapters.py": ("test_is_the_same_attention_in_float64",),
        "passes/test_moe.py": (
            "test_experts", "test_fires", "test_fires_on_batches", "test_fires_on_rows_that_are_numbered_otherwise",
        ),
        "passes/test_moe_sorted.py": ("test_a_whole_layer",),
        "passes/test_packed_scan.py": ("test_spellings",),
        "passes/test_rope_qk.py": ("test_fires",),
        "passes/test_sparse_mla.py": ("test_is_the_same_attention_in_float64",),
        "passes/test_spellings.py": (
            "test_grouped_query_attention", "test_latent_attention", "test_latent_attention_of_any_make",
        ),
        "passes/test_token_loop_scans.py": ("test_scan",),
    },
}  # fmt: skip


# Cases, by file and by a test's parameter `case`, that are left out: each is seconds of two ranks, and what is particular
# to it other cases have beside other things.
RARE: dict[str, tuple[str, ...]] = {
    "adapters/test_megatron_ranks.py": ("te",),
    "sharding/test_dtensors.py": (
        "tensor_parallel_no_grad", "tensor_parallel_dynamic", "checkpointed", "gathered_gain", "dtensor_out", "local_experts",
        "on_dtensors_sequence", "frozen_region", "decoding",
    ),
    "sharding/test_delayed_scaling.py": ("fsdp2_mixed", "fsdp2_tensor_parallel", "by_hand"),
    "sharding/test_heads.py": ("bias", "scaled", "shifted", "words_second"),
}  # fmt: skip


# Tests that are left out: each takes seconds, and other tests take its branches of the package, by themselves or beside
# other things.
WHOLE: dict[str, tuple[str, ...]] = {
    "_torch/test_missing.py": ("test_no_lack_breaks_a_frame",),
    "backends/test_compiled_autograd.py": ("test_with_kernels",),
    "frontend/test_autocast.py": ("test_as_exact_as_inductor",),
    "frontend/test_selective_checkpoint.py": ("test_no_more_is_saved_than_by_inductor",),
    "frontend/test_unbacked_shapes.py": ("test_graphs_and_breaks_are_no_more_than_of_any_backend",),
    "memory/test_estimate.py": ("test_a_loop_over_experts_that_fuses",),
    "memory/test_fit_out_of_memory.py": ("test_no_lever_runs_in_eager",),
    "remat/test_auto.py": (
        "test_autocast", "test_dropout_draws_the_same_again", "test_dynamic_sizes", "test_the_same_plan_every_time",
        "test_what_the_forward_overwrites_is_not_read_anew",
    ),
    "remat/test_solver.py": ("test_what_is_in_the_layers_of_latent_attention_is_given_up_unless_the_peak_would_rise",),
    "test_benchmarks.py": ("test_predicted_peaks_stand_beside_measured_ones",),
    "test_explainer.py": ("test_command_line_lists_passes",),
    "trainers/test_hugging_face.py": ("test_trainer_without_logits",),
}  # fmt: skip


def left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """What a run of the whole suite leaves out of `items`: nothing under `TEST_ALL=1`."""
    tests = Path(__file__).parent
    asked = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    if os.environ.get("TEST_ALL") or asked != {tests}:
        return []
    ratios = {(file, name): ratio for ratio, of in THINNED.items() for file, names in of.items() for name in names}
    families: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    found = []
    for item in items:
        file = item.path.relative_to(tests).as_posix() if item.path.is_relative_to(tests) else ""
        name = getattr(item, "originalname", item.name)
        if (file, name) in ratios:
            families[file, name].append(item)
        elif case_of(item) in RARE.get(file, ()) or name in WHOLE.get(file, ()):
            found.append(item)
    for key, family in families.items():
        found += [item for item, place in zip(family, places(family), strict=True) if place % ratios[key]]
    return found


def places(family: list[pytest.Item]) -> list[int]:
    """For each set of parameters of a test the sum of its values' places, in which those that vary as one count once."""
    indices = [item.callspec.indices for item in family]  # type: ignore[attr-defined]
    return [sum(place) for place in zip(*{tuple(of[name] for of in indices) for name in indices[0]}, strict=True)]


def case_of(item: pytest.Item) -> str | None:
    """The value of the test's parameter `case`."""
    return item.callspec.params.get("case") if hasattr(item, "callspec") else None
