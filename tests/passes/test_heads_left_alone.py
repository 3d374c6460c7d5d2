"""Heads and losses that `linear_cross_entropy` leaves as they are: with a reason for each, or without a word."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile.passes import linear_cross_entropy
from tests.corpus.heads import (
    IGNORED,
    WORDS,
    arguments,
    build,
    flattened,
    hidden_by_their_labels,
    one_hot_by_scatter,
)
from tests.frames import check, run

from .contract import assert_fires, assert_refused

NAME = "linear_cross_entropy"


def kept(m, x, labels):
    logits = m.proj(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def accuracy(m, x, labels):
    logits = m.proj(x)
    right = (logits.argmax(-1) == labels).sum()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), right


def scaled_by_itself(m, x, labels):
    logits = m.proj(x)
    return F.cross_entropy((logits / logits.mean()).flatten(0, 1), labels.flatten())


def entropy(m, x, labels):
    logp = m.proj(x).log_softmax(-1)
    return logp.gather(-1, labels.clamp(min=0)[..., None]).mean() - (logp.exp() * logp).sum(-1).mean()


def smoothed_behind_a_softcap(m, x, labels):
    """Of capped logits a mean over words is made of all of them."""
    logp = (5 * torch.tanh(m.proj(x) / 5)).log_softmax(-1)
    return -logp.gather(-1, labels.clamp(min=0)[..., None]).mean() - 0.1 * logp.mean(-1).mean()


def mean_of_everything(m, x, labels):
    logp = m.proj(x).log_softmax(-1)
    return -logp.gather(-1, labels.clamp(min=0)[..., None]).mean() - 0.1 * logp.mean()


def last_logits(m, x, labels):
    logits = m.proj(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits[:, -1]


def class_weights(m, x, labels):
    return F.cross_entropy(m.proj(x).flatten(0, 1), labels.flatten(), weight=m.embed.weight[:, 0].exp().detach())


def probabilities(m, x, labels):
    return F.cross_entropy(m.proj(x).flatten(0, 1), m.embed(labels.clamp(min=0)).softmax(-1).flatten(0, 1) @
                           m.embed.weight.T)  # fmt: skip


def distilled(m, x, labels):
    """A teacher's probabilities."""
    teacher = (x.detach() @ m.embed.weight.detach().T).softmax(-1)
    return -(teacher * m.proj(x).log_softmax(-1)).sum(-1).mean()


def divergence(m, x, labels):
    """From a teacher's distribution."""
    teacher = (x.detach() @ m.embed.weight.detach().T).softmax(-1)
    return F.kl_div(F.log_softmax(m.proj(x) / 2, -1), teacher, reduction="batchmean")


def several_words_by_hand(m, x, labels):
    logits = m.proj(x)
    words = torch.stack([labels, labels.roll(1)], -1).clamp(min=0)
    return (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, words)).mean()


def several_words(m, x, labels):
    words = torch.stack([labels, labels.roll(1)], -1).clamp(min=0)
    return m.proj(x).log_softmax(-1).gather(-1, words).mean()


def in_double(m, x, labels):
    return F.cross_entropy(m.proj(x).double().flatten(0, 1), labels.flatten())


