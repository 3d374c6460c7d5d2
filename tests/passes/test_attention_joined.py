"""Attention that is written part by part, heads in a loop or queries in chunks: one site where it is one attention, and
what it was where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megacpp_compile.passes import attention
from tests.frames import TOLERANCE, check_graph, largest_error, run, train

from .conditions import conditions, op_of
from .contract import assert_autocast, assert_fires
from .test_attention import INF, LENGTHS, NAME, THERE, B, D, H, T, block, draw, lengths, places, scored, told


def softmaxed(q, k, v, scale=0.3, mask=None):
    """Of one head."""
    scores = q @ k.transpose(-1, -2) * scale
    return (scores if mask is None else scores.masked_fill(mask, INF)).softmax(-1) @ v


def later(q):
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)


def selected(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h], mask=later(q)) for h in range(H)], 1)


def unbound(m, q, k, v):
    parts = [softmaxed(*one, mask=later(q)) for one in zip(*(x.unbind(1) for x in (q, k, v)), strict=True)]
    return torch.cat(parts, -1)


def of_channels(m, q, k, v):
    """As slices of what the projections made."""
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    parts = [softmaxed(*(x[..., h * D : (h + 1) * D] for x in (q, k, v)), mask=later(q)) for h in range(H)]
    return torch.cat(parts, -1)


def of_splits(m, q, k, v):
    q, k, v = (x.transpose(1, 2).flatten(2).split(D, -1) for x in (q, k, v))
    return torch.cat([softmaxed(*one, mask=later(one[0])) for one in zip(q, k, v, strict=True)], dim=-1)


def kept_dimension(m, q, k, v):
    """Each head with a dimension of its own."""
    parts = [softmaxed(*(x[:, h : h + 1] for x in (q, k, v))) for h in range(H)]
    return torch.cat(parts, 1).transpose(1, 2).flatten(2)


def each_transposed(m, q, k, v):
    parts = [softmaxed(q[:, h], k[:, h], v[:, h]).transpose(0, 1).contiguous() for h in range(H)]
    return torch.stack(parts, 2)


def grouped(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h // 2], v[:, h // 2], mask=later(q)) for h in range(H)], 1)


def one_of_keys(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, 0], v[:, 0], mask=later(q)) for h in range(H)], 1)


def values_alone(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, 0], v[:, h]) for h in range(H)], 1)


def groups_of_heads(m, q, k, v):
    """Two heads and their keys at a time."""
    parts = [softmaxed(q[:, 2 * g : 2 * g + 2], k[:, g : g + 1].expand(-1, 2, -1, -1), v[:, g : g + 1].expand(-1, 2, -1, -1))
             for g in range(H // 2)]  # fmt: skip
    return torch.cat(parts, 1)


def biased(m, q, k, v):
    parts = [(scored(q[:, h], k[:, h]) + m.bias[h]).softmax(-1) @ v[:, h] for h in range(H)]
    return torch.cat(parts, -1)


def with_temperatures(m, q, k, v):
    parts = [(scored(q[:, h], k[:, h]) * (1 + m.sinks[h, None] ** 2)).softmax(-1) @ v[:, h] for h in range(H)]
    return torch.cat(parts, -1)


def with_sinks(m, q, k, v):
    def head(h):
        sink = m.sinks[h].view(1, 1, 1).expand(q.shape[0], q.shape[2], 1)
        return torch.cat([scored(q[:, h], k[:, h]), sink], -1).softmax(-1)[..., :-1] @ v[:, h]

    return torch.cat([head(h) for h in range(H)], -1)


def capped_windows(m, q, k, v):
    i, j = places(q, k)
    hidden = (j > i) | (i - j > 2)
    parts = [(torch.tanh(scored(q[:, h], k[:, h]) / 20) * 20).masked_fill(hidden, INF).softmax(-1) @ v[:, h]
             for h in range(H)]  # fmt: skip
    return torch.stack(parts).transpose(0, 1)


def padded(m, q, k, v, there):
    return torch.cat([softmaxed(q[:, h], k[:, h], v[:, h], mask=~there[:, None]) for h in range(H)], -1)


def prefixed(m, q, k, v, lengths):
    hidden = later(q) & (torch.arange(T) >= lengths[:, None, None])
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h], mask=hidden) for h in range(H)], 1)


def of_documents(m, q, k, v, ids):
    hidden = (ids[:, :, None] != ids[:, None]) | (torch.arange(T)[:, None] < torch.arange(T))
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h], mask=hidden) for h in range(H)], 1)


def sequences(m, q, k, v):
    """A loop over the batch, and in it one over heads."""
    rows = [torch.stack([softmaxed(q[b, h], k[b, h], v[b, h], mask=later(q)) for h in range(H)]) for b in range(B)]
    return torch.stack(rows)


class Head(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(12, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(9, 9)))
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * D**-0.5
        weights = weights.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, INF)
        return self.dropout(torch.softmax(weights, dim=-1)) @ self.value(x)


class Heads(nn.Module):
    """A head is a module, with projections and a buffer of its own."""

    def __init__(self, p=0.0, heads=3):
        super().__init__()
        self.heads = nn.ModuleList(Head(p) for _ in range(heads))
        self.proj = nn.Linear(heads * D, 12)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


def modules(*args):
    torch.manual_seed(0)
    return Heads(*args), (draw(B, T, 12).requires_grad_(),)


IDS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
HEADS = {
    "selected": (lambda: block(selected), "right 0"),
    "unbound": (lambda: block(unbound), "right 0"),
    "of_channels": (lambda: block(of_channels), "right 0"),
    "of_splits": (lambda: block(of_splits), "right 0"),
    "kept_dimension": (lambda: block(kept_dimension), ""),
    "each_transposed": (lambda: block(each_transposed), ""),
    "grouped": (lambda: block(grouped, groups=2), "right 0"),
    "one_of_keys": (lambda: block(one_of_keys, groups=1), "right 0"),
    "values_alone": (lambda: block(values_alone), ""),
    "groups_of_heads": (lambda: block(groups_of_heads, groups=2), ""),
    "biased": (lambda: block(biased), "bias"),
    "with_temperatures": (lambda: block(with_temperatures), ""),
    "with_sinks": (lambda: block(with_sinks), "sinks"),
    "capped_windows": (lambda: block(capped_windows), "softcap 20 left 2 right 0"),
    "padded": (lambda: block(padded, THERE), "mask"),
    "prefixed": (lambda: block(prefixed, LENGTHS), "prefix right 0"),
    "of_documents": (lambda: block(of_documents, IDS), "documents right 0"),
    "sequences": (lambda: block(sequences), "right 0"),
    "modules": (modules, "mask"),
}
# Those whose parts are read where they are, without copies.
WHOLE = {"selected", "unbound", "of_channels", "of_splits", "kept_dimension", "each_transposed", "grouped", "one_of_keys"}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_one_site(name):
    made, wanted = HEADS[name]
    frames = assert_fires(NAME, *made())
    assert told(frames) == wanted
    stacks = [n for n in frames.graph.graph.nodes if n.target in (torch.ops.aten.stack.default, torch.ops.aten.cat.default)]
    assert not stacks or name not in WHOLE


def test_keys_of_a_group_are_passed_once():
    q, k, v, *_ = op_of(assert_fires(NAME, *block(grouped, groups=2)), NAME).args
    assert [x.meta["val"].shape[1] for x in (q, k, v)] == [4, 2, 2]
    q, k, v, *_ = op_of(assert_fires(NAME, *block(one_of_keys, groups=1)), NAME).args
    assert [x.meta["val"].shape[1] for x in (q, k, v)] == [4, 1, 1]


def exact(module, args):
    """Outputs and gradients in float64."""
    wide = copy.deepcopy(module).double()
    given = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    return {name: t.float() if t.dtype == torch.float64 else t for name, t in train(wide, wide, tuple(given)).items()}


def assert_exact(frames, module, args):
    error, which = largest_error(frames.results, exact(module, args))
    assert error <= TOLERANCE[torch.float32], (which, error)


@pytest.mark.sampled(6, unit=2)
@pytest.mark.parametrize("name", HEADS)
def test_heads_beside_float64(name):
    module, args = HEADS[name][0]()
    assert_exact(check_graph(module, args), module, args)


@pytest.mark.sampled(4, unit=2)
@pytest.mark.parametrize("name", HEADS)
def test_heads_under_autocast(name):
    assert_autocast(NAME, *HEADS[name][0]())


def test_dropout_of_each_head():
    """One site that draws once; a mean over draws is what there is without dropout."""
    module, args = modules(0.5)
    frames = run(module, args)
    assert frames.counts[NAME] == 1 and not frames.misses
    with torch.no_grad():
        drawn = torch.stack([frames.compiled(*args) for _ in range(4000)])
        want = module.eval()(*args)
    spread = drawn.std(0) / 4000**0.5
    assert ((drawn.mean(0) - want).abs() < 5 * spread + 1e-6).all() and spread.max() > 0


# -- what is no one attention, or another one


def in_another_order(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h]) for h in (1, 0, 2, 3)], 1)


def keys_in_another_order(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, 3 - h], v[:, 3 - h]) for h in range(H)], 1)


def a_head_twice(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h]) for h in (0, 1, 1, 3)], 1)


def some_heads(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h]) for h in (1, 2, 3)], 1)


def overlapping_channels(m, q, k, v):
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    return torch.cat([softmaxed(*(x[..., 4 * h : 4 * h + D] for x in (q, k, v))) for h in range(H)], -1)


def channels_in_turn(m, q, k, v):
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    return torch.cat([softmaxed(*(x[..., h::H] for x in (q, k, v))) for h in range(H)], -1)


def joined_along_tokens(m, q, k, v):
    return torch.cat([softmaxed(q[:, h], k[:, h], v[:, h], mask=later(q)) for h in range(H)], 1)


def joined_along_sequences(m, q, k, v):
    return torch.cat([softmaxed(q[:, h], k[:, h], v[:, h]) for h in range(H)], 0)


def groups_in_turn(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h % 2], v[:, h % 2]) for h in range(H)], 1)


OTHERS = [in_another_order, keys_in_another_order, a_head_twice, some_heads, overlapping_channels, channels_in_turn,
          joined_along_tokens, joined_along_sequences, groups_in_turn]  # fmt: skip


@pytest.mark.parametrize("body", OTHERS)
def test_heads_that_are_read_otherwise(body):
    """One attention of what they read: that of `check_graph` is eager's."""
    module, args = block(body, groups=2 if body is groups_in_turn else H)
    assert_exact(assert_fires(NAME, module, args), module, args)


