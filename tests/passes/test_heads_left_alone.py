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
    needs_equal_counts,
    one_hot_by_scatter,
)
from tests.frames import check_graph, run

from .conditions import cases, sampled, shown
from .contract import assert_fires, assert_refused

NAME = "linear_cross_entropy"


def loss_of(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def chosen(t, labels):
    """The entries at the labels, with a dimension of 1."""
    return t.gather(-1, labels.clamp(min=0)[..., None])


def teacher(m, x):
    """Another distribution of words."""
    return (x.detach() @ m.embed.weight.detach().T).softmax(-1)


def two_words(labels):
    return torch.stack([labels, labels.roll(1)], -1).clamp(min=0)


def beside(read):
    """A loss, and what `read(logits, labels)` makes of its logits."""

    def body(m, x, labels):
        logits = m.proj(x)
        return loss_of(logits, labels), read(logits, labels)

    return body


kept = beside(lambda logits, labels: logits)
accuracy = beside(lambda logits, labels: (logits.argmax(-1) == labels).sum())


def scaled_by_itself(m, x, labels):
    logits = m.proj(x)
    return loss_of(logits / logits.mean(), labels)


def minus(read, cap=lambda z: z):
    """The mean log-probability of labels, less what `read` makes of all log-probabilities."""

    def body(m, x, labels):
        logp = cap(m.proj(x)).log_softmax(-1)
        return chosen(logp, labels).mean() - read(logp)

    return body


def several_words_by_hand(m, x, labels):
    logits = m.proj(x)
    return (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, two_words(labels))).mean()


def half_without_gradients(m, x, labels):
    with torch.no_grad():
        logits = m.proj(x)
    return loss_of(logits, labels) * x.sum()


NEAR_MISSES = {
    "logits-kept": {
        "kept": kept, "accuracy": accuracy, "scaled_by_itself": scaled_by_itself,
        "entropy": minus(lambda logp: (logp.exp() * logp).sum(-1).mean()),
        "last_logits": beside(lambda logits, labels: logits[:, -1]),
        # of capped logits a mean over words is made of all of them
        "smoothed_behind_a_softcap": minus(lambda logp: 0.1 * logp.mean(-1).mean(), lambda z: 5 * torch.tanh(z / 5)),
        "mean_of_everything": minus(lambda logp: 0.1 * logp.mean()),
    },
    "class-weights": {"": lambda m, x, labels: loss_of(m.proj(x), labels, weight=m.embed.weight[:, 0].exp().detach())},
    "soft-targets": {
        "probabilities": lambda m, x, labels: F.cross_entropy(
            m.proj(x).flatten(0, 1), m.embed(labels.clamp(min=0)).softmax(-1).flatten(0, 1) @ m.embed.weight.T
        ),
        "distilled": lambda m, x, labels: -(teacher(m, x) * m.proj(x).log_softmax(-1)).sum(-1).mean(),
        "divergence": lambda m, x, labels: F.kl_div(
            F.log_softmax(m.proj(x) / 2, -1), teacher(m, x), reduction="batchmean"
        ),
    },
    "several-targets": {
        "of_log_softmax": lambda m, x, labels: m.proj(x).log_softmax(-1).gather(-1, two_words(labels)).mean(),
        "by_hand": several_words_by_hand,
    },
    "dtype": {"in_double": lambda m, x, labels: loss_of(m.proj(x).double(), labels)},
    "region": {"half_without_gradients": half_without_gradients},
}


@cases(NEAR_MISSES, 3)
def test_refuses(tag, body):
    assert_refused(NAME, tag, *build(body))


def test_refuses_labels_that_may_be_fewer():
    """Of lengths that vary by themselves, as nothing here says that they are one."""
    module, args = build(one_hot_by_scatter)
    for t in args:
        torch._dynamo.mark_dynamic(t, 1)
    assert_refused(NAME, "rows", module, args, dynamo=True)


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


@sampled(3, "body", [by_two_masks, losses_of_masked_rows, log_probabilities_of_masked_rows], ids=shown)
def test_refuses_rows_of_unknown_number(body):
    if body is by_two_masks:
        needs_equal_counts()
    assert "masked_fill" in assert_refused(NAME, "rows", *build(body), dynamo=True).misses[0].reason


