"""What the matcher of decoding steps reads: where elements come from, what is a product, and up to which row a mask lets
see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.matchers.latent_attention import elements as e
from megacpp_compile.matchers.latent_attention.core import cores
from megacpp_compile.matchers.latent_attention.masks import NotRows, rows_seen
from megacpp_compile.reader.products import BROADCAST, CONTRACTED, product_of

B, H, S, C = 2, 3, 5, 4


def traced(fn, *args):
    return make_fx(fn, pre_dispatch=True)(*args).graph


def result(graph):
    return next(n for n in graph.nodes if n.op == "output").args[0]


# --- elements

VIEWS = {
    "split_heads": ((B, S, H * C), lambda x: x.view(B, S, H, C).transpose(1, 2)),
    "permuted": ((S, B, C, H), lambda x: x.permute(1, 3, 0, 2)),
    "sliced": ((B, H + 2, S, 2 * C), lambda x: x[:, 1 : H + 1, :, C:]),
    "split": ((B, H, S, 3 * C), lambda x: x.split([C, C, C], -1)[1]),
    "chunked": ((B, H, S, 2 * C), lambda x: x.chunk(2, -1)[1]), "unbound": ((B, H, S, 2, C), lambda x: x.unbind(3)[1]),
    "selected": ((7, B, H, S, C), lambda x: x[-2]),
    "shared": ((B, S, C), lambda x: x.unsqueeze(1).expand(-1, H, -1, -1)),
    "repeated": ((B, S, 1, C), lambda x: x.repeat(1, 1, H, 1).transpose(1, 2)),
    "repeated_in_front": ((S, C), lambda x: x.repeat(B, H, 1, 1)),
    "repeated_in_turn": ((B, 1, S, C), lambda x: x.repeat_interleave(H, 1)),
    "repeated_by_groups": ((B, S, H // 2 + H % 2, C), lambda x: x.repeat_interleave(2, 2)[:, :, :H].transpose(1, 2)),
    "merged_and_parted": ((B * H, S, C), lambda x: x.reshape(B, H * S, C).unflatten(1, (H, S))),
    "every_second": ((B, H, S, 2 * C), lambda x: x[..., 1::2]),
    "rows_of_heads": ((B, S, H, C), lambda x: x.reshape(B, H, S, C)),
    "copied": ((B, S, H, C), lambda x: x.transpose(1, 2).contiguous().clone().squeeze()),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_followed_back(name):
    """Each element is where a tensor of numbers has it."""
    shape, view = VIEWS[name]
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    node = result(traced(view, numbers))
    sizes = {"b": B, "h": H, "s": S, "c": C, "r": 1}
    at = e.elements(node, "bhsc", {axis: np.arange(n) for axis, n in sizes.items()})
    last = e.levels(at)[-1]
    assert last.node.op == "placeholder"
    index = np.broadcast_arrays(*last.index)
    assert (numbers.numpy()[tuple(index)][..., 0] == view(numbers).numpy()).all()


@pytest.mark.parametrize("write", ["cat", "slice_scatter"])
def test_channels_side_by_side(write):
    def beside(a, b):
        if write == "cat":
            return torch.cat((a, b), -1)
        new = torch.slice_scatter(a.new_empty(B, H, S, 2 * C), a, 3, 0, C)
        return torch.slice_scatter(new, b, 3, C)

    graph = traced(beside, *(torch.randn(B, H, S, C) for _ in range(2)))
    samples = {"b": np.arange(B), "h": np.arange(H), "s": np.arange(S), "c": np.arange(2 * C), "r": np.arange(1)}
    pieces, found = [e.elements(result(graph), "bhsc", samples)], []
    while pieces:
        piece = pieces.pop(0)
        inner = e.cut(piece)
        pieces += inner or []
        found += [] if inner is not None else [(piece.node.name, list(piece.samples["c"]), piece.index[3].reshape(-1).tolist())]
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    assert sorted(found) == [(names[0], [0, 1, 2, 3], [0, 1, 2, 3]), (names[1], [4, 5, 6, 7], [0, 1, 2, 3])]


def test_rows_one_behind_the_other_are_no_channels():
    graph = traced(lambda a, b: torch.cat((a, b), 2), *(torch.randn(B, H, S, C) for _ in range(2)))
    samples = {"b": np.arange(B), "h": np.arange(H), "s": np.arange(2 * S), "c": np.arange(C), "r": np.arange(1)}
    assert e.cut(e.elements(result(graph), "bhsc", samples)) is None


# --- products

X, K = torch.zeros(B, S, C), CONTRACTED


@pytest.mark.parametrize(("fn", "args", "dims"), [
    (torch.nn.functional.linear, (X, torch.zeros(H, C)), ((0, 1, K), (2, K))),
    (torch.matmul, (torch.zeros(B, 1, S, C), torch.zeros(H, C, 7)), ((0, BROADCAST, 2, K), (1, K, 3))),
    (torch.bmm, (X, X.mT), ((0, 1, K), (0, K, 2))),
    (lambda a, b: torch.einsum("bsr,hrn->bhsn", a, b), (X, torch.zeros(H, C, 7)), ((0, 2, K), (1, K, 3))),
    (lambda a, b: torch.einsum("bsr,rs->b", a, b), (X, torch.zeros(C, S)), None),
    (lambda a, b: torch.einsum("bsr,ts->bst", a, b), (X, torch.zeros(3, S)), None),
    (lambda a, b: torch.nn.functional.linear(a, b, b[:, 0]), (X, torch.zeros(H, C)), None),
])  # fmt: skip
def test_products(fn, args, dims):
    product = product_of(result(traced(fn, *args)))
    assert (product and tuple(f.dims for f in product.factors)) == dims


# --- masks

T, ROWS = 3, 11


def place():
    """The rows, made in the graph."""
    return torch.arange(ROWS)


def seen_by(mask, *data, t=T):
    """(Up to which row each query of each sequence sees by what was read of `mask(*data)`, by `data`'s values)."""

    attend = torch.nn.functional.scaled_dot_product_attention
    heads = torch.randn(B, H, t, C), torch.randn(B, H, ROWS, C), torch.randn(B, H, ROWS, C)
    graph = traced(lambda q, k, v, *given: attend(q, k, v, attn_mask=mask(*given)), *heads, *data)
    (core,) = cores(graph)
    values = dict(zip((n for n in graph.nodes if n.op == "placeholder"), (*heads, *data), strict=True))
    limits, rows = rows_seen(core, t)
    last = torch.full((B, t), ROWS - 1)
    for one in limits:
        at = one.last.number + sum(n * values[node].reshape(-1) for n, node in one.last.parts)
        at = torch.as_tensor(at).expand(B)[:, None] + (torch.arange(t) if one.moves else 0)
        last = torch.minimum(last, at)
    return last, rows


POSITION, LENGTHS = torch.tensor([4]), torch.tensor([5, 9])
MASKS = {
    "causal_from_a_position": (lambda p: place() <= p + torch.arange(T)[:, None], (POSITION,)),
    "turned_around": (lambda p: p + torch.arange(T)[:, None] >= place(), (POSITION,)),
    "not_hidden": (lambda p: ~(place() > p + torch.arange(T)[:, None]), (POSITION,)),
    "one_length": (lambda p: (place() < p).expand(T, ROWS), (POSITION,)),
    "a_length_each": (lambda n: place() < n[:, None, None, None], (LENGTHS,)),
    "diagonal": (lambda: torch.ones(T, ROWS, dtype=torch.bool).tril(ROWS - T), ()),
    "hidden_above_a_diagonal": (lambda: ~torch.ones(T, ROWS, dtype=torch.bool).triu(ROWS - T + 1), ()),
    "added": (lambda: torch.full((T, ROWS), -torch.inf).triu(ROWS - T + 1), ()),
    "added_by_where": (lambda p: torch.where(place() <= p + torch.arange(T)[:, None], 0.0, -torch.inf), (POSITION,)),
    "filled": (lambda p: torch.zeros(T, ROWS).masked_fill(place() > p + torch.arange(T)[:, None], -torch.inf), (POSITION,)),
    "both": (lambda p: (place() <= p + torch.arange(T)[:, None]) & (place() < p + T), (POSITION,)),
    "sliced": (lambda: torch.ones(20, 20, dtype=torch.bool).tril()[6 : 6 + T, :ROWS], ()),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, data = MASKS[name]
    last, rows = seen_by(mask, *data)
    plain = mask(*data)
    plain = (plain if plain.dtype == torch.bool else plain == 0).expand(B, H, T, ROWS)[:, 0]
    assert not rows and torch.equal(place() <= last[..., None], plain)


@pytest.mark.parametrize(("mask", "data", "reason"), [
    (lambda p: place() <= p[:, None], (torch.arange(T) * 2,), "positions of the new tokens that are data"),
    (lambda p: place() + torch.arange(T)[:, None] > p, (POSITION,), "other rows than those behind a last one"),
    (lambda m: m, (torch.zeros(T, ROWS) > 0,), "data"), (lambda m: m, (torch.zeros(B, H, 1, ROWS) > 0,), "data"),
    (lambda m: m, (torch.zeros(B, 1, 1, ROWS),), "data"),
    (lambda p: (place() <= p + torch.arange(T)[:, None]) & (place() < 7), (POSITION,), "moves with the query"),
])  # fmt: skip
def test_masks_that_say_something_else(mask, data, reason):
    with pytest.raises(NotRows, match=reason):
        seen_by(mask, *data)


def test_rows_hidden_from_all_queries_are_data():
    there = torch.randn(B, 1, 1, ROWS) > 0
    last, rows = seen_by(lambda p, m: (place() <= p + torch.arange(T)[:, None]) & m, POSITION, there)
    assert torch.equal(last[0], 4 + torch.arange(T)) and [one.hidden for one in rows] == [False]