def scaled_otherwise(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h], 0.3 if h else 0.2) for h in range(H)], 1)


def masked_otherwise(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h], mask=later(q) if h else None) for h in range(H)], 1)


def masked_a_token_later(m, q, k, v):
    ones = torch.ones(T, T, dtype=torch.bool)
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h], mask=ones.triu(1 + (h == 3))) for h in range(H)], 1)


def capped_otherwise(m, q, k, v):
    parts = [(torch.tanh(scored(q[:, h], k[:, h])) if h else scored(q[:, h], k[:, h])).softmax(-1) @ v[:, h] for h in range(H)]
    return torch.stack(parts, 1)


def of_fewer_keys(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h, : T - h], v[:, h, : T - h]) for h in range(H)], 1)


def of_documents_by_head(m, q, k, v, ids):
    own = [ids // (h + 1) for h in range(H)]
    parts = [softmaxed(q[:, h], k[:, h], v[:, h], mask=own[h][:, :, None] != own[h][:, None]) for h in range(H)]
    return torch.stack(parts, 1)


def a_head_kept(m, q, k, v):
    parts = [softmaxed(q[:, h], k[:, h], v[:, h]) for h in range(H)]
    return torch.stack(parts, 1), parts[2]


def others_between(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h]) if h else v[:, h] for h in range(H)], 1)