def half_without_gradients(m, x, labels):
    with torch.no_grad():
        logits = m.proj(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * x.sum()


NEAR_MISSES = {
    "logits-kept": [kept, accuracy, entropy, last_logits, scaled_by_itself, smoothed_behind_a_softcap,
                    mean_of_everything],
    "class-weights": [class_weights],
    "soft-targets": [probabilities, distilled, divergence],
    "several-targets": [several_words, several_words_by_hand],
    "dtype": [in_double],
    "region": [half_without_gradients],
}


@pytest.mark.parametrize(
    ("tag", "body"), [(tag, body) for tag, bodies in NEAR_MISSES.items() for body in bodies],
    ids=lambda p: p if isinstance(p, str) else p.__name__,
)  # fmt: skip
def test_refuses(tag, body):
    assert_refused(NAME, tag, *build(body))


def test_refuses_labels_that_may_be_fewer():
    """Of lengths that vary by themselves, as nothing here says that they are one."""
    module, (x, labels) = build(one_hot_by_scatter)
    for t in (x, labels):
        torch._dynamo.mark_dynamic(t, 1)
    assert_refused(NAME, "rows", module, (x, labels))


def by_two_masks(m, x, labels):
    """Equally many, but others."""
    counted = labels != IGNORED
    return F.cross_entropy(m.proj(x)[counted], labels[counted.flip(0)].clamp(min=0))


def log_probabilities_of_masked_rows(m, x, labels):
    """Nothing in a gather says that two masks choose as many."""
    logp = m.proj(x[labels != IGNORED]).log_softmax(-1)
    return logp.gather(-1, labels[labels.roll(0) != IGNORED].unsqueeze(-1)).mean()


def losses_of_masked_rows(m, x, labels):
    """There would be a result of as many rows."""
    counted = labels != IGNORED
    return F.cross_entropy(m.proj(x)[counted], labels[counted], reduction="none")


@pytest.mark.parametrize(
    "body", [by_two_masks, losses_of_masked_rows, log_probabilities_of_masked_rows], ids=lambda f: f.__name__
)
def test_refuses_rows_of_unknown_number(body):
    assert "masked_fill" in assert_refused(NAME, "rows", *build(body)).misses[0].reason


# --- between linear and loss: told with a remedy


def every_other_word(m, x, labels):
    return F.cross_entropy(m.proj(x)[..., ::2].flatten(0, 1), labels.flatten().clamp(max=WORDS // 2))


def masked_words(m, x, labels):
    logits = m.proj(x).masked_fill(torch.arange(WORDS) > WORDS - 3, -1e9)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(max=WORDS - 3))


def scaled_rows(m, x, labels):
    logits = m.proj(x) / x.detach().norm(dim=-1, keepdim=True)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def scaled_words(m, x, labels):
    return F.cross_entropy((m.proj(x) * m.embed.weight[:, 0]).flatten(0, 1), labels.flatten())


def learned_cap(m, x, labels):
    logits = torch.tanh(m.proj(x)).float() * m.temperature
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())


def biased_rows(m, x, labels):
    return F.cross_entropy((m.proj(x) + m.embed(labels.clamp(min=0)) @ m.embed.weight.T).flatten(0, 1), labels.flatten())


def temperature_of_rows(m, x, labels):
    """Of each row's log-probability, not its loss."""
    logp = (m.proj(x) / x.detach().norm(dim=-1, keepdim=True)).float().log_softmax(-1)
    return -torch.gather(logp, -1, labels.clamp(min=0).unsqueeze(-1)).mean()


def bounded(m, x, labels):
    return F.cross_entropy(m.proj(x).clamp(-2, 2).flatten(0, 1), labels.flatten())


def words_filled(m, x, labels):
    logits = m.proj(x)
    logits[..., WORDS - 2 :] = -1e9
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(max=WORDS - 3))


def put_together(m, x, labels):
    logits = torch.cat([m.proj(part) for part in x.chunk(2, 1)], 1)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words_of_one_half(m, x, labels):
    logits = F.linear(x, m.embed.weight[1:]).unflatten(-1, (2, -1))
    wanted = labels.flatten().clamp(max=10)
    return sum(F.cross_entropy(logits[..., i, :].flatten(0, 1), wanted) for i in range(2))


REMEDIES = {
    temperature_of_rows: "multiply the hidden states", bounded: "softcap", words_filled: "off, `logits[..., :words]`",
    put_together: "put hidden states together", words_of_one_half: "choose the weight's rows",
    every_other_word: "the weight's rows", masked_words: "off, `logits[..., :words]`", scaled_rows: "multiply the hidden states",
    scaled_words: "multiply the weight", learned_cap: "in front of a softcap", biased_rows: "an element a word",
}  # fmt: skip


@pytest.mark.parametrize(("body", "remedy"), REMEDIES.items(), ids=lambda p: getattr(p, "__name__", ""))
def test_refuses_what_stands_between(body, remedy):
    module, args = build(body)
    (miss,) = assert_refused(NAME, "between", module, args).misses
    assert remedy in miss.reason and "stands between the linear and its loss" in miss.reason


def capped_twice(m, x, labels):
    return F.cross_entropy(torch.sigmoid(torch.tanh(m.proj(x)) + 1).flatten(0, 1), labels.flatten())


def words_of_log_probabilities(m, x, labels):
    """All words are in the denominator."""
    logp = m.proj(x).log_softmax(-1)[..., : WORDS - 2]
    return F.nll_loss(logp.flatten(0, 1), labels.clamp(max=WORDS - 3).flatten())


def number_behind_a_log_softmax(m, x, labels):
    return F.nll_loss((m.proj(x).log_softmax(-1) + 0.5).flatten(0, 1), labels.flatten())


def numbers_of_other_rows(m, x, labels):
    """Each row's log-probability of the next row's word."""
    logp = m.proj(x).flatten(0, 1).log_softmax(-1)
    rows = torch.arange(1, 1 + labels.numel()) % labels.numel()
    return logp[rows, labels.flatten().clamp(min=0)]


