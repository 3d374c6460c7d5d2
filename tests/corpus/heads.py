"""Output projections and their losses as different authors write them.

A body is a function of a `Head` and of hidden states [2, T, DIM] and labels [2, T]. It returns the loss, a sum of losses,
or what a loss is made of.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile._torch._registry import release

DIM, WORDS, IGNORED = 12, 23, -100
LENGTH = 6


class Head(nn.Module):
    """`body(head, hidden, labels)`. proj and embed: weights of a vocabulary; blocks: layers in front of either."""

    def __init__(self, body, bias: bool = False):
        super().__init__()
        self.body, self.cap = body, 7.3
        self.embed = nn.Embedding(WORDS, DIM)
        self.proj = nn.Linear(DIM, WORDS, bias=bias)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("scale", torch.tensor([1.7]))

    def forward(self, hidden, labels):
        return self.body(self, hidden, labels)


def loss_of(logits, labels, **kwargs):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **kwargs)


def rows_of(logits, labels):
    """The loss of each row, where an ignored label is a word."""
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1).clamp(min=0), reduction="none")


def needs_equal_counts():
    """Skips where torch is too old to trace two boolean indices that choose as many rows as each other."""
    if release(torch.__version__) < (2, 13):
        pytest.skip(f"torch {torch.__version__} cannot trace two boolean indices that choose as many rows as each other")


def build(body, *, bias=False, length=LENGTH, dtype=torch.float32, ignored=True):
    """(module, arguments) of a body; some labels are IGNORED unless the body takes each for a word."""
    if body in (hidden_by_their_labels, masked_shifted):
        needs_equal_counts()
    head = Head(body, bias).to(dtype)
    return head, arguments(length, dtype, ignored and body not in WITHOUT_IGNORED.values())


def arguments(length=LENGTH, dtype=torch.float32, ignored=True):
    hidden = torch.randn(2, length, DIM).to(dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (2, length))
    if ignored:
        labels[0, 1] = labels[1, -1] = IGNORED
    return hidden, labels


def flattened(m, x, labels):
    return loss_of(m.proj(x), labels)


def rows_of_batches(m, x, labels):
    """[t, b, ...], as Megatron has it."""
    logits = m.proj(x.transpose(0, 1).contiguous())
    return F.cross_entropy(logits.transpose(0, 1).contiguous().view(-1, WORDS), labels.reshape(-1))


def shifted_logits(m, x, labels):
    """transformers, until 4.46."""
    logits = m.proj(x).float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    loss_fct = nn.CrossEntropyLoss()
    return loss_fct(shift_logits.view(-1, WORDS), shift_labels.view(-1).to(shift_logits.device))


def shifted_labels(m, x, labels):
    """transformers' ForCausalLMLoss."""
    logits = m.proj(x).float()
    labels = F.pad(labels, (0, 1), value=IGNORED)
    shift_labels = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), shift_labels.view(-1), ignore_index=IGNORED, reduction="mean")


def per_items(m, x, labels):
    """transformers' with num_items_in_batch."""
    logits, items = m.proj(x).float(), (labels != IGNORED).sum()
    labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), ignore_index=IGNORED, reduction="sum") / items


def another_ignore_index(m, x, labels):
    labels = labels.masked_fill(labels == IGNORED, 0)
    return loss_of(m.proj(x), labels, ignore_index=0)


def smoothed_and_shifted(m, x, labels):
    logits = m.proj(x)[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, labels[:, 1:], label_smoothing=0.2, reduction="sum")


def smoothed_by_hand(m, x, labels):
    """timm's, of rows that count."""
    logp = m.proj(x).view(-1, WORDS).log_softmax(-1)
    counted = labels.view(-1) != IGNORED
    wanted = -logp.gather(1, labels.view(-1, 1).clamp(min=0)).squeeze(1)[counted]
    return (0.9 * wanted + 0.1 * -logp.mean(dim=-1)[counted]).mean()