def a_result_twice(m, q, k, v):
    parts = [softmaxed(q[:, h], k[:, h], v[:, h]) for h in range(H)]
    return torch.stack([*parts, parts[0]], 1)



def summed(m, q, k, v):
    return sum(softmaxed(q[:, h], k[:, h], v[:, h]) for h in range(H))


def normed_between(m, q, k, v):
    return torch.stack([softmaxed(q[:, h], k[:, h], v[:, h]).cumsum(-1) for h in range(H)], 1)


def of_one_another(m, q, k, v):
    """A head whose queries are what the head before it made."""
    parts = [q[:, 0]]
    for h in range(H):
        parts.append(softmaxed(parts[-1], k[:, h], v[:, h]))
    return torch.stack(parts[1:], 1)


def chained(m, q, k, v):
    """The same, of results that no other reads."""
    first = softmaxed(q[:, 0], k[:, 0], v[:, 0])
    return torch.stack([softmaxed(first, k[:, h], v[:, h]) for h in range(H)], 1)


APART = {
    scaled_otherwise: 4, masked_otherwise: 4, masked_a_token_later: 4, capped_otherwise: 4, of_fewer_keys: 4, a_head_kept: 4,
    others_between: 3, a_result_twice: 4, summed: 4, normed_between: 4, of_one_another: 4, chained: 2,
}  # fmt: skip