def numbers_across(m, x, labels):
    """Pairs of rows and words."""
    logp = m.proj(x)[:, :2].log_softmax(-1)
    return logp[torch.arange(2), torch.arange(2)[:, None], labels[:, :2].clamp(min=0)]


def largest_of_rows(m, x, labels):
    """Along another dimension than the softmax."""
    z = m.proj(x)
    z = z - z.amax(1, keepdim=True)
    return z.exp().sum(-1).log() - z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def log_sum_exp_of_the_rest(m, x, labels):
    """Squared as it is."""
    z = m.proj(x)
    z = z - z.amax(-1, keepdim=True)
    lse = z.exp().sum(-1).log()
    return lse - z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) + 1e-2 * lse.square()


def largest_is_right(m, x, labels):
    """Accuracy."""
    z = m.proj(x)
    largest, best = z.max(-1, keepdim=True)
    z = z - largest
    return z.logsumexp(-1) - z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1), best == labels[..., None]


def largest_detached_once(m, x, labels):
    """The gradient is another than that of a log-sum-exp."""
    z = m.proj(x)
    largest = z.amax(-1, keepdim=True)
    lse = (z - largest).exp().sum(-1, keepdim=True).log() + largest.detach()
    return (lse - z.gather(-1, labels.clamp(min=0)[..., None])).sum()


def capped_behind_the_largest(m, x, labels):
    z = m.proj(x)
    return F.cross_entropy(torch.tanh(z - z.amax(-1, keepdim=True)).flatten(0, 1), labels.flatten())


def pairs_of_rows(m, x, labels):
    """[t, 1] less [t]."""
    z = m.proj(x)[0]
    z = z - z.amax(-1, keepdim=True)
    return z.logsumexp(-1, keepdim=True) - z.gather(-1, labels[0].clamp(min=0)[:, None]).squeeze(-1)


def sum_of_both(m, x, labels):
    z = m.proj(x)
    z = z - z.amax(-1, keepdim=True)
    return z.logsumexp(-1) + z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def log_of_another_sum(m, x, labels):
    logits = m.proj(x)
    return (logits.exp().sum(1, keepdim=True).log() - logits.gather(-1, labels.clamp(min=0)[..., None])).sum()


@pytest.mark.parametrize(
    "body", [largest_of_rows, log_sum_exp_of_the_rest, largest_is_right, largest_detached_once,
             capped_behind_the_largest, pairs_of_rows, sum_of_both, log_of_another_sum, capped_twice, words_of_log_probabilities, number_behind_a_log_softmax, numbers_of_other_rows,
             numbers_across], ids=lambda f: f.__name__,
)  # fmt: skip
def test_what_looks_alike_stays(body):
    assert not check(*build(body)).counts[NAME]


def test_refuses_a_number_that_would_be_rounded():
    """In front of a softcap it is a bias, in the linear's dtype; behind all else it is nothing to a loss."""

    def body(m, x, labels):
        logits = torch.tanh(m.proj(x).float() + 0.1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def nothing(m, x, labels):
        return F.cross_entropy((m.proj(x).float() + 0.1).flatten(0, 1), labels.flatten())

    assert_refused(NAME, "between", *build(body, dtype=torch.bfloat16))
    assert_fires(NAME, *build(nothing, dtype=torch.bfloat16))


def test_refuses_a_bias_that_would_be_rounded():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.bias = nn.Linear(12, WORDS, bias=False), nn.Parameter(torch.randn(WORDS))
            self.proj.to(torch.bfloat16)

        def forward(self, x, labels):
            return F.cross_entropy((self.proj(x).float() + self.bias).flatten(0, 1), labels.flatten())

    assert_refused(NAME, "between", Wide(), arguments(dtype=torch.bfloat16))


def test_says_what_keeps_logits():
    """What to do is said where it is known."""
    reasons = {body: run(*build(body)).misses[0].reason for body in (kept, accuracy)}
    assert "return the loss alone" in reasons[kept]
    assert "argmax read" in reasons[accuracy] and "return" not in reasons[accuracy]


class Loss(nn.Module):
    """A loss compiled by itself."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_refuses_logits_of_another_frame():
    logits = torch.randn(2, 6, WORDS, requires_grad=True)
    assert_refused(NAME, "another-frame", Loss(), (logits, arguments()[1]))


def test_small_logits_stay_on_cuda(monkeypatch):
    """Told by a device that CPU's tensors are taken to be on."""
    monkeypatch.setattr(linear_cross_entropy, "SMALL_ON", "cpu")
    module, args = build(flattened)
    assert_refused(NAME, "small", module, args)
    monkeypatch.setattr(linear_cross_entropy, "MIN_BYTES", 4 * args[1].numel() * WORDS)
    monkeypatch.setattr(linear_cross_entropy, "WEIGHTS", 0)
    assert_fires(NAME, module, args)


def test_rows_of_unknown_number_stay_on_cuda(monkeypatch):
    """There may be few of them. Traced again with graph breaks they are told."""
    monkeypatch.setattr(linear_cross_entropy, "SMALL_ON", "cpu")
    monkeypatch.setattr(linear_cross_entropy, "MIN_BYTES", 0)
    assert_refused(NAME, "rows", *build(hidden_by_their_labels))


def test_few_tokens_stay_on_cuda(monkeypatch):
    """A weight's gradient kept from forward to backward has to be worth it; where the weight has none, none is kept."""
    monkeypatch.setattr(linear_cross_entropy, "SMALL_ON", "cpu")
    monkeypatch.setattr(linear_cross_entropy, "MIN_BYTES", 0)
    module, args = build(flattened)
    monkeypatch.setattr(linear_cross_entropy, "WEIGHTS", 1000)
    assert_refused(NAME, "few-tokens", module, args)
    module.proj.weight.requires_grad_(False)
    assert_fires(NAME, module, args)


def two_chunks(m, x, labels):
    return sum(flattened(m, *part) for part in zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True))