def temperature_of_rows(m, x, labels):
    """Of each row's log-probability, not its loss."""
    return -chosen((m.proj(x) / length_of(x)).float().log_softmax(-1), labels).mean()


def length_of(x):
    return x.detach().norm(dim=-1, keepdim=True)


def learned_cap(m, x, labels):
    logits = torch.tanh(m.proj(x)).float() * m.temperature
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())


def words_filled(m, x, labels):
    logits = m.proj(x)
    logits[..., WORDS - 2 :] = -1e9
    return loss_of(logits, labels.clamp(max=WORDS - 3))


def masked_words(m, x, labels):
    logits = m.proj(x).masked_fill(torch.arange(WORDS) > WORDS - 3, -1e9)
    return loss_of(logits, labels.clamp(max=WORDS - 3))


def words_of_one_half(m, x, labels):
    logits = F.linear(x, m.embed.weight[1:]).unflatten(-1, (2, -1))
    wanted = labels.flatten().clamp(max=10)
    return sum(F.cross_entropy(logits[..., i, :].flatten(0, 1), wanted) for i in range(2))


def in_place(fill):
    """`fill(logits, indices of words)` writes into logits."""

    def body(m, x, labels):
        logits = m.proj(x)
        fill(logits, torch.tensor([WORDS - 2, WORDS - 1]))
        return loss_of(logits, labels)

    return body


def of_indices(fill):
    return lambda m, x, labels: loss_of(fill(m.proj(x), torch.tensor([WORDS - 2, WORDS - 1])), labels)


def one_word(logits, words):
    logits[..., WORDS - 1] = -1e9


def some_words(logits, words):
    logits[..., words] = -1e9


# How words of the logits are filled.
FILLED = {
    "one_word_in_place": in_place(one_word),
    "some_words_in_place": in_place(some_words),
    "index_fill_in_place": in_place(lambda logits, words: logits.index_fill_(-1, words, -1e9)),
    "select_fill_in_place": in_place(lambda logits, words: logits.select(-1, WORDS - 1).fill_(-1e9)),
    "index_fill": of_indices(lambda logits, words: logits.index_fill(-1, words, -1e9)),
    "scatter": of_indices(lambda logits, words: logits.scatter(-1, words.expand(*logits.shape[:-1], 2), -1e9)),
    "index_copy": of_indices(
        lambda logits, words: logits.index_copy(-1, words, logits.new_full((*logits.shape[:-1], 2), -1e9))
    ),
}


