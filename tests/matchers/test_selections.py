"""Which rows a mask made of a list selects: what is read off its graph is what it is, for every way to say that a row is
listed with every way to join it to other masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.matchers.latent_attention.core import cores
from megacpp_compile.matchers.latent_attention.masks import NotRows
from megacpp_compile.matchers.latent_attention.selections import selection_of

B, H, T, S, K = 2, 3, 5, 7, 3
LOW = float("-inf")

# Of a list [B, T, K]: which rows it names, [B, T, S].
LISTED = {
    "scatter": lambda i: torch.zeros(B, T, S, dtype=torch.bool).scatter(2, i, True),
    "scatter_hidden": lambda i: ~torch.ones(B, T, S, dtype=torch.bool).scatter(-1, i, False),
    "scatter_of_numbers": lambda i: torch.full((B, T, S), 3.0).scatter(-1, i, -1.0) < 0,
    "scatter_of_a_source": lambda i: i.new_zeros(B, T, S).scatter(-1, i, torch.ones_like(i)).bool(),
    "scatter_of_infinities": lambda i: torch.full((B, T, S), LOW).scatter(-1, i, 0) == 0,
    "one_hot": lambda i: F.one_hot(i, S).sum(2).bool(), "one_hot_any": lambda i: F.one_hot(i, S).bool().any(-2),
    "compared": lambda i: (torch.arange(S) == i[..., None]).any(dim=-2),
    "compared_all": lambda i: ~(i.unsqueeze(3) != torch.arange(S)).all(2),
    "over_one_more": lambda i: torch.zeros(B, T, K, S).scatter(-1, i[..., None], 1.0).amax(2) > 0.5,
    "by_rows_first": lambda i: torch.zeros(B, S, T).scatter(1, i.mT, 1.0).mT != 0,
    "by_index": lambda i: torch.zeros(B, T, S).index_put((
        torch.arange(B)[:, None, None], torch.arange(T)[:, None], i,
    ), torch.ones(())) > 0,
    "logarithm": lambda i: torch.zeros(B, T, S).scatter(-1, i, 1.0).log() > -1,
    "arithmetic": lambda i: 1 - (2 - 2 * torch.zeros(B, T, S).scatter(-1, i, 1.0)) / 2 > 0,
}  # fmt: skip

# Of those and of another mask of the same shape or [T, S]: a mask of SDPA.
JOINED = {
    "and": lambda seen, other: (seen & other)[:, None],
    "and_over_heads": lambda seen, other: torch.logical_and(
        other.expand(B, T, S).unsqueeze(1), seen[:, None].expand(-1, H, -1, -1)
    ),
    "not_or": lambda seen, other: ~(~other | ~seen).unsqueeze(1),
    "filled": lambda seen, other: torch.zeros(B, 1, T, S).masked_fill(~(seen & other)[:, None], LOW),
    "filled_twice": lambda seen, other: torch.zeros(()).expand(B, T, S).masked_fill(~other, -1e30).masked_fill(
        seen.logical_not(), -1e30
    )[:, None],
    "added": lambda seen, other: (torch.where(seen, 0.0, LOW) + torch.where(~other, LOW, 0.0)).unsqueeze(1),
    "where_in_where": lambda seen, other: torch.where(seen, torch.where(other, 0.0, LOW), LOW)[:, None],
}  # fmt: skip

OTHERS = {
    "all": lambda data: torch.ones(T, S, dtype=torch.bool),
    "tril": lambda data: torch.ones(T, S, dtype=torch.bool).tril(1),
    "places": lambda data: torch.arange(S) <= torch.arange(T)[:, None] + 2,
    "places_hidden": lambda data: ~(torch.arange(S) > torch.arange(T)[:, None]),
    "data": lambda data: data,
    "both": lambda data: data & (torch.arange(S) <= torch.arange(T)[:, None]),
    "window": lambda data: (torch.arange(S) <= torch.arange(T)[:, None]) & (torch.arange(S) > torch.arange(T)[:, None] - 3),
}


def selected(mask_of, *args):
    """(what `selection_of` says of the mask that `mask_of(*args)` is, that as a mask [B, T, S], the mask)."""
    q, k, v = torch.randn(B, H, T, 4), torch.randn(B, H, S, 4), torch.randn(B, H, S, 4)
    masks = []

    def attention(q, k, v, *args):
        masks.append(mask_of(*args))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[-1])

    gm = make_fx(attention, pre_dispatch=True)(q, k, v, *args)
    (core,) = cores(gm.graph)
    found = selection_of(core)
    if found is None or isinstance(found, NotRows):
        return found, None, None

    class Values(Interpreter):
        def run_node(self, n):
            self.values[n] = super().run_node(n)
            return self.values[n]

    run = Values(gm, garbage_collect_values=False)
    run.values = {}
    run.run(q, k, v, *args)
    index = _over(run.values[found.index], found.axes, "btk", (B, T, found.index.meta["val"].shape[-1]))
    seen = torch.zeros(B, T, S, dtype=torch.bool).scatter(-1, index.long(), True)
    for one in found.conditions:
        told = _over(run.values[one.node], one.axes, "bts", (B, T, S))
        seen &= ~told if one.hidden else told
    if found.last is not None:
        seen &= torch.arange(S) <= torch.arange(T)[:, None] + found.last
    mask = mask_of(*args)
    mask = mask if mask.dtype == torch.bool else mask == 0
    return found, seen[:, None], mask


def _over(tensor, have, axes, sizes):
    tensor = tensor.reshape([n for n, axis in zip(tensor.shape, have, strict=True) if axis is not None])
    named = [axis for axis in have if axis is not None]
    tensor = tensor.permute([named.index(axis) for axis in axes if axis in named])
    for place, axis in enumerate(axes):
        if axis not in named:
            tensor = tensor.unsqueeze(place)
    return tensor.expand(sizes)


def list_of(scores):
    return scores.topk(K).indices


@pytest.mark.sampled(5)
@pytest.mark.parametrize("listed", LISTED)
def test_every_list_in_every_mask(listed):
    scores, data = torch.randn(B, T, S), torch.rand(B, T, S) < 0.6
    others, first = [*OTHERS.items()], [*LISTED].index(listed)
    for i, (how, join) in enumerate(JOINED.items(), first):
        for name, other in (others[i % len(others)], others[(i + 3) % len(others)]):
            found, seen, mask = selected(lambda scores, data, join=join, other=other: join(
                LISTED[listed](list_of(scores)), other(data),
            ), scores, data)  # fmt: skip
            assert seen is not None, (how, name, found)
            assert (seen == mask).all(), (how, name)
            assert not found.repeats and (found.last is not None) == (name not in ("all", "data")), (how, name)
            assert bool(found.conditions) == (name in ("data", "both", "window")), (how, name)


@pytest.mark.parametrize(
    ("choose", "repeats"),
    [(lambda s: s.sort(-1, descending=True)[1][..., :K], False), (lambda s: s.argsort(-1)[:, :, 1:4].int().long(), False),
     (lambda s: s.topk(K, -1).indices[..., ::2], False), (lambda s: s.topk(K).indices + 0, True),
     (lambda s: s.mT.topk(K, 1).indices[:, :, :1].mT.expand(-1, T, -1), True), (lambda s: s.argsort(1)[..., :K], True)],
)  # fmt: skip
def test_where_a_list_comes_from(choose, repeats):
    """One that is chosen along another dimension may name a row twice."""
    found, seen, mask = selected(lambda s: LISTED["scatter"](choose(s).clamp_max(S - 1) if repeats else choose(s))[:, None],
                                 torch.randn(B, T, S))  # fmt: skip
    assert found.repeats == repeats and (seen == mask).all()


@pytest.mark.parametrize("mask_of", [
    lambda s: (LISTED["scatter"](list_of(s)) | (s > 0))[:, None],
    lambda s: torch.zeros(B, T, S, dtype=torch.bool).scatter(-1, list_of(s)[:, 1:], True)[:, None] | (s > 0)[:, None],
    lambda s: (s > 0).scatter(-1, list_of(s), True)[:, None],
    lambda s: (F.one_hot(list_of(s), S).sum(1, keepdim=True) > 0).expand(B, T, K, S)[:, :, 0][:, None],
    lambda s: torch.zeros(B, T, S).scatter_add(-1, list_of(s), s[..., :K])[:, None],
    lambda s: (s > 0)[:, None],
])  # fmt: skip
def test_what_is_no_list(mask_of):
    assert selected(mask_of, torch.randn(B, T, S))[0] is None