@pytest.mark.parametrize("body", APART)
def test_heads_that_are_apart(body):
    module, args = block(body)
    assert_exact(assert_fires(NAME, module, args, APART[body]), module, args)


def test_documents_of_one_head():
    module, args = block(of_documents_by_head, IDS)
    assert_exact(assert_fires(NAME, module, args, H), module, args)


# -- queries in chunks


C = 4  # tokens of a chunk, the last of which has fewer


def rows(q, i):
    """The places of a chunk's queries, as a column."""
    return i + torch.arange(q[:, :, i : i + C].shape[2])[:, None]


def by_offset(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + C], k, v, mask=torch.arange(T) > rows(q, i)) for i in range(0, T, C)]
    return torch.cat(parts, 2)


def of_keys_so_far(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + C], k[:, :, : i + C], v[:, :, : i + C],
                       mask=torch.arange(min(T, i + C)) > rows(q, i)) for i in range(0, T, C)]  # fmt: skip
    return torch.cat(parts, dim=2)


def rows_of_a_triangle(m, q, k, v):
    hidden = torch.full((T, T), INF).triu(1)
    parts = [(scored(q[:, :, i : i + C], k) + hidden[i : i + C]).softmax(-1) @ v for i in range(0, T, C)]
    return torch.cat(parts, 2)


def split(m, q, k, v):
    return torch.cat([scored(part, k).softmax(-1) @ v for part in q.split(C, 2)], 2)


def tokens_first(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + C], k, v, mask=torch.arange(T) > rows(q, i)).transpose(1, 2).flatten(2)
             for i in range(0, T, C)]  # fmt: skip
    return torch.cat(parts, 1)


def projected_by_chunk(m, q, k, v):
    """Queries that a chunk makes itself."""
    parts = [softmaxed(q[:, :, i : i + C].tanh(), k, v, mask=torch.arange(T) > rows(q, i)) for i in range(0, T, C)]
    return torch.cat(parts, 2)


def one_left_over(m, q, k, v):
    """A last chunk of a single query."""
    q = q[:, :, :5]
    return torch.cat([softmaxed(q[:, :, i : i + C], k, v, mask=torch.arange(T) > rows(q, i)) for i in (0, 4)], 2)


