"""What nearly is a layer of routed experts: each matcher names the node and why."""

from __future__ import annotations

import cProfile

import pytest
import torch

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe import find, grouped, loop, sorted_rows, unread
from tests.passes import experts, experts_at_once, experts_sorted
from tests.passes.experts import CHOICES, DIM

from .capture import ids, the_failure, view_of, view_of_experts, view_of_sorted

aten = torch.ops.aten


@pytest.mark.sampled(3)
@pytest.mark.parametrize("matcher, body, tag, target", [
    (loop.find, experts.gate_of_the_first_choice, "gates", aten.mul.Tensor),
    (loop.find, experts.one_expert_twice, "twice", aten.index_add.default),
    (loop.find, experts.an_expert_left_out, "gaps", aten.index_add.default),
    (loop.find, experts.output_read_elsewhere, "escapes", aten.linear.default),
    (grouped.find_by_columns, experts_at_once.every_expert_works, "dense-gates", aten.softmax.int),
    (grouped.find_by_columns, experts_at_once.a_column_left_out, "gaps", aten.add.Tensor),
    (grouped.find_by_columns, experts_at_once.marked_gates_of_others, "gates", aten.mul.Tensor),
    (grouped.find, experts_at_once.einsum_of_every_expert, "dense-gates", aten.softmax.int),
    (grouped.find, experts_at_once.einsum_with_a_bias_of_all, "bias", aten.add.Tensor),
    (grouped.find, experts_at_once.scaled_at_both_ends, "gates", aten.sum.dim_IntList),
    (grouped.find, experts.batched_with_gates_of_experts, "gates", aten.sum.dim_IntList),
    (grouped.find, experts.batched_by_any_numbers, "range", aten.reshape.default),
], ids=ids)  # fmt: skip
def test_one_matcher(matcher, body, tag, target):
    failure = the_failure(matcher, view_of_experts(body, stacked=matcher is grouped.find))
    assert (failure.tag, failure.node.target) == (tag, target)


def test_rows_that_are_written_are_in_doubt():
    """They may be weighted later; what finds nothing else nearby then says why."""
    view = view_of_experts(written_over_by_any_numbers)
    assert not list(loop.find(view))
    (doubt,) = loop.ungated(view, [])
    assert doubt.tag == "twice" and doubt.node.target is aten.index_put.default
    assert list(unread(view, [], [doubt])) == [doubt]
    assert not list(unread(view, [MatchFailure(doubt.node, "rows", "")], [doubt]))


def written_over_by_any_numbers(m, x, indices, gates):
    y, ids = x.clone(), indices[:, 0].abs()
    for e, expert in enumerate(m.experts):
        rows = ids == e
        y[rows] = expert(x[rows])
    return y


@pytest.mark.parametrize("body, tag", [
    (experts_at_once.sorted_back_to_others, "rows"), (experts_at_once.sorted_into_other_groups, "offsets"),
], ids=ids)  # fmt: skip
def test_sorted_tokens(body, tag):
    assert the_failure(sorted_rows.find_layers, view_of_sorted(body)).tag == tag


def sorted_view(body):
    module, counts = experts_sorted.Sorted(body).bfloat16(), torch.tensor([2, 3, 4])
    return view_of(module, torch.randn(9, DIM).bfloat16(), counts, grad=False)


@pytest.mark.parametrize("tag, body", experts_sorted.NEAR_MISSES.items(), ids=ids)
def test_rows_that_come_sorted(tag, body):
    (failure,) = sorted_rows.find(sorted_view(body), [])
    assert failure.tag == tag


@pytest.mark.parametrize("body", experts_sorted.OTHERS, ids=ids)
def test_grouped_gemms_that_are_no_experts(body):
    assert not list(sorted_rows.find(sorted_view(body), []))


def test_experts_of_a_layer_that_is_whole_are_its_own():
    view = view_of_sorted(experts.sorted_grouped_gemms)
    assert len(list(sorted_rows.find(view, []))) == 1
    assert not list(sorted_rows.find(view, [*sorted_rows.find_layers(view)]))


def hit_list(x):
    """As transformers' `expert_hit`."""
    indices = x.topk(CHOICES, -1).indices
    return torch.nn.functional.one_hot(indices, DIM).permute(2, 1, 0).sum((-1, -2)).gt(0).nonzero()


def large_entries(x):
    return (x.sum(-1) > 0).nonzero()


def test_a_list_of_hit_experts():
    failure = the_failure(find, view_of(hit_list, torch.randn(5, DIM)))
    assert failure.tag == "loop-over-data" and failure.node.target is aten.nonzero.default
    assert not list(find(view_of(large_entries, torch.randn(5, DIM))))


def test_unread_experts():
    view = view_of_experts(experts_at_once.experts_merged_into_one, stacked=True)
    assert not [found for matcher in (loop.find, grouped.find_by_columns, grouped.find, sorted_rows.find_layers) for found in matcher(view)]
    (failure,) = unread(view, [], [])
    assert failure.tag == "unread" and failure.node.target is aten.einsum.default
    assert not list(unread(view, [MatchFailure(failure.node, "bias", "")], []))


def test_experts_that_a_matcher_has_read_are_not_unread():
    view = view_of_experts(experts_at_once.einsum_of_all, stacked=True)
    assert not list(unread(view, [*grouped.find(view)], []))
    assert [failure.tag for failure in unread(view, [], [])] == ["unread"]


def test_looking_through_a_graph_takes_time_in_proportion_to_its_nodes():
    few, many = (_calls_of_a_search(sums) for sums in (20, 60))
    assert many < 3.3 * few


def _calls_of_a_search(sums):
    """How many calls it takes to find that no layer of experts is among that many sums of products."""

    def products(x, w):
        for _ in range(sums):
            x = (x.unsqueeze(1) * w).sum(-1)
        return x

    view = view_of(products, torch.randn(3, 8), torch.randn(8, 8))
    with cProfile.Profile(builtins=False) as profile:
        assert not list(grouped.find(view))
    return sum(entry.callcount for entry in profile.getstats())
