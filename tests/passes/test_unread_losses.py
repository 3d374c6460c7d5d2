"""Losses that take log-probabilities in a way the pass on heads does not know are near misses, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.heads import WORDS, build
from tests.frames import check, run

NAME = "linear_cross_entropy"


def log_probabilities(m, x):
    return m.proj(x).flatten(0, 1).log_softmax(-1)


def flat_offsets(m, x, labels):
    words = labels.flatten()
    return -log_probabilities(m, x).view(-1)[torch.arange(words.shape[0]) * WORDS + words].mean()


def taken(m, x, labels):
    words = labels.flatten()
    return -torch.take(log_probabilities(m, x), torch.arange(words.shape[0]) * WORDS + words).mean()


def rows_by_range(m, x, labels):
    words = labels.flatten()
    return -log_probabilities(m, x)[range(words.shape[0]), words].mean()


def einsum_of_one_hot(m, x, labels):
    return -torch.einsum("nv,nv->n", log_probabilities(m, x), F.one_hot(labels.flatten(), WORDS).float()).mean()


def rows_set_to_zero(m, x, labels):
    logp = log_probabilities(m, x).clone()
    logp[labels.flatten() < 3] = 0
    return -logp.gather(-1, labels.flatten()[:, None]).sum()


def log_of_a_sum(m, x, labels):
    probabilities = m.proj(x).flatten(0, 1).softmax(-1)
    return -(probabilities + 1e-9).log().gather(-1, labels.flatten()[:, None]).mean()


def selected_by_mask(m, x, labels):
    return -log_probabilities(m, x).masked_select(F.one_hot(labels.flatten(), WORDS).bool()).mean()


def weighed_by_rows_of_words(m, x, labels):
    """Labels of the words that the hidden state is made of, too."""
    words = labels.flatten()
    x = x + m.proj.weight[labels]
    return -torch.einsum("nv,nv->", log_probabilities(m, x), F.one_hot(words, WORDS).to(x.dtype)) / words.numel()


@pytest.mark.parametrize(
    "body",
    [
        flat_offsets, taken, rows_by_range, einsum_of_one_hot, rows_set_to_zero, log_of_a_sum, selected_by_mask,
        weighed_by_rows_of_words,
    ],  # fmt: skip
    ids=lambda f: f.__name__,
)
def test_is_told(body):
    frames = check(*build(body, ignored=False))
    assert frames.counts[NAME] == 0 and [m.tag for m in frames.misses if m.pass_name == NAME] == ["unread"]


def of_all_words(m, x, labels):
    """What a sampler returns: no loss."""
    return log_probabilities(m, x)


def greatest(m, x, labels):
    return log_probabilities(m, x).max(-1)


def of_other_lanes(m, x, labels):
    """Over rows, not over words."""
    return m.proj(x).flatten(0, 1).log_softmax(0).sum()


def of_no_linear(m, x, labels):
    return x.sin().log_softmax(-1).sum()


def attended(m, x, labels):
    """A softmax whose logarithm nobody takes."""
    return (m.proj(x).softmax(-1) @ m.proj.weight).square().mean()


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


@pytest.mark.parametrize(
    "body",
    [of_all_words, greatest, of_other_lanes, of_no_linear, attended, entropy, divergence, entropy_beside_a_loss],
    ids=lambda f: f.__name__,
)
def test_is_no_loss(body):
    assert not run(*build(body, ignored=False)).tags(NAME)


def test_a_loss_that_is_known_has_one_reason():
    """A site, or what stands between, and not this beside it."""

    def known(m, x, labels):
        return F.nll_loss(log_probabilities(m, x), labels.flatten())

    def limited(m, x, labels):
        return F.nll_loss(m.proj(x).flatten(0, 1).clamp(-5, 5).log_softmax(-1), labels.flatten())

    assert run(*build(known, ignored=False)).counts[NAME] == 1
    assert [m.tag for m in run(*build(limited, ignored=False)).misses if m.pass_name == NAME] == ["between"]


def rows_of_a_mask_and_others(m, x, labels):
    """Of so many rows as the mask has, which is known at run time only."""
    rows, words = x[labels > 2], labels[labels > 2]
    return F.cross_entropy(m.proj(rows) + rows @ m.proj.weight.detach().mT.sin(), words)


def rows_of_a_mask_times_others(m, x, labels):
    rows, words = x[labels > 2], labels[labels > 2]
    return F.cross_entropy(m.proj(rows) * rows[:, :1], words)


@pytest.mark.parametrize("body", [rows_of_a_mask_and_others, rows_of_a_mask_times_others], ids=lambda f: f.__name__)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_how_many_rows_a_mask_has_is_not_asked(body):
    frames = run(*build(body, ignored=False))
    assert {m.tag for m in frames.misses if m.pass_name == NAME} == {"between"}, frames.misses