def smoothed_by_sums(m, x, labels):
    """transformers' LabelSmoother and fairseq's, of scaled logits with a bias."""
    logits = (m.proj(x) * 0.7 + m.embed.weight[:, 0])[..., :-1, :].contiguous()
    wanted = labels[..., 1:].unsqueeze(-1)
    logp, ignored = -F.log_softmax(logits, dim=-1), wanted.eq(IGNORED)
    loss = logp.gather(dim=-1, index=wanted.clamp(min=0)).masked_fill_(ignored, 0.0)
    others = logp.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill_(ignored, 0.0)
    count = ignored.numel() - ignored.sum()
    return 0.8 * loss.sum() / count + 0.2 * others.sum() / (count * WORDS)


def smoothed_logits(m, x, labels):
    """Means and sums of logits themselves, to which a number was added."""
    logits = 1.5 - m.proj(x)[..., 2:]
    loss = logits.logsumexp(-1) - logits.gather(-1, labels.clamp(0, WORDS - 3)[..., None]).squeeze(-1)
    return loss + 0.1 * (logits.logsumexp(-1) - logits.mean(-1)) + 1e-3 * logits.sum(2)


def nll_of_log_softmax_in_float(m, x, labels):
    logp = F.log_softmax(m.proj(x).flatten(0, 1), dim=-1, dtype=torch.float32)
    return F.nll_loss(logp, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def masked_rows(m, x, labels):
    """Labels that count, by their places."""
    rows = torch.arange(0, 2 * x.shape[1], 2)
    return F.cross_entropy(m.proj(x).flatten(0, 1)[rows], labels.flatten()[rows])


def sum_over_size(m, x, labels):
    """A mean by hand, over sizes of logits."""
    logits = m.proj(x)[:, 1:]
    batch, length, words = logits.shape
    loss = F.cross_entropy(logits.reshape(batch * length, words), labels[:, 1:].reshape(-1), reduction="sum")
    return loss / (batch * length)


def addmm(m, x, labels):
    logits = torch.addmm(m.embed.weight[:, 0], x.flatten(0, 1), m.embed.weight.t())
    return F.cross_entropy(logits, labels.flatten())


def each_row(m, x, labels):
    return loss_of(m.proj(x), labels, reduction="none")


def z_loss(m, x, labels):
    """PaLM's, by hand."""
    logits = m.proj(x)
    return loss_of(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def z_loss_of_rows(m, x, labels):
    logits = m.proj(x).float().view(-1, WORDS)
    loss = F.cross_entropy(logits, labels.view(-1), reduction="none")
    counted = labels.view(-1) != IGNORED
    return ((loss + 1e-2 * torch.logsumexp(logits, dim=-1) ** 2) * counted).sum() / counted.sum()


# --- scales and biases that are tensors


def scaled_by_a_buffer(m, x, labels):
    """And a softcap of what is scaled."""
    logits = 5 * torch.tanh(m.proj(x).view(-1, WORDS) / m.scale / 5)
    return F.cross_entropy(logits, labels.view(-1), label_smoothing=0.1)


def bias_behind_a_scale(m, x, labels):
    """Scaled before and behind, by a number and by a tensor."""
    logits = (0.5 * m.proj(x) * m.temperature - m.embed.weight[:, 1, None].T) * m.scale
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="sum")


# --- words and numbers


def padded_words(m, x, labels):
    """nanochat's and OLMo's: rows of the weight that are no words, cut off behind the GEMM."""
    logits = m.proj(x)[..., : WORDS - 3].float()
    logits = 6 * torch.tanh(logits / 6)
    return F.cross_entropy(logits.view(-1, WORDS - 3), labels.view(-1).clamp(max=WORDS - 4), ignore_index=IGNORED)


def later_words(m, x, labels):
    """Between a temperature and a bias of the words that are left."""
    logits = (m.proj(x) * m.temperature)[..., 4:].transpose(1, 2) + m.embed.weight[4:, :1]
    return F.cross_entropy(logits, labels.clamp(max=WORDS - 5), label_smoothing=0.1, reduction="none")


def words_in_two_parts(m, x, labels):
    """A loss of each."""
    logits, wanted = m.proj(x).view(-1, WORDS), labels.view(-1).clamp(max=9)
    return F.cross_entropy(logits[:, :10], wanted) + 0.5 * F.cross_entropy(logits[:, 10:], wanted)


def capped_by_a_sigmoid(m, x, labels):
    """modded-nanogpt's, with a number in front."""
    logits = 9 * torch.sigmoid((m.proj(x).float() + 2) / 3.5)
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="sum")