def grouped_chunks(m, q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return by_offset(m, q, k, v)


def heads_in_chunks(m, q, k, v):
    """A loop in a loop."""
    def head(q, k, v):
        parts = [softmaxed(q[:, i : i + C], k, v, mask=torch.arange(T) > i + torch.arange(min(C, T - i))[:, None])
                 for i in range(0, T, C)]  # fmt: skip
        return torch.cat(parts, 1)

    return torch.stack([head(q[:, h], k[:, h], v[:, h]) for h in range(H)], 1)


def windows(m, q, k, v):
    def chunk(i):
        gap = rows(q, i) - torch.arange(T)
        return softmaxed(q[:, :, i : i + C], k, v, mask=(gap < 0) | (gap > 2))

    return torch.cat([chunk(i) for i in range(0, T, C)], 2)


def windows_of_slices(m, q, k, v):
    """Each chunk of two with the keys that its window reaches."""
    def chunk(i):
        first = max(0, i - 2)
        gap = (i + torch.arange(2))[:, None] - torch.arange(first, i + 2)
        return softmaxed(q[:, :, i : i + 2], k[:, :, first : i + 2], v[:, :, first : i + 2], mask=(gap < 0) | (gap > 2))

    return torch.cat([chunk(i) for i in range(0, T, 2)], 2)


def rows_of_a_buffer(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + C], k, v, mask=~m.triangle[:, :, i : min(i + C, T), :T]) for i in range(0, T, C)]
    return torch.cat(parts, 2)


def padded_chunks(m, q, k, v, there):
    parts = [softmaxed(q[:, :, i : i + C], k, v, mask=~there[:, None, None]) for i in range(0, T, C)]
    return torch.cat(parts, 2)


def padded_keys_so_far(m, q, k, v, there):
    def chunk(i):
        n = min(T, i + C)
        hidden = (torch.arange(n) > rows(q, i)) | ~there[:, None, None, :n]
        return softmaxed(q[:, :, i:n], k[:, :, :n], v[:, :, :n], mask=hidden)

    return torch.cat([chunk(i) for i in range(0, T, C)], 2)


def prefixed_chunks(m, q, k, v, lengths):
    def chunk(i):
        hidden = (torch.arange(T) > rows(q, i)) & (torch.arange(T) >= lengths[:, None, None, None])
        return softmaxed(q[:, :, i : i + C], k, v, mask=hidden)

    return torch.cat([chunk(i) for i in range(0, T, C)], 2)


def rows_of_a_bias(m, q, k, v):
    parts = [(scored(q[:, :, i : i + C], k) + m.bias[:, i : i + C]).softmax(-1) @ v for i in range(0, T, C)]
    return torch.cat(parts, 2)


def chunks_with_sinks(m, q, k, v):
    def chunk(q):
        sink = m.sinks[None, :, None, None].expand(q.shape[0], H, q.shape[2], 1)
        return torch.cat([scored(q, k), sink], -1).softmax(-1)[..., :-1] @ v

    return torch.cat([chunk(q[:, :, i : i + C]) for i in range(0, T, C)], 2)


def scaled_by_place(m, q, k, v):
    parts = [((rows(q, i) + 2.0).log() * (q[:, :, i : i + C] @ k.mT)).softmax(-1) @ v for i in range(0, T, C)]
    return torch.cat(parts, 2)


def cross(m, q, k, v):
    """Of fewer keys than queries, and none hidden."""
    parts = [softmaxed(q[:, :, i : i + C], k[:, :, :5], v[:, :, :5]) for i in range(0, T, C)]
    return torch.cat(parts, 2)


CHUNKS = {
    "by_offset": (lambda: block(by_offset), "right 0"),
    "of_keys_so_far": (lambda: block(of_keys_so_far), "right 0"),
    "rows_of_a_triangle": (lambda: block(rows_of_a_triangle), "right 0"),
    "split": (lambda: block(split), ""),
    "tokens_first": (lambda: block(tokens_first), "right 0"),
    "projected_by_chunk": (lambda: block(projected_by_chunk), "right 0"),
    "one_left_over": (lambda: block(one_left_over), "right 0"),
    "grouped_chunks": (lambda: block(grouped_chunks, groups=2), "right 0"),
    "heads_in_chunks": (lambda: block(heads_in_chunks), "right 0"),
    "windows": (lambda: block(windows), "left 2 right 0"),
    "windows_of_slices": (lambda: block(windows_of_slices), "left 2 right 0"),
    "rows_of_a_buffer": (lambda: block(rows_of_a_buffer), "mask"),
    "padded_keys_so_far": (lambda: block(padded_keys_so_far, THERE), "mask right 0"),
    "padded_chunks": (lambda: block(padded_chunks, THERE), "mask"),
    "prefixed_chunks": (lambda: block(prefixed_chunks, LENGTHS), "prefix right 0"),
    "rows_of_a_bias": (lambda: block(rows_of_a_bias), "bias"),
    "chunks_with_sinks": (lambda: block(chunks_with_sinks), "sinks"),
    "scaled_by_place": (lambda: block(scaled_by_place), ""),
    "cross": (lambda: block(cross), ""),
}


