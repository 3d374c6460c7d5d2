"""Losses that take log-probabilities in a way the pass on heads does not know are near misses, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.heads import WORDS, build, needs_equal_counts
from tests.frames import check_graph, run

NAME = "linear_cross_entropy"


def log_probabilities(m, x):
    return m.proj(x).flatten(0, 1).log_softmax(-1)


def tags_of(body, through=check_graph):
    return [m.tag for m in through(*build(body, ignored=False)).misses if m.pass_name == NAME]


def of_words(make):
    """Minus the mean of what `make(log-probabilities, rows, words)` chooses."""

    def body(m, x, labels):
        words = labels.flatten()
        return -make(log_probabilities(m, x), torch.arange(words.shape[0]), words).mean()

    return body


def rows_set_to_zero(m, x, labels):
    logp = log_probabilities(m, x).clone()
    logp[labels.flatten() < 3] = 0
    return -logp.gather(-1, labels.flatten()[:, None]).sum()


def log_of_a_sum(m, x, labels):
    probabilities = m.proj(x).flatten(0, 1).softmax(-1)
    return -(probabilities + 1e-9).log().gather(-1, labels.flatten()[:, None]).mean()


def weighed_by_rows_of_words(m, x, labels):
    """Labels of the words that the hidden state is made of, too."""
    words = labels.flatten()
    x = x + m.proj.weight[labels]
    return -torch.einsum("nv,nv->", log_probabilities(m, x), F.one_hot(words, WORDS).to(x.dtype)) / words.numel()


TOLD = {
    "flat_offsets": of_words(lambda logp, rows, words: logp.view(-1)[rows * WORDS + words]),
    "taken": of_words(lambda logp, rows, words: torch.take(logp, rows * WORDS + words)),
    "rows_by_range": of_words(lambda logp, rows, words: logp[range(words.shape[0]), words]),
    "einsum_of_one_hot": of_words(
        lambda logp, rows, words: torch.einsum("nv,nv->n", logp, F.one_hot(words, WORDS).float())
    ),
    "selected_by_mask": of_words(lambda logp, rows, words: logp.masked_select(F.one_hot(words, WORDS).bool())),
    "rows_set_to_zero": rows_set_to_zero, "log_of_a_sum": log_of_a_sum,
    "weighed_by_rows_of_words": weighed_by_rows_of_words,
}


@pytest.mark.parametrize("case", TOLD)
def test_is_told(case):
    frames = check_graph(*build(TOLD[case], ignored=False))
    assert frames.counts[NAME] == 0 and [m.tag for m in frames.misses if m.pass_name == NAME] == ["unread"]


def entropy(m, x, labels):
    """As that of a router."""
    p = m.proj(x).softmax(-1)
    return -(p * p.clamp_min(1e-9).log()).sum(-1).mean()


def divergence(m, x, labels):
    """Of two softmaxes of one linear."""
    p = m.proj(x).softmax(-1)
    return (p * ((p + 1e-9).log() - (m.proj(x) / 2).log_softmax(-1))).sum(-1).mean()


def entropy_beside_a_loss(m, x, labels):
    """Of a router, added to the loss of words."""
    p = F.linear(x, m.proj.weight[:5]).softmax(-1)
    words = F.cross_entropy(m.proj(x).flatten(0, 1), labels.flatten())
    return words - 0.1 * (p * (p + 1e-9).log()).sum(-1).mean()


NO_LOSS = {
    # what a sampler returns
    "of_all_words": lambda m, x, labels: log_probabilities(m, x),
    "greatest": lambda m, x, labels: tuple(log_probabilities(m, x).max(-1)),
    # over rows, not over words
    "of_other_lanes": lambda m, x, labels: m.proj(x).flatten(0, 1).log_softmax(0).sum(),
    "of_no_linear": lambda m, x, labels: x.sin().log_softmax(-1).sum(),
    # a softmax whose logarithm nobody takes
    "attended": lambda m, x, labels: (m.proj(x).softmax(-1) @ m.proj.weight).square().mean(),
    "entropy": entropy, "divergence": divergence, "entropy_beside_a_loss": entropy_beside_a_loss,
}


@pytest.mark.parametrize("case", NO_LOSS)
def test_is_no_loss(case):
    assert not tags_of(NO_LOSS[case])


def test_a_loss_that_is_known_has_one_reason():
    """A site, or what stands between, and not this beside it."""

    def known(m, x, labels):
        return F.nll_loss(log_probabilities(m, x), labels.flatten())

    def limited(m, x, labels):
        return F.nll_loss(m.proj(x).flatten(0, 1).clamp(-5, 5).log_softmax(-1), labels.flatten())

    assert check_graph(*build(known, ignored=False)).counts[NAME] == 1
    assert tags_of(limited) == ["between"]


def of_masked_rows(make):
    """Of so many rows as the mask has, which is known at run time only; `make(m, rows)` makes their logits."""

    def body(m, x, labels):
        return F.cross_entropy(make(m, x[labels > 2]), labels[labels > 2])

    return body


MASKED = {
    "and_others": of_masked_rows(lambda m, rows: m.proj(rows) + rows @ m.proj.weight.detach().mT.sin()),
    "times_others": of_masked_rows(lambda m, rows: m.proj(rows) * rows[:, :1]),
}


@pytest.mark.parametrize("case", MASKED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_how_many_rows_a_mask_has_is_not_asked(case):
    needs_equal_counts()
    assert set(tags_of(MASKED[case], run)) == {"between"}
