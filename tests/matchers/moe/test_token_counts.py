"""Counts of an expert's tokens, lists of the experts that have any, and conditions that say there are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.moe.token_counts import match_count, match_empty
from tests.matchers.graphs import trace

INDICES = torch.tensor([[0, 2], [1, 2]])

COUNTS = {
    "sum": lambda i: F.one_hot(i, 3).sum(dim=(0, 1)),
    "sum of sums": lambda i: F.one_hot(i, 3).permute(2, 1, 0).sum(-1).sum(-1),
    "any": lambda i: F.one_hot(i, 3).bool().any(0).any(0), "compared": lambda i: F.one_hot(i, 3).sum(dim=(0, 1)) > 0,
    "float": lambda i: F.one_hot(i, 3).float().sum(0).sum(0),
}  # fmt: skip
OTHERS = {
    "of one dimension": lambda i: F.one_hot(i, 3).sum(0), "mean": lambda i: F.one_hot(i, 3).float().mean(dim=(0, 1)),
    "more than one": lambda i: F.one_hot(i, 3).sum(dim=(0, 1)) > 1,
    "may overflow": lambda i: F.one_hot(i, 3).sum(dim=(0, 1)).to(torch.uint8),
    "turned around": lambda i: F.one_hot(i, 3).sum(dim=(0, 1)) == 0,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts_by_expert(name):
    traced = trace(COUNTS[name], INDICES)
    count = match_count(traced.output)
    assert count is not None and count.by_expert and count.mask.indices is traced.inputs[0]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_count(name):
    assert match_count(trace(OTHERS[name], INDICES).output) is None


@pytest.mark.parametrize(("condition", "holds", "empty"), [
    (lambda i: (i == 1).any(), False, True), (lambda i: (i == 1).any(), True, False),
    (lambda i: (i == 1).sum() == 0, True, True), (lambda i: (i == 1).sum() == 0, False, False),
    (lambda i: (i == 1).sum() < 1, True, True), (lambda i: (i == 1).sum() < 2, True, False),
    (lambda i: ~(i == 1).any(), True, True), (lambda i: F.one_hot(i, 3).sum(dim=(0, 1))[1] > 0, False, True),
    (lambda i: F.one_hot(i, 3).sum(dim=(0, 1))[1] > 1, False, False), (lambda i: (i == 1).all(), False, False),
])  # fmt: skip
def test_conditions_that_say_there_are_none(condition, holds, empty):
    mask = match_empty(trace(condition, INDICES).output, holds)
    assert (mask is not None) == empty and (mask is None or mask.expert == 1)