@pytest.fixture
def on_any_device(monkeypatch):
    """As on GPUs, whose kernels hold no scores."""
    monkeypatch.setattr(attention, "_fits", lambda site: True)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_are_one_site(name, on_any_device):
    made, wanted = CHUNKS[name]
    module, args = made()
    frames = assert_fires(NAME, module, args)
    assert told(frames) == wanted
    assert_exact(frames, module, args)


@pytest.mark.sampled(4, unit=2)
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_under_autocast(name, on_any_device):
    assert_autocast(NAME, *CHUNKS[name][0]())


@pytest.mark.parametrize(("body", "one"), [(by_offset, True), (split, True), (windows, False), (rows_of_a_bias, False)])
def test_where_chunks_stay_small(body, one):
    """Where the plain body serves, all scores of a chunk are in memory, and of what is one site all of all chunks."""
    assert_fires(NAME, *block(body), 1 if one else 2)


# -- chunks that are none of one mask's rows


def a_key_later(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + C], k, v, mask=torch.arange(T) > rows(q, i) + (i > 0)) for i in range(0, T, C)]
    return torch.cat(parts, 2)


def each_from_its_start(m, q, k, v):
    """Causal in each chunk's own places, the same triangle for both."""
    hidden = torch.ones(3, T, dtype=torch.bool).triu(1)
    return torch.cat([softmaxed(q[:, :, i : i + 3], k, v, mask=hidden) for i in (0, 3)], 2)


def within_chunks(m, q, k, v):
    """Of a chunk's own keys."""
    return torch.cat([softmaxed(q[:, :, i : i + 3], k[:, :, i : i + 3], v[:, :, i : i + 3]) for i in (0, 3)], 2)


def causal_within_chunks(m, q, k, v):
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    parts = [softmaxed(q[:, :, i : i + 3], k[:, :, i : i + 3], v[:, :, i : i + 3], mask=hidden) for i in (0, 3)]
    return torch.cat(parts, 2)


def all_keys_so_far(m, q, k, v):
    """Those of its own chunk, too, whatever their places."""
    return torch.cat([softmaxed(q[:, :, i : i + 3], k[:, :, : i + 3], v[:, :, : i + 3]) for i in (0, 3)], 2)


def overlapping(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + C], k, v, mask=torch.arange(T) > rows(q, i)) for i in (0, 2)]
    return torch.cat(parts, 2)


def backwards(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + 3], k, v, mask=torch.arange(T) > (i + torch.arange(3))[:, None]) for i in (3, 0)]
    return torch.cat(parts, 2)


def along_heads(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + 3], k, v, mask=torch.arange(T) > (i + torch.arange(3))[:, None]) for i in (0, 3)]
    return torch.cat(parts, 1)


def along_channels(m, q, k, v):
    return torch.cat([softmaxed(q[:, :, i : i + 3], k, v) for i in (0, 3)], -1)


def other_values(m, q, k, v):
    return torch.cat([softmaxed(q[:, :, :3], k, v), softmaxed(q[:, :, 3:], k, v.flip(2))], 2)


def values_of_other_tokens(m, q, k, v):
    return torch.cat([softmaxed(q[:, :, :3], k[:, :, :5], v[:, :, :5]), softmaxed(q[:, :, 3:], k[:, :, :5], v[:, :, 1:])], 2)


def a_window_in_one(m, q, k, v):
    gap = torch.arange(T)[:, None] - torch.arange(T)
    parts = [softmaxed(q[:, :, i : i + 3], k, v, mask=((gap < 0) | (gap > 2 + i))[i : i + 3]) for i in (0, 3)]
    return torch.cat(parts, 2)