def numbers_added(m, x, labels):
    """Which the log-sum-exp has, and a log-probability has not."""
    logits = 1.5 - (m.proj(x) - 0.25) * m.scale
    logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return logp.squeeze(-1) + 1e-2 * logits.logsumexp(-1).square()


# --- rows that a mask chooses


def masked_logits(m, x, labels):
    counted = labels != IGNORED
    return F.cross_entropy(m.proj(x)[counted], labels[counted])


def hidden_by_their_labels(m, x, labels):
    """torchtune's and ModernBERT's: rows that count, in front of the GEMM. How many is known at run time only."""
    return F.cross_entropy(m.proj(x[labels != IGNORED]), labels[labels != IGNORED])


def hidden_by_places(m, x, labels):
    """Of a vocabulary that was padded."""
    places = (labels.flatten() != IGNORED).nonzero().squeeze(1)
    logits = m.proj(x.flatten(0, 1)[places])[:, : WORDS - 2].float()
    return F.cross_entropy(logits, labels.flatten()[places].clamp(max=WORDS - 3), reduction="sum")


def masked_shifted(m, x, labels):
    """Each mask by itself."""
    logits = m.proj(x)[:, :-1].flatten(0, 1).float()
    labels = labels[:, 1:].flatten()
    return F.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED], reduction="sum")


def masked_mean_of_rows(m, x, labels):
    """A mean over all that are chosen, of which some are ignored."""
    chosen = labels.roll(1, 1) != IGNORED
    loss = F.cross_entropy(m.proj(x)[chosen].float().view(-1, WORDS), labels[chosen].view(-1), reduction="none")
    return loss.mean()


# --- sums of what rows count for


def masked_sum(m, x, labels):
    """nanotron's and Megatron's: a mask of the loss, per token of those that count."""
    loss = rows_of(m.proj(x).float(), labels)
    mask = (labels != IGNORED).view(-1)
    return (loss * mask).sum() / mask.sum()


