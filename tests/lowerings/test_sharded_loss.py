"""Losses of words that ranks share: what one rank alone can say of them. Two ranks are tests/sharding/test_heads.py."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from megacpp_compile.errors import OperandError
from megacpp_compile.lowerings._registry import choose
from megacpp_compile.lowerings._sharded_logsumexp import sharded_logsumexp
from megacpp_compile.lowerings._sharded_loss import sharded_cross_entropy
from megacpp_compile.lowerings.linear_cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_group_of_one_rank(rand, alone, reduction):
    x, w, b = rand(7, 4, grad=True), rand(5, 4, grad=True), rand(5, grad=True)
    target = torch.tensor([0, 4, -100, 2, 1, 1, 3])
    args = x, w, b, target, None, -100, 0.1, 1.0, None, 0.0, reduction, "xwb" if reduction == "sum" else ""
    opcheck(linear_cross_entropy, (*args, 0, 5, alone))
    torch.testing.assert_close(linear_cross_entropy(*args, 0, 5, alone), linear_cross_entropy(*args))


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(7, 5), (5,), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_loss_alone_in_a_group_of_one_rank(rand, alone, shape, reduction):
    logits = rand(*shape, grad=True)
    target = (rand(*shape[:1], *shape[2:]) if len(shape) > 1 else rand(1)[0]).sigmoid().mul(5).long()
    if target.dim():
        target.view(-1)[1] = -100
    settings = -100, 0.1, reduction
    opcheck(sharded_cross_entropy, (logits, target, *settings, 0, 5, alone))
    got = sharded_cross_entropy(logits, target, *settings, 0, 5, alone)[0]
    want = F.cross_entropy(logits, target, label_smoothing=0.1, reduction=reduction)
    seed = torch.rand_like(want)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits, seed)[0] for t in (got, want)))


@pytest.mark.parametrize(("shape", "dim", "keepdim"), [((7, 5), 1, False), ((2, 5, 3), 1, True), ((5,), 0, False)])
def test_the_logsumexp_alone_in_a_group_of_one_rank(rand, alone, shape, dim, keepdim):
    logits = rand(*shape, grad=True)
    opcheck(sharded_logsumexp, (logits, dim, keepdim, 0, 5, alone))
    got, want = sharded_logsumexp(logits, dim, keepdim, 0, 5, alone)[0], torch.logsumexp(logits, dim, keepdim)
    seed = torch.rand_like(want)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits, seed)[0] for t in (got, want)))


def test_a_target_that_no_rank_has(rand, alone):
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(rand(1, 4), rand(5, 4), None, torch.tensor([5]), None, -100, 0.0, 1.0, None, 0.0, "sum",
                             "", 0, 5, alone)


@pytest.mark.parametrize("part", [(3, 5, "group"), (0, 4, "group"), (0, None, "group"), (0, 5, None), (1, None, None)])
def test_parts_that_cannot_be(rand, part):
    args = rand(1, 4), rand(5, 4), None, torch.tensor([0]), None, -100, 0.0, 1.0, None, 0.0, "sum", ""
    with pytest.raises(OperandError, match="words"):
        linear_cross_entropy(*args, *part)


@pytest.mark.parametrize("target", ["cuda", "tpu"])
def test_lowerings_that_know_of_no_parts_fall_back_with_a_reason(target):
    x, w, labels = torch.empty(2, 4), torch.empty(5, 4), torch.zeros(2, dtype=torch.int64)
    args = x, w, None, labels, None, -100, 0.0, 1.0, None, 0.0, "sum", "xw"
    given = (*args, 0, 10, "group")
    choice = choose(torch.ops.megacpp.linear_cross_entropy.default, target, given)
    inspect.signature(choice.body).bind(*given)
    assert choice.effective != "reference" or "of the call's 15 arguments" in choice.reason or "no-lo" in choice.reason
    assert choose(torch.ops.megacpp.linear_cross_entropy.default, target, args).effective != "reference"