def two_checkpointed_chunks(m, x, labels):
    chunks = zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True)
    return sum(checkpoint(flattened, m, *part, use_reentrant=False) for part in chunks)


def two_losses(m, x, labels):
    logits = m.proj(x)
    return sum(F.cross_entropy(part.flatten(0, 1), own.flatten()) for part, own in
               zip(logits.chunk(2, 1), labels.chunk(2, 1), strict=True))  # fmt: skip


@pytest.mark.parametrize(("body", "weights"), [(two_chunks, 1), (two_checkpointed_chunks, 2), (two_losses, 1)],
                         ids=["chunks", "checkpointed", "losses"])  # fmt: skip
def test_gradients_that_are_kept_are_counted(monkeypatch, body, weights):
    """Logits of 6 rows a chunk, and of 12 for two losses of one head, beside a weight of 12 numbers a word."""
    monkeypatch.setattr(linear_cross_entropy, "SMALL_ON", "cpu")
    monkeypatch.setattr(linear_cross_entropy, "MIN_BYTES", 0)
    monkeypatch.setattr(linear_cross_entropy, "WEIGHTS", 0.5 / weights)
    assert_fires(NAME, *build(body), 2)
    monkeypatch.setattr(linear_cross_entropy, "WEIGHTS", 0.5001 / weights)
    assert_refused(NAME, "few-tokens", *build(body))


def logits_alone(m, x, labels):
    return m.proj(x)


def routed(m, x, labels):
    """A router with a z-loss, of experts that tokens choose."""
    logits = m.proj(x)
    z = logits.logsumexp(-1).square().mean()
    return logits.softmax(-1).topk(2)[0].sum() + z


def routed_to_one(m, x, labels):
    """The score of the expert that a token chooses, and a z-loss."""
    logits = m.proj(x)
    chosen = logits.topk(1)[1]
    return logits.gather(-1, chosen).sigmoid().sum() + logits.logsumexp(-1).square().mean()


def routed_to_several(m, x, labels):
    """Experts' scores and a z-loss, with experts that tokens choose elsewhere."""
    logits = m.proj(x)
    chosen = m.embed(labels.clamp(min=0)).topk(2)[1]
    return logits.gather(-1, chosen).sigmoid().sum() + x.logsumexp(-1).square().mean()


def routed_by_hash(m, x, labels):
    """The score of an expert that a table names."""
    return m.proj(x).softmax(-1).gather(-1, labels.clamp(min=0)[..., None]) * x.sum(-1, keepdim=True)


def attended(m, x, labels):
    scores = (m.proj(x) @ m.embed.weight @ x.transpose(1, 2)).softmax(-1)
    return scores @ x


def of_a_layer(m, x, labels):
    """No linear's logits."""
    return F.cross_entropy(m.proj(x).relu().flatten(0, 1), labels.flatten())


def mean_square(m, x, labels):
    return F.mse_loss(m.proj(x).tanh() * 3, x.repeat(1, 1, 2)[..., :WORDS])


@pytest.mark.parametrize(
    "body", [logits_alone, routed, routed_to_one, routed_to_several, routed_by_hash, attended, of_a_layer,
             mean_square], ids=lambda f: f.__name__,
)
def test_says_nothing(body):
    frames = check(*build(body))
    assert not frames.counts[NAME] and not frames.tags(NAME)