def weighted_log_probabilities(m, x, labels):
    """Advantages times log-probabilities: the policy's gradient."""
    logp = m.proj(x)[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    advantages = torch.arange(1.0, 1 + labels[:, 1:].numel()).view(2, -1) / 7
    mask = (labels[:, 1:] != IGNORED).float()
    return -(logp * advantages * mask).sum() / mask.sum()


def mean_of_chosen_losses(m, x, labels):
    loss = F.cross_entropy(m.proj(x).transpose(1, 2), labels.clamp(min=0), reduction="none")
    return loss[labels != IGNORED].mean()


def sum_of_selected_losses(m, x, labels):
    loss = rows_of(m.proj(x), labels)
    return torch.masked_select(loss, labels.view(-1) > 4).sum() / 3


def losses_where(m, x, labels):
    loss = rows_of(m.proj(x), labels)
    counted = labels.view(-1) != IGNORED
    return torch.where(counted, loss, 0).sum() / counted.sum()


def losses_but_where(m, x, labels):
    loss = rows_of(m.proj(x), labels)
    ignored = labels == IGNORED
    return loss.view_as(labels).masked_fill(ignored, 0.0).mean(-1).mean()


def weighted_positions(m, x, labels):
    """A weight for each position, and one for each sequence; the sum over one dimension after the other."""
    loss = F.cross_entropy(m.proj(x).transpose(1, 2), labels, reduction="none")
    loss = loss * torch.linspace(0.5, 2, labels.shape[1]) * torch.tensor([[1.0], [3.0]])
    return loss.sum(1).sum(0) / 5


def dot_with_weights(m, x, labels):
    loss = F.cross_entropy(m.proj(x).view(-1, WORDS), labels.view(-1), reduction="none")
    return torch.dot(loss, labels.view(-1).to(loss.dtype))


def several_heads(m, x, labels):
    """Multi-token prediction: several losses of one vocabulary."""
    losses = []
    for i, block in enumerate(m.blocks):
        logits = m.proj(block(x))
        losses.append(F.cross_entropy(logits[:, : -(i + 1)].flatten(0, 1), labels[:, i + 1 :].flatten()))
    return losses[0] + 0.3 * losses[1]


def in_chunks(m, x, labels):
    """The loss of two parts of a sequence, each by itself."""
    chunks = zip(m.proj(x).chunk(2, dim=1), labels.chunk(2, dim=1), strict=True)
    total = [F.cross_entropy(c.flatten(0, 1), part.flatten(), reduction="sum") for c, part in chunks]
    return sum(total) / (labels != IGNORED).sum()


def in_a_sum_of_their_dtype(m, x, labels):
    """Zeros made from logits, which the losses of parts are added to."""
    logits, wanted = m.proj(x).view(-1, WORDS), labels.view(-1)
    total = logits.new_zeros((), dtype=torch.float32)
    for i in range(0, 2 * LENGTH, 8):
        total = total + F.cross_entropy(logits[i : i + 8].float(), wanted[i : i + 8], reduction="sum")
    return total / wanted.numel()


# --- log-probabilities of words, as reinforcement learning and distillation have them; every label is a word


def negative_log_probabilities(m, x, labels):
    logp = -F.log_softmax(m.proj(x[:, :-1]).float() / 0.7, dim=2)
    return torch.gather(logp, 2, labels[:, 1:, None])[..., 0]


def by_subtraction(m, x, labels):
    """The softmax's denominator by hand."""
    logits = m.proj(x)
    logp = logits - logits.logsumexp(-1, keepdim=True)
    return logp.gather(-1, labels[..., None]).exp()


def by_subtraction_with_a_dimension(m, x, labels):
    logits = m.proj(x)
    return (logits - logits.logsumexp(-1).unsqueeze(-1)).gather(-1, labels[..., None])


def by_hand(m, x, labels):
    """Without the largest logit."""
    z = m.proj(x)
    z = z - z.max(dim=-1, keepdim=True).values
    return (z.exp().sum(-1).log() - z.gather(-1, labels[..., None]).squeeze(-1)).mean()


def by_hand_with_a_dimension(m, x, labels):
    """At a temperature, of log-softmaxes."""
    z = m.proj(x)
    z = (z - z.amax(-1, keepdim=True).detach()) / 0.7
    logp = z - torch.log(torch.sum(torch.exp(z), dim=-1, keepdim=True))
    return -torch.gather(logp, -1, labels.unsqueeze(-1))


def by_hand_with_the_largest_again(m, x, labels):
    """Each row's loss and a z-loss."""
    logits = m.proj(x).flatten(0, 1)
    largest = logits.max(dim=1)[0]
    lse = largest + (logits - largest[:, None]).exp().sum(1).log()
    return -logits[torch.arange(lse.shape[0]), labels.flatten()] + lse + 1e-2 * lse**2


def by_hand_as_it_is(m, x, labels):
    logits = m.proj(x)
    return torch.exp(logits).sum(dim=2).log() - logits.gather(-1, labels[..., None])[..., 0]


def by_hand_negated(m, x, labels):
    """With `logsumexp` of what is left."""
    z = m.proj(x).view(-1, WORDS)
    z = z - torch.max(z, -1, keepdim=True)[0]
    return -z[torch.arange(labels.numel()), labels.view(-1)] + torch.logsumexp(z, 1)


def by_numbers_of_sequences_and_rows(m, x, labels):
    logp = m.proj(x).log_softmax(-1)
    batch, length = labels.shape
    return logp[torch.arange(batch)[:, None], torch.arange(length), labels]


def by_numbers_of_rows(m, x, labels):
    logp = m.proj(x).flatten(0, 1).log_softmax(-1)
    return -logp[torch.arange(logp.shape[0]), labels.flatten()]


def selective_log_softmax(m, x, labels):
    """TRL's of float32: one sequence's log-sum-exp after the other."""
    logits = m.proj(x)[:, :-1] / 0.9
    index = labels[:, 1:]
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(one, dim=-1) for one in logits])


def selective_log_softmax_of_halves(m, x, labels):
    """TRL's of bfloat16."""
    found = []
    for row, index in zip(m.proj(x), labels, strict=True):
        found.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=index.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found)


def policy_gradient(m, x, labels):
    """A clipped ratio to what the words' probabilities were."""
    logp = m.proj(x).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logp - logp.detach().mul(0.9))
    return -torch.min(ratio * x.detach().mean(-1), ratio.clamp(0.8, 1.2)).mean()