# remedy -> what stands between
BETWEEN = {
    "multiply the hidden states": {
        "temperature_of_rows": temperature_of_rows,
        "scaled_rows": lambda m, x, labels: loss_of(m.proj(x) / length_of(x), labels),
    },
    "softcap": {"bounded": lambda m, x, labels: loss_of(m.proj(x).clamp(-2, 2), labels)},
    "off, `logits[..., :words]`": {"words_filled": words_filled, "masked_words": masked_words, **FILLED},
    "put hidden states together": {
        "in_two": lambda m, x, labels: loss_of(torch.cat([m.proj(part) for part in x.chunk(2, 1)], 1), labels),
    },
    "choose the weight's rows": {"words_of_one_half": words_of_one_half},
    "the weight's rows": {
        "every_other_word": lambda m, x, labels: loss_of(m.proj(x)[..., ::2], labels.clamp(max=WORDS // 2)),
    },
    "multiply the weight": {"scaled_words": lambda m, x, labels: loss_of(m.proj(x) * m.embed.weight[:, 0], labels)},
    "in front of a softcap": {"learned_cap": learned_cap},
    "an element a word": {
        "added_to_words": of_indices(
            lambda logits, words: logits.index_add(-1, words, logits.new_ones(*logits.shape[:-1], 2))
        ),
        "biased_rows": lambda m, x, labels: loss_of(
            m.proj(x) + m.embed(labels.clamp(min=0)) @ m.embed.weight.T, labels
        ),
    },
}


@cases(BETWEEN, 3)
def test_refuses_what_stands_between(tag, body):
    (miss,) = assert_refused(NAME, "between", *build(body)).misses
    assert tag in miss.reason and "stands between the linear and its loss" in miss.reason


def words_of_log_probabilities(m, x, labels):
    """All words are in the denominator."""
    logp = m.proj(x).log_softmax(-1)[..., : WORDS - 2]
    return F.nll_loss(logp.flatten(0, 1), labels.clamp(max=WORDS - 3).flatten())


def numbers_of_other_rows(m, x, labels):
    """Each row's log-probability of the next row's word."""
    logp = m.proj(x).flatten(0, 1).log_softmax(-1)
    rows = torch.arange(1, 1 + labels.numel()) % labels.numel()
    return logp[rows, labels.flatten().clamp(min=0)]


def numbers_across(m, x, labels):
    """Pairs of rows and words."""
    logp = m.proj(x)[:, :2].log_softmax(-1)
    return logp[torch.arange(2), torch.arange(2)[:, None], labels[:, :2].clamp(min=0)]


def less_the_largest(make, dim=-1):
    """What `make(z, labels)` makes of logits less the largest of them."""

    def body(m, x, labels):
        z = m.proj(x)
        return make(z - z.amax(dim, keepdim=True), labels)

    return body


def log_sum_exp_of_the_rest(z, labels):
    """Squared as it is."""
    lse = z.exp().sum(-1).log()
    return lse - chosen(z, labels).squeeze(-1) + 1e-2 * lse.square()


def largest_is_right(m, x, labels):
    """Accuracy."""
    z = m.proj(x)
    largest, best = z.max(-1, keepdim=True)
    z = z - largest
    return z.logsumexp(-1) - chosen(z, labels).squeeze(-1), best == labels[..., None]


def largest_detached_once(m, x, labels):
    """The gradient is another than that of a log-sum-exp."""
    z = m.proj(x)
    largest = z.amax(-1, keepdim=True)
    lse = (z - largest).exp().sum(-1, keepdim=True).log() + largest.detach()
    return (lse - chosen(z, labels)).sum()


def pairs_of_rows(m, x, labels):
    """[t, 1] less [t]."""
    z = m.proj(x)[0]
    z = z - z.amax(-1, keepdim=True)
    return z.logsumexp(-1, keepdim=True) - chosen(z, labels[0]).squeeze(-1)


def log_of_another_sum(m, x, labels):
    logits = m.proj(x)
    return (logits.exp().sum(1, keepdim=True).log() - chosen(logits, labels)).sum()


ALIKE = {
    # along another dimension than the softmax
    "largest_of_rows": less_the_largest(lambda z, labels: z.exp().sum(-1).log() - chosen(z, labels).squeeze(-1), dim=1),
    "log_sum_exp_of_the_rest": less_the_largest(log_sum_exp_of_the_rest),
    "largest_is_right": largest_is_right, "largest_detached_once": largest_detached_once,
    "capped_behind_the_largest": less_the_largest(lambda z, labels: loss_of(torch.tanh(z), labels)),
    "pairs_of_rows": pairs_of_rows,
    "sum_of_both": less_the_largest(lambda z, labels: z.logsumexp(-1) + chosen(z, labels).squeeze(-1)),
    "log_of_another_sum": log_of_another_sum,
    "capped_twice": lambda m, x, labels: loss_of(torch.sigmoid(torch.tanh(m.proj(x)) + 1), labels),
    "words_of_log_probabilities": words_of_log_probabilities, "numbers_across": numbers_across,
    "number_behind_a_log_softmax": lambda m, x, labels: F.nll_loss(
        (m.proj(x).log_softmax(-1) + 0.5).flatten(0, 1), labels.flatten()
    ),
    "numbers_of_other_rows": numbers_of_other_rows,
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_looks_alike_stays(case):
    assert not check_graph(*build(ALIKE[case])).counts[NAME]


def test_refuses_a_number_that_would_be_rounded():
    """In front of a softcap it is a bias, in the linear's dtype; behind all else it is nothing to a loss."""
    half = {"dtype": torch.bfloat16}
    capped = build(lambda m, x, labels: loss_of(torch.tanh(m.proj(x).float() + 0.1), labels), **half)
    assert_refused(NAME, "between", *capped)
    assert_fires(NAME, *build(lambda m, x, labels: loss_of(m.proj(x).float() + 0.1, labels), **half))


def test_refuses_a_bias_that_would_be_rounded():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.bias = nn.Linear(12, WORDS, bias=False), nn.Parameter(torch.randn(WORDS))
            self.proj.to(torch.bfloat16)

        def forward(self, x, labels):
            return loss_of(self.proj(x).float() + self.bias, labels)

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


@pytest.fixture
def on_cuda(monkeypatch):
    """By a device that CPU's tensors are taken to be on; a function that sets the bounds of what is worth it."""
    monkeypatch.setattr(linear_cross_entropy, "SMALL_ON", "cpu")

    def bounds(**values):
        for name, value in values.items():
            monkeypatch.setattr(linear_cross_entropy, name, value)

    return bounds


def test_small_logits_stay_on_cuda(on_cuda):
    module, args = build(flattened)
    assert_refused(NAME, "small", module, args)
    on_cuda(MIN_BYTES=4 * args[1].numel() * WORDS, WEIGHTS=0)
    assert_fires(NAME, module, args)


def test_rows_of_unknown_number_stay_on_cuda(on_cuda):
    """There may be few of them. Traced again with graph breaks they are told."""
    on_cuda(MIN_BYTES=0)
    assert_refused(NAME, "rows", *build(hidden_by_their_labels), dynamo=True)


def test_few_tokens_stay_on_cuda(on_cuda):
    """A weight's gradient kept from forward to backward has to be worth it; where the weight has none, none is kept."""
    on_cuda(MIN_BYTES=0, WEIGHTS=1000)
    module, args = build(flattened)
    assert_refused(NAME, "few-tokens", module, args)
    module.proj.weight.requires_grad_(False)
    assert_fires(NAME, module, args)


@pytest.mark.parametrize(("tokens", "fires"), [(256, False), (330, False), (331, True)])
def test_gradients_take_no_more_than_logits(tokens, fires):
    """A weight of 1 MiB, and 1 KiB of a token's 256 channels beside 4 KiB of its logits, or nearly."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(256, 1024, bias=False)

        def forward(self, x, labels):
            return F.cross_entropy(self.proj(x), labels)

    args = torch.randn(tokens, 256, requires_grad=True), torch.arange(tokens) % 1024
    if fires:
        assert_fires(NAME, Wide(), args)
    else:
        assert_refused(NAME, "few-tokens", Wide(), args)


def two_chunks(m, x, labels):
    return sum(flattened(m, *part) for part in zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True))


def two_checkpointed_chunks(m, x, labels):
    chunks = zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True)
    return sum(checkpoint(flattened, m, *part, use_reentrant=False) for part in chunks)


def two_losses(m, x, labels):
    return sum(loss_of(*part) for part in zip(m.proj(x).chunk(2, 1), labels.chunk(2, 1), strict=True))


@pytest.mark.parametrize(("body", "weights"), [(two_chunks, 1), (two_checkpointed_chunks, 2), (two_losses, 1)],
                         ids=["chunks", "checkpointed", "losses"])
def test_gradients_that_are_kept_are_counted(on_cuda, body, weights):
    """Logits of 6 rows a chunk, and of 12 for two losses of one head, beside a weight of 12 numbers a word."""
    on_cuda(MIN_BYTES=0, WEIGHTS=0.5 / weights)
    assert_fires(NAME, *build(body), 2, dynamo=True)
    on_cuda(WEIGHTS=0.5001 / weights)
    assert_refused(NAME, "few-tokens", *build(body), dynamo=True)


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


def attended(m, x, labels):
    scores = (m.proj(x) @ m.embed.weight @ x.transpose(1, 2)).softmax(-1)
    return scores @ x


SILENT = {
    "logits_alone": lambda m, x, labels: m.proj(x),
    "routed": routed, "routed_to_one": routed_to_one, "routed_to_several": routed_to_several,
    # the score of an expert that a table names
    "routed_by_hash": lambda m, x, labels: chosen(m.proj(x).softmax(-1), labels) * x.sum(-1, keepdim=True),
    "attended": attended,
    # no linear's logits
    "of_a_layer": lambda m, x, labels: loss_of(m.proj(x).relu(), labels),
    "mean_square": lambda m, x, labels: F.mse_loss(m.proj(x).tanh() * 3, x.repeat(1, 1, 2)[..., :WORDS]),
}


@sampled(3, "case", SILENT)
def test_says_nothing(case):
    frames = check_graph(*build(SILENT[case]))
    assert not frames.counts[NAME] and not frames.tags(NAME)
