"""Every family of spellings is described alike: what its layer reads, how gates and choices are given, and what is inside."""

from __future__ import annotations

import operator

import pytest
import torch

from megacpp_compile.matchers.moe import grouped, loop, sorted_rows
from tests.passes import experts, experts_at_once, experts_of_batches
from tests.passes.experts import DIM, EXPERTS, HIDDEN, MoE

from .capture import described, ids, result, the_layer, view_of, view_of_experts, view_of_sorted

LISTS = [(HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)] * EXPERTS
PLAIN = {
    "experts": EXPERTS, "weights": LISTS, "first": 0, "base": False, "choices": None, "by_expert": False,
    "column": None, "scaled_input": False, "activation": "silu", "layout": "pair",
}  # fmt: skip
STACKED = PLAIN | {"layout": "gate_up", "weights": [(EXPERTS, 2 * HIDDEN, DIM), (EXPERTS, DIM, HIDDEN)]}
AT_ONCE = STACKED | {"experts": 1}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("body, says", [
    (experts.where_index_add, {}), (experts.one_hot_mask, {}), (experts.nonzero_add_assign, {}),
    (experts.onto_the_input, {"base": True}),
    (experts.some_of_the_experts, {"first": 1, "experts": 2, "weights": LISTS[:6]}),
    (experts.scaled_input, {"scaled_input": True}),
    (experts.returning_what_they_read, {"experts": 1, "weights": LISTS[:3]}),
    (experts_at_once.mask_any_choice, {"by_expert": True}), (experts_at_once.mask_of_the_first_choice, {"column": 0}),
    (experts_at_once.mask_of_the_largest, {"by_expert": True}), (experts_at_once.scatter_add, {}),
], ids=ids)  # fmt: skip
def test_loops(body, says):
    view = view_of_experts(body)
    layer = the_layer(loop.find, view)
    assert described(layer) == PLAIN | says
    assert layer.output is result(view)


def test_what_a_loop_reads():
    layer = the_layer(loop.find, view_of_experts(experts.where_index_add))
    assert layer.x.op == "placeholder" and layer.base is None
    assert (layer.gates.target, layer.gates.args[1]) == (layer.indices.target, layer.indices.args[1] - 1)
    assert layer.indices.target is operator.getitem
    assert layer.indices.args[0].target is torch.ops.aten.topk.default
    assert {n.op for n in layer.inputs} == {"placeholder", "call_function"} and len(layer.inputs) == 3 + 3 * EXPERTS


def test_experts_that_return_what_they_read():
    layer = the_layer(loop.find, view_of_experts(experts.first_returns_what_it_reads))
    assert (layer.identities, layer.first, len(layer.experts)) == (range(1), 1, EXPERTS - 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transposed", [False, True])
def test_loops_over_stacked_weights(transposed):
    body = experts.stacked_transposed if transposed else experts.stacked_weights
    across = [(EXPERTS, DIM, 2 * HIDDEN), (EXPERTS, HIDDEN, DIM)]
    says = {"activation": "gelu", "weights": across} if transposed else {}
    layer = the_layer(loop.find, view_of_experts(body, stacked=True))
    assert described(layer) == STACKED | says
    assert [e.down.weight.index for e in layer.experts] == [*range(EXPERTS)]
    assert {g.weight.transposed for e in layer.experts for g in (*e.ups, e.down)} == {transposed}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("body, says", [
    (experts_of_batches.where_of_three, {}), (experts_of_batches.scaled_rows_of_three, {"scaled_input": True}),
    (experts_of_batches.mask_in_both_shapes, {"by_expert": True}), (experts_of_batches.one_hots_in_one_shape, {}),
    (experts_of_batches.mask_of_the_only, {"choices": 1}),
], ids=ids)  # fmt: skip
def test_loops_over_batches(body, says):
    assert described(the_layer(loop.find, view_of(MoE(body), torch.randn(2, 5, DIM)))) == PLAIN | says


@pytest.mark.sampled(3)
@pytest.mark.parametrize("matcher, body, says", [
    (grouped.find_by_columns, experts_at_once.dense_loop, {}), (grouped.find_by_columns, experts_at_once.dense_on_the_residual, {"base": True}),
    (grouped.find_by_columns, experts_at_once.dense_marked_gates, {}), (grouped.find, experts_at_once.dense_stack_einsum, {}),
    (grouped.find, experts_at_once.dense_masked_scores, {"by_expert": True}),
    (grouped.find, experts_at_once.slots_in_their_places, {"choices": 2}),
], ids=ids)  # fmt: skip
def test_outputs_of_all_experts(matcher, body, says):
    assert described(the_layer(matcher, view_of_experts(body))) == PLAIN | says


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body, says", [
    (experts_at_once.einsum_of_all, {}), (experts_at_once.bmm_of_all, {}), (experts_at_once.matmul_of_all, {}),
    (experts_at_once.scaled_rows_of_all, {"by_expert": True, "scaled_input": True}),
    (experts_at_once.matmul_of_chosen, {"choices": 2}), (experts_at_once.bmm_of_slots, {"choices": 2}),
    (experts_at_once.scaled_rows_of_chosen, {"choices": 2, "scaled_input": True}),
], ids=ids)  # fmt: skip
def test_gemms_over_all_weights(body, says):
    view = view_of_experts(body, stacked=True)
    layer = the_layer(grouped.find, view)
    assert described(layer) == AT_ONCE | says
    assert layer.experts[0].down.weight.every
    assert result(view) in (layer.output, *layer.output.users)  # a view of it, where the sum is a bmm


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body, says", [
    (experts.sorted_grouped_gemms, {}), (experts_at_once.sorted_index_add, {}),
    (experts_at_once.sorted_scatter_add, {}), (experts_at_once.sorted_by_marks, {}),
    (experts_at_once.sorted_scaled_rows, {"scaled_input": True}),
], ids=ids)  # fmt: skip
def test_sorted_tokens(body, says):
    layer = the_layer(sorted_rows.find_layers, view_of_sorted(body))
    assert described(layer) == AT_ONCE | {"choices": 2} | says
    assert layer.indices.target is operator.getitem  # the choices themselves, not a view of them


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body, own", [(experts.where_index_add, loop.find), (experts_at_once.dense_loop, grouped.find_by_columns)], ids=["loop", "dense"])
def test_each_spelling_has_one_matcher(body, own):
    view = view_of_experts(body)
    finders = [matcher for matcher in (loop.find, grouped.find_by_columns, grouped.find, sorted_rows.find_layers) if list(matcher(view))]
    assert finders == [own]
