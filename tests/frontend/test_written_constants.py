"""Losses that are added up in a tensor made of a number: the sum has the gradient that eager's has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megacpp_compile.frontend.written_constants import without_writes_to_constants
from tests.corpus.heads import build
from tests.frames import check


def losses(m, x, labels):
    for rows, own in zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True):
        yield F.cross_entropy(m.proj(rows).flatten(0, 1), own.flatten(), reduction="sum")


def added(m, x, labels):
    total = torch.tensor(0.0)
    for loss in losses(m, x, labels):
        total += loss
    return total


def added_by_method(m, x, labels):
    total = torch.tensor(0.0, dtype=x.dtype, device=x.device)
    for loss in losses(m, x, labels):
        total.add_(loss, alpha=0.5)
    return total, total.detach() + 1


def added_to_a_part(m, x, labels):
    totals = x.new_tensor([1.0, 2.0])
    for i, loss in enumerate(losses(m, x, labels)):
        totals[i] += loss
    return totals.square().sum()


def assigned_through_a_view(m, x, labels):
    totals = torch.tensor([[1.0, 2.0]])
    row = totals[0]
    for i, loss in enumerate(losses(m, x, labels)):
        row[i] = loss
    return totals


def counted_beside(m, x, labels):
    total, count = torch.tensor(0.0), torch.tensor(0)
    for loss in losses(m, x, labels):
        total, count = total + loss, count.add_((labels != -100).sum())
    return total / count


def checkpointed(m, x, labels):
    return checkpoint(added, m, x, labels, use_reentrant=False)


BODIES = [added, added_by_method, added_to_a_part, assigned_through_a_view, counted_beside, checkpointed]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_what_is_added_to_a_number_has_a_gradient(body):
    frames = check(*build(body))
    assert frames.counts["linear_cross_entropy"] >= 1
    assert "gradient of proj.weight" in frames.results


def test_what_is_not_written_to_stays():
    def body(x):
        return x + torch.tensor([1.0, 2.0])

    graphs = []
    torch.compile(body, backend=lambda gm, _: graphs.append(gm) or gm)(torch.randn(2))
    assert without_writes_to_constants(graphs[0]) is graphs[0]