def keys_too_few(m, q, k, v):
    """A chunk that lacks a key its mask would show."""
    parts = [softmaxed(q[:, :, i : i + 3], k[:, :, : i + 2], v[:, :, : i + 2],
                       mask=torch.arange(i + 2) > (i + torch.arange(3))[:, None]) for i in (0, 3)]  # fmt: skip
    return torch.cat(parts, 2)


def other_rows_of_a_buffer(m, q, k, v):
    parts = [softmaxed(q[:, :, i : i + 3], k, v, mask=~m.triangle[:, :, 6 - i : 9 - i, :T]) for i in (0, 3)]
    return torch.cat(parts, 2)


def one_mask_for_both(m, q, k, v):
    """Rows of a buffer, the same for each chunk."""
    seen = m.triangle[:, :, 3:6, :T]
    return torch.cat([softmaxed(q[:, :, i : i + 3], k, v, mask=~seen) for i in (0, 3)], 2)


def prefixes_of_keys_so_far(m, q, k, v):
    """A prefix that reaches beyond the first chunk's keys."""
    def chunk(i):
        n = i + 3
        hidden = (torch.arange(n) > (i + torch.arange(3))[:, None]) & (torch.arange(n) >= 4)
        return softmaxed(q[:, :, i:n], k[:, :, :n], v[:, :, :n], mask=hidden)

    return torch.cat([chunk(i) for i in (0, 3)], 2)


def another_prefix(m, q, k, v):
    def chunk(i):
        hidden = (torch.arange(T) > (i + torch.arange(3))[:, None]) & (torch.arange(T) >= 2 + i)
        return softmaxed(q[:, :, i : i + 3], k, v, mask=hidden)

    return torch.cat([chunk(i) for i in (0, 3)], 2)


def rows_and_keys_of_a_buffer(m, q, k, v):
    """Keys that a chunk is not given might be seen by what the buffer holds."""
    seen = m.triangle[:, :, :T, :T].clone()
    parts = [softmaxed(q[:, :, i : i + C], k[:, :, : i + C], v[:, :, : i + C], mask=~seen[:, :, i : i + C, : i + C])
             for i in range(0, T, C)]  # fmt: skip
    return torch.cat(parts, 2)


def scaled_by_chunk(m, q, k, v):
    return torch.cat([softmaxed(q[:, :, i : i + 3], k, v, 0.3 if i else 0.2) for i in (0, 3)], 2)


# What is one attention with as many heads as there are chunks is one site, with all it reads stacked.
CHUNKS_APART = {
    a_key_later: 2, each_from_its_start: 1, within_chunks: 1, causal_within_chunks: 1, all_keys_so_far: 2, overlapping: 2,
    backwards: 2, along_heads: 2, along_channels: 1, other_values: 1, values_of_other_tokens: 1, a_window_in_one: 2,
    keys_too_few: 2, other_rows_of_a_buffer: 1, one_mask_for_both: 1, scaled_by_chunk: 2,
    rows_and_keys_of_a_buffer: 2, prefixes_of_keys_so_far: 2, another_prefix: 2,
}  # fmt: skip


@pytest.mark.parametrize("body", CHUNKS_APART)
def test_chunks_that_are_apart(body, on_any_device):
    module, args = block(body)
    assert_exact(assert_fires(NAME, module, args, CHUNKS_APART[body]), module, args)


test_conditions = conditions(
    NAME,
    disabled=lambda: block(selected),
    bfloat16=lambda: (modules()[0].bfloat16(), (draw(B, T, 12).bfloat16().requires_grad_(),)),
    inference=lambda: block(grouped, groups=2),
    autocast=lambda: modules(),
    autocast_inside=lambda: block(selected),
    length=lambda: lengths(unbound),
    everything=lambda: lengths(grouped, 2),
    chunks=lambda: block(by_offset),
    chunks_in_bfloat16=lambda: (block(of_keys_so_far)[0].bfloat16(), (draw(B, T, 12).bfloat16().requires_grad_(),)),
)
