"""Attention that is written out: found in its spellings, with the masks it has, and refused for every reason there is."""

from __future__ import annotations

import dataclasses
import math

import expecttest
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile.passes import attention
from tests.frames import TOLERANCE, check_graph, largest_error, render, train
from tests.remat.steps import without_code
from tests.seeds import Draws

from .conditions import conditions, op_of
from .contract import assert_autocast, assert_dynamic, assert_fires, assert_refused

NAME = "attention"
B, H, T, D, S = 2, 4, 6, 8, 9
INF = float("-inf")
LOW = torch.finfo(torch.float32).min
draw = Draws(__name__)


class Block(nn.Module):
    """Projections of queries, keys and values, of `groups` heads of the latter two, and `body(module, q, k, v)`."""

    def __init__(self, body, groups=H):
        super().__init__()
        self.body, self.groups = body, groups
        # Keys without a bias, whose gradient is a zero that is all rounding.
        self.q, self.k = nn.Linear(12, H * D), nn.Linear(12, groups * D, bias=False)
        self.v = nn.Linear(12, groups * D)
        self.latents = nn.Parameter(draw(3, D))
        self.bias, self.sinks = nn.Parameter(draw(H, T, T)), nn.Parameter(draw(H))
        self.register_buffer("triangle", torch.ones(9, 9, dtype=torch.bool).tril()[None, None])

    def forward(self, x, *more):
        q, k, v = (
            proj(x).view(*x.shape[:2], heads, D).transpose(1, 2)
            for proj, heads in ((self.q, H), (self.k, self.groups), (self.v, self.groups))
        )
        return self.body(self, q, k, v, *more)


def block(body, *more, groups=H):
    torch.manual_seed(0)
    return Block(body, groups), (draw(B, T, 12).requires_grad_(), *more)


def places(q, k):
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def scored(q, k):
    return q @ k.transpose(-1, -2) * D**-0.5


def causal(q, k):
    i, j = places(q, k)
    return j <= i


def plain(m, q, k, v):
    return scored(q, k).masked_fill(~causal(q, k), INF).softmax(-1) @ v


def repeated(x, times=2):
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, times, t, d).reshape(b, h * times, t, d)


def hugging_face(m, q, k, v):
    mask = torch.where(causal(q, k)[None, None], 0.0, LOW)
    weights = torch.matmul(q, repeated(k).transpose(2, 3)) * D**-0.5 + mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, p=0.0, training=m.training)
    return torch.matmul(weights, repeated(v)).transpose(1, 2).contiguous().flatten(2)


