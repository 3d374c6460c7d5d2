"""Where each expert's slots end, in the ways there are to count or to search."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.moe.sorted_slots import SortedIds, sorted_by
from megacpp_compile.reader.index_reads import repeated_over_channels
from tests.matchers.graphs import trace

E = 4


def counts(count, of_sorted=True):
    """The running sum of `count(ids)`."""
    return lambda ids, ordered: count(ordered if of_sorted else ids).cumsum(0, dtype=torch.int32)


def histc(ids):
    return torch.histc(ids.float(), bins=E, min=0, max=E - 1)


def added(ids):
    return torch.zeros(E, dtype=torch.int32).scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


ENDS = {
    "histc": counts(histc), "histc of unsorted": counts(histc, of_sorted=False),
    "one-hots": counts(lambda ids: F.one_hot(ids, E).sum(0)),
    "one-hots of unsorted": counts(lambda ids: F.one_hot(ids, E).T.sum(-1), of_sorted=False),
    "scatter_add": counts(added),
    "index_add": counts(lambda ids: torch.zeros(E).index_add(0, ids, torch.ones(ids.shape)), of_sorted=False),
    "equal": counts(lambda ids: (ids[:, None] == torch.arange(E)).sum(0)),
    "equal, experts first": counts(lambda ids: (ids[None] == torch.arange(E)[:, None]).sum(1)),
    "searchsorted": lambda ids, ordered: torch.searchsorted(ordered, torch.arange(E), right=True).to(torch.int32),
    "searchsorted of next": lambda ids, ordered: torch.searchsorted(ordered, torch.arange(1, E + 1), out_int32=True),
    "bucketize": lambda ids, ordered: torch.bucketize(torch.arange(E), ordered, right=True, out_int32=True),
}  # fmt: skip
OTHERS = {
    "fewer bins": counts(lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E + 1)),
    "next": counts(lambda ids: F.one_hot((ids + 1) % E, E).sum(0)),
    "of some": counts(lambda ids: F.one_hot(ids[:5], E).sum(0)),
    "twos": counts(lambda ids: torch.zeros(E, dtype=torch.int64).scatter_add_(0, ids, torch.full_like(ids, 2))),
    "onto ones": counts(lambda ids: torch.ones(E, dtype=torch.int64).scatter_add_(0, ids, torch.ones_like(ids))),
    "numbers from one": counts(lambda ids: (ids[:, None] == torch.arange(1, E + 1)).sum(0)),
    "whether there are any": counts(lambda ids: F.one_hot(ids, E).sum(0).bool()),
    "starts": lambda ids, ordered: torch.searchsorted(ordered, torch.arange(E)).to(torch.int32),
    "of unsorted": lambda ids, ordered: torch.searchsorted(ids, torch.arange(E), right=True).to(torch.int32),
}


def found(ends, by_argsort, chosen=lambda ids: ids):
    def f(scores):
        ids = chosen(scores.topk(2, -1).indices).reshape(-1)
        if by_argsort:
            order = ids.argsort()
            return ids, order, ends(ids, ids[order])
        ordered, order = torch.sort(ids)
        return ids, order, ends(ids, ordered), ordered

    ids, order, node, *ordered = trace(f, torch.randn(5, E)).outputs
    return SortedIds(ids, order, *ordered or [None]).end_at(node, E)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ENDS)
def test_ends(name):
    assert found(ENDS[name], False)


@pytest.mark.parametrize("name", ["histc", "one-hots of unsorted", "searchsorted"])
def test_ends_behind_an_argsort(name):
    assert found(ENDS[name], True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers(name):
    assert not found(OTHERS[name], False)


def test_a_search_takes_negative_numbers_for_the_first_expert():
    assert not found(ENDS["searchsorted"], False, lambda ids: ids - 1)


def test_choices_that_are_sorted_for_each_token_are_no_order_of_slots():
    traced = trace(lambda scores: scores.topk(2, -1).indices.argsort(), torch.randn(5, E))
    assert sorted_by(traced.output) is None
    traced = trace(lambda scores: scores.topk(2, -1).indices.flatten().argsort(), torch.randn(5, E))
    assert sorted_by(traced.output) is not None


def test_numbers_of_rows_are_the_same_for_all_channels():
    x, index = torch.randn(3, 3), torch.tensor([2, 0, 1])
    for expand, same in ((lambda i: i.expand(3, -1), False), (lambda i: i[:, None].expand(-1, 3), True),
                         (lambda i: i[:, None].repeat(1, 3), True), (lambda i: i[None].repeat(3, 1), False)):  # fmt: skip
        traced = trace(lambda x, i: x.gather(0, expand(i)), x, index)  # noqa: B023
        assert (repeated_over_channels(traced.output.args[2]) is not None) is same