def chosen_and_rejected(m, x, labels):
    """Preferences: two halves of a batch."""
    logp = m.proj(x).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).sum(-1)
    chosen, rejected = logp.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def one_hot_sum(m, x, labels):
    logp = F.log_softmax(m.proj(x).float().view(-1, WORDS), dim=-1)
    return (-F.one_hot(labels.view(-1), WORDS) * logp).sum() / labels.numel()


def one_hot_by_scatter(m, x, labels):
    logp = F.log_softmax(m.proj(x), dim=-1)
    hot = torch.zeros_like(logp).scatter_(-1, labels.unsqueeze(-1), 1)
    return -(logp * hot).sum(dim=2).mean()


def one_hot_of_logits(m, x, labels):
    """Megatron's: the label's logit."""
    logits = m.proj(x)
    return logits.logsumexp(-1) - (logits * F.one_hot(labels, WORDS)).sum(-1)


def one_hot_probabilities(m, x, labels):
    hot = F.one_hot(labels.flatten(), WORDS).to(x.dtype)
    return F.cross_entropy(m.proj(x).flatten(0, 1), hot, label_smoothing=0.2)


# --- in one expression

WITH_IGNORED_IN_ONE = {
    "in_float": lambda m, x, y: F.cross_entropy(m.proj(x).float().view(-1, WORDS), y.view(-1), ignore_index=IGNORED),
    # [b, v, t], as cross entropy has it
    "words_second": lambda m, x, y: F.cross_entropy(m.proj(x).transpose(1, 2), y),
    "words_second_by_permute": lambda m, x, y: nn.CrossEntropyLoss(reduction="sum")(m.proj(x).permute(0, 2, 1), y),
    # Images do so: [b, v, t1, t2] -> [b, v, t]
    "words_second_then_flat": (
        lambda m, x, y: F.cross_entropy(m.proj(x.unflatten(1, (2, -1))).movedim(-1, 1).reshape(2, WORDS, -1), y)),
    "tied": lambda m, x, y: loss_of(F.linear(x + m.embed(y.clamp(min=0)), m.embed.weight), y),
    "matmul": lambda m, x, y: loss_of(x @ m.embed.weight.T, y),
    "einsum": lambda m, x, y: loss_of(torch.einsum("btd,vd->btv", x, m.embed.weight), y),
    # gemma's
    "softcapped": lambda m, x, y: loss_of(torch.tanh(m.proj(x) / 3.0) * 3.0, y),
    # nanochat's, with a temperature behind it
    "softcapped_the_other_way": lambda m, x, y: loss_of(15 * torch.tanh(0.2 * m.proj(x).float()) / 0.7, y),
    # granite's and cohere's
    "scaled": (
        lambda m, x, y: F.cross_entropy((m.proj(x) / 4.0 * 0.5).flatten(0, 1), y.flatten(), reduction="sum") / 11),
    "smoothed": lambda m, x, y: loss_of(m.proj(x), y, label_smoothing=0.1),
    "nll": lambda m, x, y: F.nll_loss(F.log_softmax(m.proj(x), -1).view(-1, WORDS), y.view(-1)),
    "nll_of_words_second": lambda m, x, y: F.nll_loss(m.proj(x).log_softmax(-1).transpose(1, 2), y, reduction="none"),
    # Hidden states sliced before the head
    "last_positions": lambda m, x, y: F.cross_entropy(m.proj(x[:, -3:]).flatten(0, 1), y[:, -3:].flatten()),
    "one_sequence": lambda m, x, y: F.cross_entropy(m.proj(x)[1], y[1]),
    "one_token": lambda m, x, y: F.cross_entropy(m.proj(x[0, 0]), y[0, 0]),
    # [DIM, WORDS]
    "weight_by_words": lambda m, x, y: loss_of(x @ m.embed.weight.t().contiguous(), y),
    "no_tokens": lambda m, x, y: F.cross_entropy(m.proj(x[:, :0]).flatten(0, 1), y[:, :0].flatten(), reduction="sum"),
    # A number that `dynamic=True` makes an input
    "cap_of_the_model": lambda m, x, y: loss_of(torch.tanh(m.proj(x) / m.cap) * m.cap, y),
    "each_row_of_words_second": (
        lambda m, x, y: F.cross_entropy(m.proj(x).transpose(1, 2), y, reduction="none", label_smoothing=0.1)),
    # CLIP's
    "learned_temperature": lambda m, x, y: loss_of(m.proj(x) * m.temperature.exp(), y),
    # A number of the data's
    "scaled_by_an_input": (
        lambda m, x, y: F.cross_entropy(m.proj(x).transpose(1, 2) / y.max().add(1).sqrt(), y, reduction="none")),
    "bias_behind": lambda m, x, y: loss_of(F.linear(x, m.embed.weight) + m.embed.weight[:, 0], y),
    "bias_of_words_second": lambda m, x, y: F.cross_entropy(m.proj(x).transpose(1, 2) + m.embed.weight[:, :1], y),
    # Ignored rows count in the mean, as zeros
    "mean_of_rows": lambda m, x, y: loss_of(m.proj(x), y, reduction="none").mean(),
    "mean_of_log_probabilities": (
        lambda m, x, y: -1.5 * m.proj(x).log_softmax(-1).gather(2, y.clamp(min=0)[..., None]).mean()),
}  # fmt: skip
WITHOUT_IGNORED_IN_ONE = {
    "log_probabilities": lambda m, x, y: m.proj(x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1),
    "by_log_of_softmax": (
        lambda m, x, y: torch.log(F.softmax(m.proj(x).view(-1, WORDS), dim=-1)).gather(1, y.view(-1, 1)).mean()),
    # And a probability that is kept from zero
    "log_of_chosen_softmax": (
        lambda m, x, y: -(torch.gather(m.proj(x).softmax(-1), -1, y.unsqueeze(-1)).squeeze(-1) + 1e-8).log().mean()),
    "one_hot": lambda m, x, y: -(F.one_hot(y, WORDS).to(x.dtype) * m.proj(x).log_softmax(-1)).sum(-1),
    # A policy's log-probabilities of what it did
    # Dynamo switches the checks of arguments off, which branch on data, once it is first used.
    "categorical": lambda m, x, y: torch.distributions.Categorical(logits=m.proj(x) / 0.8, validate_args=False).log_prob(y),
}  # fmt: skip
for _name, _body in (WITH_IGNORED_IN_ONE | WITHOUT_IGNORED_IN_ONE).items():
    _body.__name__ = _name