def gpt_oss(m, q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    i, j = places(q, k)
    scores = scored(q, k).masked_fill(~((j <= i) & (i - j < 3)), INF)
    scores = torch.cat([scores, m.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return (scores - scores.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


def widened(m, q, k, v):
    """Scores in a wider dtype: keys are cast behind what repeats them."""
    k, v = repeated(k), repeated(v)
    scores = (q.double() @ k.double().transpose(2, 3) * D**-0.5).masked_fill(~causal(q, k), INF)
    scores = torch.cat([scores, m.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1].to(v.dtype) @ v


def sinks_of_rows(m, q, k, v):
    """A logit that each token's head has of its own, as by a linear of the hidden states."""
    k, v = repeated(k), repeated(v)
    scores = scored(q, k).masked_fill(~causal(q, k), INF)
    return torch.cat([scores, q[..., :1] * 2], -1).softmax(-1)[..., :-1] @ v


def sinks_of_tokens(m, q, k, v):
    """And that heads share."""
    sinks = q[..., 0].mean(1)[:, None, :, None].expand(-1, H, -1, -1)
    return torch.cat([scored(q, k) + m.bias, sinks], -1).softmax(-1)[..., :-1] @ v


def transposed_wider(m, q, k, v):
    """GPT-J's: keys are cast first and transposed then, in one more dtype than the products with values."""
    k = k.double().transpose(-1, -2)
    scores = (q.double() @ k * D**-0.5).masked_fill(~causal(q, k.mT), INF)
    return scores.softmax(-1).to(v.dtype) @ v


def times_flags(m, q, k, v):
    """GPT-1's and GPT-2's first: scores times flags, and a number where these are 0."""
    b = torch.ones(q.shape[2], k.shape[2]).tril()
    return (scored(q, k) * b - 1e10 * (1 - b)).softmax(-1) @ v


def times_flags_and_more(m, q, k, v, seen):
    """The same with a number that leaves weight, of flags that are handed in."""
    seen = seen[:, None, None].float()
    return (seen * scored(q, k) + -1e4 * (1 - seen)).softmax(-1) @ v


def sinks_first(m, q, k, v):
    sinks = m.sinks[None, :, None, None].expand(q.shape[0], H, q.shape[2], 1)
    return torch.cat([sinks, scored(q, k)], -1).softmax(-1)[..., 1:] @ v


def gemma(m, q, k, v):
    scores = torch.tanh(scored(q, k) / 50) * 50
    return torch.where(causal(q, k), scores, torch.tensor(LOW)).softmax(-1) @ v


def batched(m, q, k, v):
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T) / math.sqrt(D)
    weights = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), INF).softmax(-1)
    return torch.bmm(weights.view(B * H, T, T), v).view(B, H, T, D)


def baddbmm(m, q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    alibi = (m.sinks[:, None, None] * torch.arange(T)).repeat(B, 1, 1)
    return torch.baddbmm(alibi, q, k.mT, beta=1.0, alpha=0.3).softmax(-1) @ v


def by_hand(m, q, k, v):
    scores = scored(q, k)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True)) @ v


def softmax1(m, q, k, v):
    powers = torch.exp(scored(q, k))
    return (powers / (powers.sum(-1, keepdim=True) + 1)) @ v


# Exponentials normalised by hand: before the product with the values, or behind it.
NORMALISED = {
    "behind": lambda e, total, v: (e @ v) / total(True),
    "behind_by_the_reciprocal": lambda e, total, v: (e @ v) * (1 / total(True)),
    "by_the_reciprocal": lambda e, total, v: (e * total(True).reciprocal()) @ v,
    "by_a_sum_with_a_dimension_more": lambda e, total, v: (e / total(False)[..., None]) @ v,
    "by_a_view_of_a_sum": lambda e, total, v: (e / total(False).view(B, H, T, 1)) @ v,
    "behind_with_1_more": lambda e, total, v: (e @ v) / (1 + total(True)),
}


def normalised(how, most=False):
    def body(m, q, k, v):
        s = scored(q, k).masked_fill(~causal(q, k), INF)
        e = torch.exp(s - s.max(-1)[0].unsqueeze(-1).detach() if most else s)
        return NORMALISED[how](e, lambda keep: e.sum(-1, keepdim=keep), v)

    return body


def less_the_logarithm(m, q, k, v):
    s = scored(q, k)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


LOG2_E = math.log2(math.e)


def powers_of_2(m, q, k, v):
    e = torch.exp2(scored(q, k))
    return (e / e.sum(-1, keepdim=True)) @ v


def masked_powers_of_2(m, q, k, v):
    """As kernels have it: scores in base 2, less the largest, normalised behind the values."""
    s = (q @ k.mT * (D**-0.5 * LOG2_E)).masked_fill(~causal(q, k), INF)
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


def softmax1_of_2(m, q, k, v):
    e = torch.exp2(scored(q, k) * LOG2_E)
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def capped_powers_of_2(m, q, k, v):
    s = (torch.tanh(scored(q, k) / 20) * 20 + m.bias).masked_fill(~causal(q, k), INF) * LOG2_E
    e = torch.exp2(s - s.max(-1)[0].unsqueeze(-1).detach())
    return (e / e.sum(-1)[..., None]) @ v


def less_base_2(x):
    m = x.max(-1, keepdim=True).values
    return torch.exp2(x - (torch.log2(torch.exp2(x - m).sum(-1, keepdim=True)) + m))


def less_base_e(x):
    m = x.amax(-1, keepdim=True).detach()
    return torch.exp(x - (m + (x - m).exp().sum(-1, keepdim=True).log()))


# The logarithm of a sum taken off, in base 2 or e.
LOGARITHMS = {
    "base_2": lambda s: (lambda x: torch.exp2(x - x.exp2().sum(-1).log2()[..., None]))(s * LOG2_E),
    "base_2_and_the_maximum": lambda s: less_base_2(s * LOG2_E),
    "logsumexp": lambda s: torch.exp2(s * LOG2_E - s.logsumexp(-1, keepdim=True) * LOG2_E),
    "the_difference": lambda s: torch.exp2((s - s.logsumexp(-1, keepdim=True)) * LOG2_E),
    "log_softmax": lambda s: torch.exp2(torch.log_softmax(s, -1) * LOG2_E),
    "base_e": lambda s: torch.exp(s - s.exp().sum(-1, keepdim=True).log()),
    "base_e_and_the_maximum": less_base_e,
}


def less_logarithm(how):
    return lambda m, q, k, v: LOGARITHMS[how](scored(q, k).masked_fill(~causal(q, k), INF)) @ v


def log_softmax(m, q, k, v):
    return torch.log_softmax(scored(q, k), -1).exp() @ v


def einsums(m, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bthd,bshd->bhts", q, k) / D**0.5).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)


def groups_of_heads(m, q, k, v):
    weights = torch.einsum("bgrtc,bgsc->bgrts", q.unflatten(1, (2, 2)), k).masked_fill(~causal(q, k), INF).softmax(-1)
    return torch.einsum("bgrts,bgsc->bgrtc", weights, v).flatten(1, 2)


def one_head_of_keys(m, q, k, v):
    return torch.einsum("bhtc,bsc->bhts", q, k[:, 0]).mul(0.3).softmax(-1) @ v


def temperature_of_a_head(m, q, k, v):
    """Of normed queries and keys, as in Swin V2."""
    q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    return (q @ k.mT * m.sinks.exp()[:, None, None]).softmax(-1) @ v


def scaled_by_length(m, q, k, v):
    i, j = places(q, k)
    scores = (i + 1.0).log() * (q @ k.mT) / q.pow(2).mean((0, 2, 3), keepdim=True)
    return scores.masked_fill(j > i, INF).softmax(-1) @ v


def learned_queries(m, q, k, v):
    """The same for all batches, in place of those of tokens; with and without being repeated."""
    return ((m.latents @ k.mT).softmax(-1) @ v).sum(-2, keepdim=True) + q


def learned_queries_repeated(m, q, k, v):
    learned = m.latents.expand(B, H, 3, D)
    return ((learned @ k.mT).softmax(-1) @ v).sum(-2, keepdim=True) + q


def forgetting(m, q, k, v):
    """Decay between query and key, of a gate of each token."""
    along = nn.functional.logsigmoid(k.mean(-1)).cumsum(-1)
    decayed = scored(q, k) + along[..., :, None] - along[..., None, :]
    return decayed.masked_fill(~causal(q, k), INF).softmax(-1) @ v


def t5(m, q, k, v):
    bias = m.bias + torch.full((T, T), LOW).triu(1)
    return (q @ k.transpose(3, 2) + bias).float().softmax(-1).type_as(q) @ v


def prefix(m, q, k, v):
    i, j = places(q, k)
    return scored(q, k).masked_fill(~((j <= i) | (j < 3)), INF).softmax(-1) @ v


def prefixed(mask, fill=INF):
    """By a mask of places and prefixes [B], that says what is seen."""
    def body(m, q, k, v, lengths):
        seen = mask(*places(q, k), lengths[:, None, None, None])
        return scored(q, k).masked_fill(~seen, fill).softmax(-1) @ v

    return body


# Masks of a prefix, and what the op is told.
PREFIXES = {
    "of_each_sequence": (lambda i, j, p: (j <= i) | (j < p), "prefix right 0"),
    "up_to_its_last": (lambda i, j, p: (i >= j) | (j <= p - 1), "prefix right 0"),
    "within_itself": (lambda i, j, p: (j <= i) | ((i < p) & (j < p)), "prefix right 0"),
    "hidden_behind": (lambda i, j, p: ~((j > i) & (j >= p)), "prefix right 0"),
    "joined_with_a_window": (lambda i, j, p: ((j <= i) | (j < p)) & (i - j < 3), "prefix left 2 right 0"),
    "a_token_on": (lambda i, j, p: (j <= i + 1) | (p > j), "prefix right 1"),
    "broadcast": (lambda i, j, p: ((j <= i) | (j < p)).expand(-1, H, -1, -1), "prefix right 0"),
    "a_square_each": (lambda i, j, p: ((j <= i) | (j < p[:, 0])).unsqueeze(1), "prefix right 0"),
    "one_of_all": (lambda i, j, p: (j <= i) | (j < p.amax()), "prefix right 0"),
    # Others, which stay data.
    "not_its_own_key": (lambda i, j, p: (j < i) | (j < p), "mask"),
    "of_queries": (lambda i, j, p: (j <= i) | (i < p), "mask"),
    "of_two_prefixes": (lambda i, j, p: (j <= i) | ((i < p) & (j < p + 1)), "mask"),
    "a_suffix": (lambda i, j, p: (j <= i) | (j >= p), "mask"),
    "every_other_key": (lambda i, j, p: (j <= i) | (2 * j < p), "mask"),
    "of_a_sequence_later": (lambda i, j, p: (j <= i) | (j + torch.arange(B)[:, None, None, None] < 3), "mask"),
    "causal_again": (lambda i, j, p: ((j <= i) | (j < p)) & (j <= i + 2), "mask right 2"),
    "of_three": (lambda i, j, p: (j <= i) | (j < p) | (j == 5), "mask"),
    "in_a_window_alone": (lambda i, j, p: ((j <= i) & (i - j < 3)) | (j < p), "mask"),
    "both_of_two": (lambda i, j, p: ((j <= i) | (j < p)) & ((j <= i) | (j < 4)), "mask"),
}


def t5_prefix(m, q, k, v):
    """Added to a bias, as T5 has them of a decoder that reads its prompt in both directions."""
    i, j = places(q, k)
    mask = torch.where((j <= i) | (j < 4), 0.0, LOW)[None, None]
    return (scored(q, k) + m.bias + mask).softmax(-1) @ v


def as_transformers(m, q, k, v, lengths):
    """As `vmap` writes a mask that is or-ed onto a causal one, and added."""
    b = torch.arange(q.shape[0])[:, None, None, None]
    i, j = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    seen = q.new_ones((), dtype=torch.bool) & ((j <= i) | (j < lengths[b]))
    return (scored(q, k) + torch.where(seen, 0.0, LOW)).softmax(-1) @ v


def prefix_and_padding(m, q, k, v, lengths, there):
    i, j = places(q, k)
    seen = ((j <= i) | (j < lengths[:, None, None, None])) & there[:, None, None]
    return scored(q, k).masked_fill(~seen, INF).softmax(-1) @ v


def of_pairs(m, q, k, v, pairs, there=None):
    """A bias that a linear makes of each pair of a query and a key, behind a mask of numbers (AlphaFold)."""
    scores = scored(q, k)
    if there is not None:
        scores = scores + (there.float() - 1)[:, None, None] * 1e9
    return (scores + nn.functional.linear(pairs, m.q.weight[:H, :5]).permute(0, 3, 1, 2)).softmax(-1) @ v


def no_weight_of_hidden(m, q, k, v, there):
    """As ESPnet has padding: zeros where no key is left."""
    hidden = ~there[:, None, None]
    return scored(q, k).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1).masked_fill(hidden, 0.0) @ v


def no_weight_where(m, q, k, v, there):
    seen = there[:, None, None] & causal(q, k)
    return torch.where(seen, torch.where(seen, scored(q, k) + m.bias, -1e9).softmax(-1), 0.0) @ v


def no_weight_later(m, q, k, v):
    return scored(q, k).masked_fill(~causal(q, k), -1e9).softmax(-1).masked_fill(~causal(q, k), 0.0) @ v


def repeated_as_a_whole(m, q, k, v):
    return plain(m, q, *(x.repeat(1, 2, 1, 1) for x in (k, v)))


def keys_before_queries(m, q, k, v):
    return ((k @ q.mT).mT * 0.3).softmax(-1) @ v


def mask_by_values_of_keys(m, q, k, v):
    return scored(q, k).masked_fill(k[..., 0][:, :, None] < -1, LOW).softmax(-1) @ v


def window_of_later_ones(m, q, k, v):
    i, j = places(q, k)
    return scored(q, k).masked_fill(i - j > 2, INF).softmax(-1) @ v


def two_products(m, q, k, v):
    """DeepSeek's own inference code: RoPE's channels of keys are of all heads."""
    scores = torch.einsum("bhtc,bhsc->bhts", q[..., :6], k[..., :6])
    scores = (scores + torch.einsum("bhtc,bsc->bhts", q[..., 6:], k[:, 0, :, 6:])) * 0.3
    return (scores + torch.full((T, T), INF).triu_(1)).softmax(-1) @ v


def buffer_of_gpt2(m, q, k, v):
    return torch.where(m.triangle[:, :, :T, :T], scored(q, k), LOW).softmax(-1) @ v


def learned_bias(m, q, k, v):
    return (scored(q, k) + m.bias).softmax(-1) @ v


def alibi(m, q, k, v):
    i, j = places(q, k)
    return (scored(q, k) + m.sinks.view(H, 1, 1) * (j - i)).masked_fill(j > i, INF).softmax(-1) @ v


def window_on_both_sides(m, q, k, v):
    i, j = places(q, k)
    return scored(q, k).masked_fill((j - i).abs() > 2, INF).softmax(-1) @ v


def chunks(m, q, k, v):
    i, j = places(q, k)
    return scored(q, k).masked_fill(~((j <= i) & (j // 3 == i // 3)), INF).softmax(-1) @ v


def same_number(*numbers, fill=-1e9):
    """Causal, among tokens whose numbers by places, and of documents if any, are the same."""
    def body(m, q, k, v, *ids):
        i, j = places(q, k)
        seen = (j <= i)[None]
        for of_query, of_key in numbers:
            seen = seen & (of_query(i) == of_key(j))
        for rows in ids:
            seen = seen & (rows[:, :, None] == rows[:, None, :])
        return scored(q, k).masked_fill(~seen[:, None], fill).softmax(-1) @ v

    return body


def chunk(size, offset=0):
    return lambda place: (place + offset) // size


def turned_numbers(m, q, k, v, ids):
    """Of as many sequences as tokens: the keys' numbers are those of another sequence at each place."""
    q, k, v = (x.repeat(3, 1, 1, 1) for x in (q, k, v))
    ids = ids.repeat(3, 1)
    return scored(q, k).masked_fill(ids[:, None, :, None] != ids.t()[:, None, None, :], -1e9).softmax(-1) @ v


def of_places_or_sequences(m, q, k, v, ids):
    """A number of a sequence beside a query's place, and of a place beside a key's."""
    q, k, v = (x.repeat(3, 1, 1, 1) for x in (q, k, v))
    (i, j), numbers = places(q, k), ids[0]
    same = i + numbers[:, None, None, None] == j + numbers
    return scored(q, k).masked_fill(~same, -1e9).softmax(-1) @ v


def chunked_from(query, key):
    """As Llama 4 of transformers: places less where a sequence begins, in chunks."""
    def body(m, q, k, v, starts):
        i, j = places(q, k)
        seen = (j <= i) & (query(i, starts) // 4 == key(j, starts) // 4)
        return (scored(q, k) + torch.where(seen, 0.0, -1e9)).softmax(-1) @ v

    return body


def from_start(place, starts):
    return place - starts[torch.arange(B)[:, None, None, None]]


def flagged(mask):
    """By a flag of each token, which says that it is of a prefix, or of an image."""
    def body(m, q, k, v, flags):
        i, j = places(q, k)
        seen = (j <= i) | mask(flags[:, :, None], flags[:, None, :])
        return scored(q, k).masked_fill(~seen[:, None], -1e9).softmax(-1) @ v

    return body


def last_queries(m, q, k, v):
    q = q[:, :, -3:]
    return scored(q, k).masked_fill(torch.ones(3, T, dtype=torch.bool).triu(T - 2), INF).softmax(-1) @ v


def documents(m, q, k, v, ids):
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return scored(q, k).masked_fill(~(same & causal(q, k)), INF).softmax(-1) @ v


def documents_of_all_heads(m, q, k, v, ids):
    """The dimension of heads is put in last, by what all of the mask goes through."""
    seen = (ids[:, :, None] == ids[:, None]) & causal(q, k)
    return scored(q, k).masked_fill(~seen[:, None], INF).softmax(-1) @ v


def documents_added(m, q, k, v, ids):
    seen = (ids[:, :, None] == ids[:, None]) & causal(q, k)
    return (scored(q, k) + torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, INF)[:, None]).softmax(-1) @ v


def documents_by_others(m, q, k, v, ids):
    """Other numbers than those of the queries."""
    same = ids[:, None, :, None] == (ids // 2)[:, None, None, :]
    same = same | torch.eye(T, dtype=torch.bool)
    return scored(q, k).masked_fill(~same | ~causal(q, k), INF).softmax(-1) @ v


def documents_and_padding(m, q, k, v, ids, there):
    hidden = (ids[:, None, :, None] != ids[:, None, None, :]) | (places(q, k)[1] > places(q, k)[0])
    there = there[:, None, None] | torch.eye(T, dtype=torch.bool)
    return scored(q, k).masked_fill(hidden, INF).masked_fill(~there, INF).softmax(-1) @ v


def one_row_of_documents(m, q, k, v, ids):
    return scored(q, k).masked_fill(ids[:, None] != ids, LOW).softmax(-1) @ v


def padded(m, q, k, v, there):
    return scored(q, k).masked_fill(~there[:, None, None], INF).softmax(-1) @ v


def padded_by_a_number(m, q, k, v, there):
    return (scored(q, k) + (1.0 - there[:, None, None].float()) * -1e9).softmax(-1) @ v


def padded_before(m, q, k, v, there):
    """Whole rows are hidden, all of whose scores become one number: eager gives the mean of all values."""
    return scored(q, k).masked_fill(~causal(q, k), LOW).masked_fill(~there[:, None, None], LOW).softmax(-1) @ v


def no_key_for_the_first(m, q, k, v):
    i, j = places(q, k)
    return scored(q, k).masked_fill(j >= i, -1e30).softmax(-1) @ v


# Masks of places, from the scores and a square of ones.
WRITTEN = {
    "tril_is_0": (lambda s, one: s.masked_fill(one.tril() == 0, INF), "right 0"),
    "not_tril": (lambda s, one: s.masked_fill(~one.bool().tril(), INF), "right 0"),
    "where_tril": (lambda s, one: torch.where(one.tril() > 0, s, -1e9), "right 0"),
    "triu_of_bool": (lambda s, one: s.masked_fill(one.triu(1).bool(), INF), "right 0"),
    "times_a_low_number": (lambda s, one: s + (1 - one.tril()) * -1e9, "right 0"),
    "logarithm": (lambda s, one: s + one.tril().log(), "right 0"),
    "filled_zeros": (lambda s, one: s + torch.zeros_like(one).masked_fill(one.triu(1) == 1, INF), "right 0"),
    "band": (lambda s, one: s.masked_fill(one.tril().triu(-2) == 0, INF), "left 2 right 0"),
    "two_triangles": (lambda s, one: s.masked_fill(~(one.bool().tril() & one.bool().triu(-2)), INF), "left 2 right 0"),
    "product_of_triangles": (lambda s, one: s.masked_fill(one.tril() * one.triu(-2) < 1, INF), "left 2 right 0"),
    "of_twos": (lambda s, one: s.masked_fill((2 * one).tril() == 0, INF), "mask"),
    "either_triangle": (lambda s, one: s.masked_fill(one.tril() * one.triu(-2) == 1, INF), "mask"),
    "not_low_enough": (lambda s, one: s.masked_fill(one.tril() == 0, -50.0), "mask"),
    "infinity_times_0": (lambda s, one: s.masked_fill((one * -2).triu(1) < -1, INF), "mask"),
}


def written(mask):
    return lambda m, q, k, v: mask(scored(q, k), torch.ones(T, T)).softmax(-1) @ v


def in_order(q, positions):
    """Transformers': each token's number of the document that it begins or goes on, told by its position."""
    positions = positions.expand(q.shape[0], -1)
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def of_documents(q, k, positions, window=None):
    """bool [B, 1, T, T], by places and documents, as `vmap` writes it."""
    numbers, b = in_order(q, positions), torch.arange(q.shape[0])[:, None, None, None]
    i, j = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    seen = q.new_ones((), dtype=torch.bool) & (j <= i)
    seen = seen if window is None else seen & (j > i - window)
    return seen & (numbers[b, i] == numbers[b, j])


def numbered(m, q, k, v, positions=None):
    """One document for each row, where positions are made here."""
    positions = (torch.arange(q.shape[2]) + 0)[None] if positions is None else positions
    mask = torch.where(of_documents(q, k, positions, 3), 0.0, LOW)
    return (scored(q, k) + mask).softmax(-1) @ v


def numbered_by_twos(m, q, k, v):
    """Positions of which none follows another: a document each."""
    return numbered(m, q, k, v, 2 * torch.arange(q.shape[2])[None])


def numbered_backwards(m, q, k, v, positions):
    """Queries by the numbers of other tokens."""
    numbers, b = in_order(q, positions), torch.arange(q.shape[0])[:, None, None, None]
    i, j = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    same = numbers[b, q.shape[2] - 1 - i] == numbers[b, j]
    return scored(q, k).masked_fill(~(same | (i == j)), -1e4).softmax(-1) @ v


def numbered_from_the_start(m, q, k, v):
    """What is told of the first token is no difference that the others have."""
    positions = torch.arange(q.shape[2])[None].expand(q.shape[0], -1)
    numbers = (torch.diff(positions, prepend=positions[:, :1] - 7, dim=-1) != 1).cumsum(-1) * torch.arange(q.shape[2])
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return scored(q, k).masked_fill(~(same & causal(q, k)), INF).softmax(-1) @ v


def torchs(mask, **others):
    """`scaled_dot_product_attention` with a mask."""
    def body(m, q, k, v, *more):
        return nn.functional.scaled_dot_product_attention(q, k, v, mask(q, k, *more), **others)

    return body


def added_triangle(q, k):
    return torch.full((T, T), INF).triu(1)


def by_position(q, k, positions=None):
    return of_documents(q, k, torch.arange(q.shape[2])[None] if positions is None else positions)


def causal_and_padded(q, k, there):
    """As transformers has it of a batch with padding."""
    i, j, b = torch.arange(T)[:, None], torch.arange(T)[None, :], torch.arange(B)[:, None, None, None]
    return (q.new_ones((), dtype=torch.bool) & (j <= i)) & there[b, j]


def windowed(q, k):
    i, j = places(q, k)
    return (j <= i) & (i - j < 3)


def with_prefix(q, k, lengths):
    i, j = places(q, k)
    return (j <= i) | (j < lengths[:, None, None, None])


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1]])
IDS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
PADDED = torch.tensor([[0, 0, 0, 1, 1, -1], [-1, -1, 0, 0, 0, 0]])
LENGTHS = torch.tensor([4, 2])
THERE = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
BEFORE = THERE.flip(1)
NONE_THERE = torch.tensor([[True] * 6, [False] * 6])
# Spelling -> (block, what the op is told: mask and bias as tensors, sinks, softcap, left, right).
SPELLINGS = {
    "plain": (lambda: block(plain), "right 0"),
    "hugging_face": (lambda: block(hugging_face, groups=2), "right 0"),
    "gpt_oss": (lambda: block(gpt_oss, groups=2), "sinks left 2 right 0"),
    "widened": (lambda: block(widened, groups=2), "sinks right 0"),
    "sinks_of_rows": (lambda: block(sinks_of_rows, groups=2), "sinks right 0"),
    "sinks_of_tokens": (lambda: block(sinks_of_tokens), "bias sinks"),
    "transposed_wider": (lambda: block(transposed_wider), "right 0"),
    "times_flags": (lambda: block(times_flags), "right 0"),
    "times_flags_and_more": (lambda: block(times_flags_and_more, THERE), "mask"),
    "sinks_first": (lambda: block(sinks_first), "sinks"),
    "gemma": (lambda: block(gemma), "softcap 50 right 0"),
    "batched": (lambda: block(batched), "right 0"),
    "baddbmm": (lambda: block(baddbmm), "bias"),
    "by_hand": (lambda: block(by_hand), ""),
    "softmax1": (lambda: block(softmax1), "sinks"),
    "log_softmax": (lambda: block(log_softmax), ""),
    "powers_of_2": (lambda: block(powers_of_2), ""),
    "masked_powers_of_2": (lambda: block(masked_powers_of_2), "right 0"),
    "softmax1_of_2": (lambda: block(softmax1_of_2), "sinks"),
    "capped_powers_of_2": (lambda: block(capped_powers_of_2), "bias softcap 20 right 0"),
    **{f"logarithm_of_{how}": (lambda how=how: block(less_logarithm(how)), "right 0") for how in LOGARITHMS},
    "less_the_logarithm": (lambda: block(less_the_logarithm), ""),
    **{f"normalised_{how}": (lambda how=how: block(normalised(how)), "sinks right 0" if "1_more" in how else "right 0")
       for how in NORMALISED},
    "normalised_behind_less_the_maximum": (lambda: block(normalised("behind", most=True)), "right 0"),
    **{f"written_{how}": (lambda mask=mask: block(written(mask)), wanted) for how, (mask, wanted) in WRITTEN.items()},
    "learned_queries": (lambda: block(learned_queries), ""),
    "learned_queries_repeated": (lambda: block(learned_queries_repeated), ""),
    "forgetting": (lambda: block(forgetting), "bias right 0"),
    "einsums": (lambda: block(einsums), ""),
    "groups_of_heads": (lambda: block(groups_of_heads, groups=2), "right 0"),
    "one_head_of_keys": (lambda: block(one_head_of_keys), ""),
    "temperature_of_a_head": (lambda: block(temperature_of_a_head), ""),
    "scaled_by_length": (lambda: block(scaled_by_length), "right 0"),
    "t5": (lambda: block(t5), "bias"),
    "of_pairs": (lambda: block(of_pairs, draw(B, T, T, 5).requires_grad_()), "bias"),
    "of_pairs_behind_a_mask": (lambda: block(of_pairs, draw(B, T, T, 5).requires_grad_(), THERE), "bias"),
    "no_weight_of_hidden": (lambda: block(no_weight_of_hidden, NONE_THERE), "mask sinks"),
    "no_weight_where": (lambda: block(no_weight_where, BEFORE), "mask bias sinks right 0"),
    "no_weight_later": (lambda: block(no_weight_later), "right 0"),
    "prefix": (lambda: block(prefix), "prefix right 0"),
    **{f"prefix_{how}": (lambda mask=mask: block(prefixed(mask), LENGTHS), wanted)
       for how, (mask, wanted) in PREFIXES.items()},
    "prefix_by_a_number": (lambda: block(prefixed(PREFIXES["of_each_sequence"][0], LOW), LENGTHS), "prefix right 0"),
    "prefix_and_a_bias": (lambda: block(t5_prefix), "bias"),
    "prefix_as_transformers": (lambda: block(as_transformers, LENGTHS), "prefix right 0"),
    "prefix_and_padding": (lambda: block(prefix_and_padding, LENGTHS, THERE), "mask prefix right 0"),
    "repeated_as_a_whole": (lambda: block(repeated_as_a_whole, groups=2), "right 0"),
    "keys_before_queries": (lambda: block(keys_before_queries), ""),
    "mask_by_values_of_keys": (lambda: block(mask_by_values_of_keys), "mask"),
    "window_of_later_ones": (lambda: block(window_of_later_ones), "left 2"),
    "two_products": (lambda: block(two_products), "right 0"),
    "buffer_of_gpt2": (lambda: block(buffer_of_gpt2), "mask"),
    "learned_bias": (lambda: block(learned_bias), "bias"),
    "alibi": (lambda: block(alibi), "bias right 0"),
    "window_on_both_sides": (lambda: block(window_on_both_sides), "mask"),
    "chunks": (lambda: block(chunks), "documents right 0"),
    "chunks_and_documents": (lambda: block(same_number((chunk(4), chunk(4))), IDS), "documents right 0"),
    "two_numbers_of_documents": (lambda: block(same_number(), POSITIONS - 5, IDS * 2**62), "documents right 0"),
    "three_numbers": (lambda: block(same_number((chunk(4), chunk(4)), fill=INF), POSITIONS, IDS), "mask documents right 0"),
    "chunks_later": (lambda: block(same_number((chunk(4, 1), chunk(4, 1)))), "documents right 0"),
    "chunks_of_other_tokens": (lambda: block(same_number((chunk(4), chunk(4, 1)))), "mask"),
    "chunks_of_other_sizes": (lambda: block(same_number((chunk(3), chunk(2)))), "mask"),
    "rests_of_places": (lambda: block(same_number((lambda i: i % 2, lambda j: j % 2))), "documents right 0"),
    "chunks_from_a_start": (lambda: block(chunked_from(from_start, from_start), LENGTHS), "documents right 0"),
    "chunks_from_other_starts": (lambda: block(chunked_from(from_start, lambda j, starts: from_start(j, starts + 1)), LENGTHS), "bias"),
    "of_places_or_sequences": (lambda: block(of_places_or_sequences, POSITIONS), "mask"),
    "turned_numbers": (lambda: block(turned_numbers, POSITIONS), "mask"),
    "flags_of_a_prefix": (lambda: block(flagged(lambda of_query, of_key: of_key), THERE), "mask"),
    "flags_of_an_image": (lambda: block(flagged(lambda of_query, of_key: of_query & of_key), THERE), "mask"),
    "flags_of_queries": (lambda: block(flagged(lambda of_query, of_key: of_query), THERE), "mask"),
    "last_queries": (lambda: block(last_queries), "right 3"),
    "documents": (lambda: block(documents, IDS), "documents right 0"),
    "documents_of_all_heads": (lambda: block(documents_of_all_heads, IDS), "documents right 0"),
    "documents_added": (lambda: block(documents_added, IDS), "documents right 0"),
    "documents_by_others": (lambda: block(documents_by_others, IDS), "mask right 0"),
    "documents_and_padding": (lambda: block(documents_and_padding, IDS, THERE), "mask documents right 0"),
    "one_row_of_documents": (lambda: block(one_row_of_documents, IDS[0]), "documents"),
    "padded": (lambda: block(padded, THERE), "mask"),
    "padded_by_a_number": (lambda: block(padded_by_a_number, THERE), "bias"),
    "padded_before": (lambda: block(padded_before, BEFORE), "mask"),
    "no_key_for_the_first": (lambda: block(no_key_for_the_first), "mask"),
    "numbered": (lambda: block(numbered), "left 2 right 0"),
    "numbered_by_positions": (lambda: block(numbered, POSITIONS), "documents left 2 right 0"),
    "numbered_by_twos": (lambda: block(numbered_by_twos), "documents left 2 right 0"),
    "numbered_backwards": (lambda: block(numbered_backwards, POSITIONS), "mask"),
    "numbered_from_the_start": (lambda: block(numbered_from_the_start), "documents right 0"),
    "torchs": (lambda: block(torchs(causal)), "right 0"),
    "torchs_scaled": (lambda: block(torchs(by_position, scale=0.2)), "right 0"),
    "torchs_added": (lambda: block(torchs(added_triangle)), "right 0"),
    "torchs_grouped": (lambda: block(torchs(causal, enable_gqa=True), groups=2), "right 0"),
}


def told(frames):
    """What the op is told of masks, in words."""
    _, _, _, mask, bias, sinks, ids, _, softcap, left, right, _, *more = op_of(frames, NAME).args
    given = {"mask": mask, "bias": bias, "sinks": sinks, "documents": ids, "prefix": (*more, None, None, None)[2]}
    words = [name for name, one in given.items() if one is not None]
    words += [f"softcap {softcap:g}"] if softcap else []
    words += [f"{name} {given}" for name, given in (("left", left), ("right", right)) if given is not None]
    return " ".join(words)


@pytest.mark.parametrize("name", SPELLINGS)
def test_fires(name):
    made, wanted = SPELLINGS[name]
    assert told(assert_fires(NAME, *made())) == wanted


@pytest.mark.parametrize("groups", [H, 2])
@pytest.mark.parametrize(("ids", "given", "wanted"), [
    ((IDS,), {"softcap": 5.0}, "documents softcap 5 right 0"), ((PADDED,), {"causal": False}, "documents"),
    ((PADDED,), {"window": 3, "scale": 0.2}, "documents left 2 right 0"), ((), {"backend": "plain"}, "right 0"),
])  # fmt: skip
def test_the_plain_body_of_this_package(ids, given, wanted, groups):
    def body(m, q, k, v, doc_ids=None):
        return megacpp_compile.attention(q, k, v, doc_ids=doc_ids, **given)

    assert told(assert_fires(NAME, *block(body, *ids, groups=groups))) == wanted


# Numbers that bfloat16 does not hold: autocast's eager refuses them.
TOO_LOW = {"mask_by_values_of_keys", "one_row_of_documents", "padded_before", "prefix_by_a_number"}
# Exponentials that eager's autocast rounds before their sum divides them: the op is nearer to float32 by half.
ROUNDED = {name for name in SPELLINGS if name.startswith("normalised_")}


@pytest.mark.sampled(8, unit=8)
@pytest.mark.parametrize("name", sorted({*SPELLINGS} - TOO_LOW - ROUNDED))
def test_fires_under_autocast(name):
    assert_autocast(NAME, *SPELLINGS[name][0]())


class Checkpointed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return checkpoint(self.module, *args, use_reentrant=False)


@pytest.mark.end_to_end
@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("how", ["verify", "checkpoint", "full", "selective"])
def test_fires_verified_and_recomputed(name, how):
    """In a decay from gates the gradient of each query's part is 0 but for rounding: no error that verification sees."""
    module, args = SPELLINGS[name][0]()
    options = {"verify": {"verify": "each"}, "checkpoint": {}}.get(how, {"policy": how})
    module = Checkpointed(module) if how == "checkpoint" else module
    torch._dynamo.reset()
    with without_code([]), megacpp_compile.record() as report:
        got = train(torch.compile(module, backend="megacpp", options={"disable": ("mla_decode",), **options}), module, args)
    assert report.counts[NAME] == 1 and not report.misses
    error, which = largest_error(got, train(module, module, args))
    assert error <= TOLERANCE[torch.float32], (which, error)


def test_sinks_of_rows_of_any_number():
    assert_dynamic(NAME, *lengths(sinks_of_rows, 2))


@pytest.mark.end_to_end
@pytest.mark.parametrize("body", [gemma, mask_by_values_of_keys])
def test_numbers_of_a_module_that_are_inputs(body):
    """The lowest number is a global one, which `dynamic=True` makes an input."""
    assert_dynamic(NAME, *lengths(body), everything=True)


def test_graph():
    frames = assert_fires(NAME, *block(gpt_oss, groups=2))
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 6, 32] = linear(arg9_1, q_weight, q_bias)
view: f32[2, 6, 4, 8] = view(linear, [2, 6, 4, 8])
transpose: f32[2, 4, 6, 8] = transpose.int(view, 1, 2)
linear_1: f32[2, 6, 16] = linear(arg9_1, k_weight)
view_1: f32[2, 6, 2, 8] = view(linear_1, [2, 6, 2, 8])
transpose_1: f32[2, 2, 6, 8] = transpose.int(view_1, 1, 2)
linear_2: f32[2, 6, 16] = linear(arg9_1, v_weight, v_bias)
view_2: f32[2, 6, 2, 8] = view(linear_2, [2, 6, 2, 8])
transpose_2: f32[2, 2, 6, 8] = transpose.int(view_2, 1, 2)
view_3: f32[1, 4, 1, 1] = view(sinks, [1, -1, 1, 1])
squeeze: f32[4] = squeeze.dims(view_3, [0, 2, 3])
attention: (f32[2, 4, 6, 8], f32[2, 4, 6], f32[0]) = megacpp.attention(transpose, transpose_1, transpose_2, None, None, squeeze, None, 0.3535533905932738, 0.0, 2, 0, -inf)
getitem: f32[2, 4, 6, 8] = attention[0]
clone: f32[2, 4, 6, 8] = clone(getitem, memory_format=contiguous_format)
return [clone]""")


def half_of_it(m, q, k, v):
    """A prefix of so many tokens as a sequence's length says."""
    i, j = places(q, k)
    return scored(q, k).masked_fill(~((j <= i) | (j < q.shape[2] // 2)), INF).softmax(-1) @ v


@pytest.mark.end_to_end
def test_a_prefix_by_the_length():
    frames = assert_fires(NAME, *block(half_of_it), dynamo=True)
    assert told(frames) == "prefix right 0"
    assert_dynamic(NAME, *lengths(half_of_it))


@pytest.mark.parametrize(("mask", "more", "wanted"), [
    (windowed, (), "left 2 right 0"), (with_prefix, (LENGTHS,), "prefix right 0"), (by_position, (POSITIONS,), "documents right 0"),
    (causal_and_padded, (THERE,), "mask sinks right 0"), (causal_and_padded, (BEFORE,), "mask sinks right 0"),
], ids=["window", "prefix", "documents", "padding_behind", "padding_before"])  # fmt: skip
def test_masks_of_torchs_op_on_gpus(monkeypatch, mask, more, wanted):
    """Kernels that skip what a window or documents hide are there on GPUs alone; their meaning is the same anywhere. A
    query of padding that sees no key has zeros, and gradients of zero."""
    frames = check_graph(*block(torchs(mask), *more))
    assert not frames.counts[NAME] and not frames.tags(NAME)
    monkeypatch.setattr(attention, "_is_quicker", lambda *_: True)
    assert told(assert_fires(NAME, *block(torchs(mask), *more))) == wanted


def last_row_alone(m, q, k, v):
    """A step of decoding: the last token's query, and all keys so far."""
    seen = torch.arange(T)[None] <= T - 2
    return nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, seen)


def test_a_single_query_is_left_to_torch(monkeypatch):
    asked, original = [], attention._is_quicker
    monkeypatch.setattr(attention, "_is_quicker", lambda *args: asked.append(args) or False)
    check_graph(*block(last_row_alone))
    _, found, plan = asked[0]
    assert not original("cuda", found, dataclasses.replace(plan, dtype=torch.bfloat16))


def dense_and_causal(q, k, seen):
    return causal(q, k) & seen


@pytest.mark.parametrize(("device", "dtype", "mask", "quicker"), [
    ("cpu", torch.float32, causal, True), ("cpu", torch.float32, windowed, False), ("cuda", torch.bfloat16, windowed, True),
    ("cuda", torch.float32, causal, False), ("xla", torch.bfloat16, causal, False),
    ("cuda", torch.bfloat16, causal_and_padded, True), ("cpu", torch.float32, causal_and_padded, False),
    ("cuda", torch.bfloat16, dense_and_causal, False),
])  # fmt: skip
def test_where_a_mask_is_dear(monkeypatch, device, dtype, mask, quicker):
    asked = []
    original = attention._is_quicker
    monkeypatch.setattr(attention, "_is_quicker", lambda *args: asked.append(args) or True)
    more = {causal_and_padded: (THERE,), dense_and_causal: (torch.ones(T, T, dtype=torch.bool),)}.get(mask, ())
    check_graph(*block(torchs(mask), *more))
    _, found, plan = asked[0]
    assert original(device, found, dataclasses.replace(plan, dtype=dtype)) is quicker


def none_for_the_first(q, k):
    i, j = places(q, k)
    return j < i


def learned(m, q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v, m.bias)


def by_chosen_kernel(m, q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return torchs(causal)(m, q, k, v)


LEFT = {"without_a_mask": (torchs(lambda q, k: None),), "causal": (torchs(lambda q, k: None, is_causal=True),),
        "padding": (torchs(lambda q, k, there: there[:, None, None]), THERE), "learned": (learned,),
        "none_for_the_first": (torchs(none_for_the_first),)}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_torch(monkeypatch, name):
    """Nothing is gained where torch's kernels need no mask, or where they read what has to be read."""
    monkeypatch.setattr(attention, "_is_quicker", lambda *_: True)
    frames = check_graph(*block(*LEFT[name]))
    assert not frames.counts[NAME] and not frames.tags(NAME)


def test_what_torch_multiplies_out(monkeypatch):
    """On GPUs, by whatever mask."""
    monkeypatch.setattr(attention, "_is_multiplied_out", lambda found: True)
    assert told(assert_fires(NAME, *block(*LEFT["padding"]))) == "mask sinks"
    assert told(assert_fires(NAME, *block(*LEFT["learned"]))) == "bias sinks"
    assert told(assert_fires(NAME, *block(*LEFT["none_for_the_first"]))) == "mask sinks"


def test_a_kernel_that_was_chosen():
    torch._dynamo.reset()
    module, args = block(by_chosen_kernel)
    with without_code([]), megacpp_compile.record() as report:
        torch.compile(module, backend="megacpp")(*args)
    assert not report.counts.get(NAME)


def kept(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    return weights @ v, weights


def averaged(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    return weights @ v + weights.mean()


def sparse(m, q, k, v):
    scores = scored(q, k)
    return scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], INF).softmax(-1) @ v


def scores_returned(m, q, k, v):
    scores = scored(q, k)
    return scores.softmax(-1) @ v, scores


def another_axis(m, q, k, v):
    return scored(q, k).softmax(-2) @ v


def normalised_again(m, q, k, v):
    return scored(q, k).softmax(-1).clamp(min=1e-3) @ v


def no_nan(m, q, k, v):
    return plain_scores_without_the_first(q, k).softmax(-1).nan_to_num() @ v


def plain_scores_without_the_first(q, k):
    i, j = places(q, k)
    return scored(q, k).masked_fill(j >= i, INF)


def squared(m, q, k, v):
    return scored(q, k).square().softmax(-1) @ v


def masked_by_scores(m, q, k, v):
    return scored(q, k).relu().softmax(-1) @ v


def sinks_kept(m, q, k, v):
    weights = torch.cat([scored(q, k), m.sinks[None, :, None, None].expand(B, H, T, 1)], -1).softmax(-1)
    return weights @ torch.cat([v, v[:, :, :1]], 2)


def one_more_after_the_maximum(m, q, k, v):
    scores = scored(q, k)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / (powers.sum(-1, keepdim=True) + 1)) @ v


def negative_cap(m, q, k, v):
    return (torch.tanh(scored(q, k) / 5) * -5).softmax(-1) @ v


def mask_and_bias_in_turn(m, q, k, v):
    return (torch.where(m.triangle[:, :, :T, :T], scored(q, k), LOW) + m.bias).softmax(-1) @ v


def scaled_by_key(m, q, k, v):
    return (scored(q, k) * k[..., 0][:, :, None]).softmax(-1) @ v


def changed_after_the_mask(m, q, k, v):
    return plain_scores_without_the_first(q, k).clamp(min=-50).softmax(-1) @ v


def scaled_after_the_mask(m, q, k, v):
    return (scored(q, k).masked_fill(~causal(q, k), -1e9) * m.sinks.exp()[:, None, None]).softmax(-1) @ v


def best_probabilities(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    return weights.masked_fill(weights < weights.topk(3, -1).values[..., -1:], 0) @ v


def sinks_after_normalising(m, q, k, v):
    return (scored(q, k).softmax(-1) * m.sinks.sigmoid()[:, None, None]) @ v


def two_softmaxes(m, q, k, v):
    weights = scored(q, k).softmax(-1)
    return (weights - weights.roll(1, 1)) @ v


def talking_heads(m, q, k, v):
    return torch.einsum("bhts,hg->bgts", scored(q, k), m.bias[:, 0, :H]).softmax(-1) @ v


def heads_mixed_behind(m, q, k, v):
    return torch.einsum("bhts,hg->bgts", scored(q, k).softmax(-1), m.bias[:, 0, :H]) @ v


def wide_heads(m, q, k, v):
    q, k = (torch.cat([x] * 40, -1) for x in (q, k))
    return (q @ k.mT * 0.01).softmax(-1) @ v


def read_by_a_statistic(m, q, k, v):
    w = scored(q, k).softmax(-1)
    return w @ v, w.amax(-1)


def two_products_of_one(m, q, k, v):
    w = scored(q, k).softmax(-1)
    return w @ v + w @ k


def best_scores(m, q, k, v):
    s = scored(q, k)
    return s.masked_fill(s < s.topk(3, -1).values[..., -1:], INF).softmax(-1) @ v


def scores_carried_on(m, q, k, v):
    s = scored(q, k)
    return (scored(s.softmax(-1) @ v, k) + s).softmax(-1) @ v


def over_queries(m, q, k, v):
    return scored(q, k).softmax(-2) @ v


def turned(m, q, k, v):
    return scored(q, k).softmax(-1).mT @ v


def of_other_queries(m, q, k, v):
    e = scored(q, k).exp()
    return (e @ v) / e.sum(-1, keepdim=True).flip(-2)


def difference(m, q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return ((q1 @ k1.mT).softmax(-1) - m.sinks[:, None, None] * (q2 @ k2.mT).softmax(-1)) @ v


def gated(m, q, k, v):
    return (scored(q, k).softmax(-1) * m.sinks.sigmoid()[:, None, None]) @ v


def hidden_again(m, q, k, v):
    """A row without a key would have zeros, and NaN for gradients."""
    return scored(q, k).masked_fill(~causal(q, k), INF).softmax(-1).masked_fill(~causal(q, k), 0.0) @ v


def hidden_elsewhere(m, q, k, v):
    i, j = places(q, k)
    return scored(q, k).masked_fill(j > i, LOW).softmax(-1).masked_fill(j >= i, 0.0) @ v


def hidden_beside_low_numbers(m, q, k, v):
    """Of a row that both hide, each in part, some is left."""
    i, j = places(q, k)
    scores = scored(q, k) + torch.where(j == 2, LOW, 0.0)
    return scores.masked_fill(j > i, LOW).softmax(-1).masked_fill(j > i, 0.0) @ v


def hardly_hidden(m, q, k, v):
    return scored(q, k).masked_fill(~causal(q, k), LOW).softmax(-1).masked_fill(~causal(q, k), 1e-3) @ v


def clamped(m, q, k, v):
    return scored(q, k).clamp(-5, 5).softmax(-1) @ v


def capped_after_the_mask(m, q, k, v):
    return (30 * torch.tanh(scored(q, k).masked_fill(~causal(q, k), -1e9) / 30)).softmax(-1) @ v


def a_little_more(m, q, k, v):
    e = scored(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


def exponentials_masked(m, q, k, v):
    e = scored(q, k).exp() * causal(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


def another_base(m, q, k, v):
    """Powers of 2 less a logarithm in base e."""
    s = scored(q, k)
    return torch.exp2(s - s.logsumexp(-1, keepdim=True)) @ v


def another_logarithm(m, q, k, v):
    s = scored(q, k)
    return torch.exp2(s - s.exp2().sum(-1, keepdim=True).log()) @ v


def a_maximum_detached_once(m, q, k, v):
    """With a gradient that no softmax has."""
    s = scored(q, k)
    most = s.amax(-1, keepdim=True)
    return torch.exp2(s - (most + torch.exp2(s - most.detach()).sum(-1, keepdim=True).log2())) @ v


def another_maximum(m, q, k, v):
    s = scored(q, k)
    most = s.amax(-1, keepdim=True)
    return torch.exp2(s - (most.flip(-2) + torch.exp2(s - most).sum(-1, keepdim=True).log2())) @ v


def twice_the_logarithm(m, q, k, v):
    s = scored(q, k)
    return torch.exp2(s - 2 * s.exp2().sum(-1, keepdim=True).log2()) @ v


def nearly_log2_e(m, q, k, v):
    s = scored(q, k)
    return torch.exp2((s - s.logsumexp(-1, keepdim=True)) * 1.44) @ v


def a_gradient_less(m, q, k, v):
    """A sum that is detached is no softmax's."""
    e = scored(q, k).exp()
    return (e / e.sum(-1, keepdim=True).detach()) @ v


def queries_in_float64(m, q, k, v):
    return (q.double() * m.sinks.double()[:, None, None] @ k.double().mT).softmax(-1).float() @ v


REFUSED = {
    "weights-kept": [kept, averaged, best_probabilities, two_softmaxes, read_by_a_statistic, two_products_of_one],
    "scores-kept": [sparse, scores_returned, best_scores, scores_carried_on],
    "other-sum": [another_axis, over_queries, turned],
    "weights-changed": [normalised_again, no_nan, sinks_after_normalising, difference, gated, hidden_again,
                        hidden_elsewhere, hidden_beside_low_numbers, hardly_hidden],
    "softmax": [a_little_more, exponentials_masked],
    "scores": [squared, masked_by_scores, negative_cap, scaled_by_key, changed_after_the_mask, scaled_after_the_mask, clamped,
               capped_after_the_mask],
    "sinks": [sinks_kept, one_more_after_the_maximum],
    "masks": [mask_and_bias_in_turn],
    "width": [wide_heads],
    "precision": [queries_in_float64],
}


@pytest.mark.parametrize(("tag", "body"), [
    pytest.param(tag, body, id=body.__name__) for tag, bodies in REFUSED.items() for body in bodies
])  # fmt: skip
def test_refuses(tag, body):
    assert_refused(NAME, tag, *block(body))


@pytest.mark.parametrize("body", [
    talking_heads, heads_mixed_behind, of_other_queries, a_gradient_less, another_base, another_logarithm,
    a_maximum_detached_once, another_maximum, twice_the_logarithm, nearly_log2_e,
])  # fmt: skip
def test_heads_that_are_mixed_are_another_product(body):
    frames = check_graph(*block(body))
    assert not frames.counts[NAME]


def router(m, q, k, v):
    """A softmax of a linear that weighs what experts gave is no attention."""
    chosen = nn.functional.linear(q.transpose(1, 2).flatten(2), m.sinks.expand(H * D, H).T).softmax(-1)
    return chosen[..., None] * v.transpose(1, 2)


def memory(m, q, k, v):
    """Queries of tokens, keys and values of weights."""
    return (q @ m.latents.mT).softmax(-1) @ m.latents


def efficient(m, q, k, v):
    """A softmax of a linear over its tokens."""
    return nn.functional.linear(k[:, 0], m.latents).softmax(1).mT @ v[:, 0] + q[:, 0].sum()


@pytest.mark.parametrize("body", [router, memory, efficient])
def test_what_comes_of_a_weight_is_none(body):
    frames = check_graph(*block(body))
    assert not frames.counts[NAME] and not frames.tags(NAME)


def lengths(body, groups=H):
    torch.manual_seed(0)
    return Block(body, groups), lambda n: (Draws(f"tokens {n}")(B, n, 12).requires_grad_(),)


test_conditions = conditions(
    NAME,
    disabled=lambda: block(plain),
    bfloat16=lambda: (block(hugging_face, groups=2)[0].bfloat16(), (draw(B, T, 12).bfloat16().requires_grad_(),)),
    inference=lambda: block(gpt_oss, groups=2),
    autocast=lambda: block(hugging_face, groups=2),
    autocast_inside=lambda: block(plain),
    length=lambda: lengths(hugging_face, 2),
    everything=lambda: lengths(gpt_oss, 2),
)