# Spelling -> how often the pass fires.
WITH_IGNORED = dict.fromkeys((
    flattened, rows_of_batches, shifted_logits, shifted_labels, per_items, another_ignore_index, smoothed_and_shifted,
    nll_of_log_softmax_in_float, masked_rows, each_row, z_loss, z_loss_of_rows, addmm, sum_over_size, masked_sum,
    weighted_log_probabilities, scaled_by_a_buffer, bias_behind_a_scale, masked_logits, masked_shifted,
    masked_mean_of_rows, padded_words, later_words, capped_by_a_sigmoid, numbers_added, mean_of_chosen_losses,
    sum_of_selected_losses, losses_where, losses_but_where, weighted_positions, dot_with_weights, smoothed_by_hand,
    smoothed_by_sums, smoothed_logits, hidden_by_their_labels, hidden_by_places,
    *WITH_IGNORED_IN_ONE.values(),
), 1) | {several_heads: 2, in_chunks: 2, words_in_two_parts: 2, in_a_sum_of_their_dtype: 2}  # fmt: skip
WITHOUT_IGNORED = {f.__name__: f for f in (
    negative_log_probabilities, by_subtraction, by_numbers_of_rows, by_hand, by_hand_with_a_dimension,
    by_hand_with_the_largest_again, by_hand_as_it_is, by_hand_negated, by_subtraction_with_a_dimension,
    by_numbers_of_sequences_and_rows, selective_log_softmax, selective_log_softmax_of_halves, policy_gradient,
    chosen_and_rejected, one_hot_sum, one_hot_by_scatter, one_hot_of_logits, one_hot_probabilities,
)} | WITHOUT_IGNORED_IN_ONE  # fmt: skip
SPELLINGS = WITH_IGNORED | dict.fromkeys(WITHOUT_IGNORED.values(), 1)
