"""Scores of an indexer: found in every spelling, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.passes import index_scores
from tests.frames import check_graph, render

from .conditions import conditions, shown
from .contract import assert_fires, assert_refused

NAME = "index_scores"
HEADS, WIDTH, DIM, TOKENS = 3, 8, 20, 7


class Indexer(nn.Module):
    """`body(q, k, weights)`, with [batch, tokens, heads, width], [batch, tokens, width], [batch, tokens, heads]."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.q, self.k, self.w = (nn.Linear(DIM, n, bias=False) for n in (HEADS * WIDTH, WIDTH, HEADS))

    def forward(self, x):
        return self.body(self.q(x).unflatten(-1, (HEADS, WIDTH)), self.k(x), self.w(x))


def build(body, dtype=torch.float32):
    torch.manual_seed(0)
    return Indexer(body).to(dtype), (torch.randn(2, TOKENS, DIM).to(dtype).requires_grad_(),)


def by_matmul(q, k, w):
    """As DeepSeek-V3.2 and GLM-5 in transformers."""
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * WIDTH**-0.5
    return torch.matmul((w.float() * HEADS**-0.5).unsqueeze(-2), F.relu(scores)).squeeze(-2)


def tokens_first(q, k, w):
    """As Megatron Core's."""
    q, k, w = (t.transpose(0, 1) for t in (q, k, w))
    scores = torch.relu(torch.einsum("sbhd,tbd->sbht", q.float(), k.float()))
    return (scores * w.unsqueeze(-1)).sum(dim=2).transpose(0, 1)


def by_einsums(q, k, w):
    return torch.einsum("bths,bth->bts", torch.einsum("bthc,bsc->bths", q, k).clamp(min=0), w)


def heads_first(q, k, w):
    scores = (q.transpose(1, 2) @ k.transpose(1, 2)[:, None]).relu() * 0.3
    return (scores * w.transpose(1, 2)[..., None]).sum(1)


def by_bmm(q, k, w):
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).unflatten(1, (-1, HEADS)).relu()
    return (w[..., None] * scores).sum(-2)


def repeated_keys(q, k, w):
    k = k[:, :, None].expand(-1, -1, HEADS, -1)
    return (torch.einsum("bthc,bshc->bhts", q, k).clamp_min(0) * w.transpose(1, 2)[..., None]).sum(1)


def scaled_operands(q, k, w):
    return (F.relu(torch.einsum("bthc,bsc->bhts", q * 0.5, k) / 3) * w.mT.unsqueeze(-1)).sum(1, keepdim=True).squeeze(1)


def one_sequence(q, k, w):
    return torch.stack([(torch.einsum("thc,sc->ths", a, b).relu() * c[..., None]).sum(1) for a, b, c in zip(q, k, w, strict=True)])


def keys_first(q, k, w):
    return (torch.einsum("bsc,bthc->bsth", k, q).relu() * w[:, None]).sum(-1).mT


def over_queries(q, k, w):
    """The same sum, with heads in the place of queries."""
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None]).sum(1)


SPELLINGS = [by_matmul, tokens_first, by_einsums, heads_first, by_bmm, repeated_keys, scaled_operands, keys_first,
             over_queries]  # fmt: skip


@pytest.mark.parametrize("body", SPELLINGS, ids=shown)
def test_is_the_same_in_float64(body):
    """Scores and the gradient of every weight, but where a model computes in float32."""
    tolerance = 1e-6 if body in (by_matmul, tokens_first) else 1e-12
    frames = check_graph(*build(body, torch.float64), tolerance=tolerance)
    assert frames.counts[NAME] == 1, frames.misses
    shapes = [tuple(n.meta["val"].shape) for n in frames.graph.graph.nodes if torch.is_tensor(n.meta.get("val"))]
    assert not [s for s in shapes if s.count(TOKENS) > 1 and HEADS in s], "scores of each head are made"


def test_each_sequence_by_itself():
    assert_fires(NAME, *build(one_sequence), count=2)


test_conditions = conditions(
    NAME, bfloat16=lambda: build(by_matmul, torch.bfloat16), disabled=lambda: build(by_einsums),
    inference=lambda: build(by_matmul), autocast=lambda: build(by_einsums),
    length=lambda: (Indexer(by_matmul), lambda n: (torch.randn(2, n, DIM, requires_grad=True),)),
    everything=lambda: (Indexer(by_einsums), lambda n: (torch.randn(2, n, DIM, requires_grad=True),)),
)  # fmt: skip


def test_graph():
    """Under `no_grad` and behind it a mask and top-k, which stay."""

    def chosen(q, k, w):
        with torch.no_grad():
            scores = by_matmul(q, k, w)
        return scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf).topk(2).indices

    module, args = build(chosen, torch.bfloat16)
    frames = assert_fires(NAME, module, tuple(a.detach() for a in args), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: bf16[2, 7, 24] = linear(x, q_weight)
view: bf16[2, 7, 3, 8] = view(linear, [2, 7, 3, 8])
linear_1: bf16[2, 7, 8] = linear(x, k_weight)
linear_2: bf16[2, 7, 3] = linear(x, w_weight)
_set_grad_enabled(False)
transpose: bf16[2, 8, 7] = transpose.int(linear_1, -1, -2)
to_copy: f32[2, 7, 3] = _to_copy(linear_2, dtype=float32)
mul: f32[2, 7, 3] = mul.Tensor(to_copy, 0.5773502691896257)
unsqueeze: f32[2, 7, 1, 3] = unsqueeze(mul, -2)
permute: bf16[2, 7, 8] = permute(transpose, [0, 2, 1])
squeeze: f32[2, 7, 3] = squeeze.dims(unsqueeze, [2])
index_scores: f32[2, 7, 7] = megacpp.index_scores(view, permute, squeeze, 0.3535533905932738, float32)
unsqueeze_1: f32[2, 7, 1, 7] = unsqueeze(index_scores, 2)
squeeze_1: f32[2, 7, 7] = squeeze.dim(unsqueeze_1, -2)
_set_grad_enabled(True)
ones: b8[7, 7] = ones([7, 7], dtype=bool, device=cpu, pin_memory=False)
triu: b8[7, 7] = triu(ones, 1)
masked_fill: f32[2, 7, 7] = masked_fill.Scalar(squeeze_1, triu, -inf)
topk: (f32[2, 7, 2], i64[2, 7, 2]) = topk(masked_fill, 2)
getitem: i64[2, 7, 2] = topk[1]
return [getitem]""")


def keys_of_heads(q, k, w):
    k = torch.stack([k * (i + 1) for i in range(HEADS)], 2)
    return (torch.einsum("bthc,bshc->bhts", q, k).relu() * w.mT.unsqueeze(-1)).sum(1)


def weights_of_keys(q, k, w):
    return (torch.einsum("bthc,bsc->bhts", q, k).relu() * w.mT.unsqueeze(-2)).sum(1)


def heads_kept(q, k, w):
    scores = torch.einsum("bthc,bsc->bths", q, k).relu()
    return (scores * w[..., None]).sum(2) + scores.mean(2)


REFUSED = {"keys": keys_of_heads, "weights": weights_of_keys, "escapes": heads_kept}


@pytest.mark.parametrize("tag", REFUSED)
def test_refused(tag):
    assert_refused(NAME, tag, *build(REFUSED[tag]))


def test_float32_stays_on_a_gpu(monkeypatch):
    """Told by the result's device; bfloat16 fires there."""
    monkeypatch.setattr(index_scores, "on_cuda", lambda node: True)
    assert_refused(NAME, "dtype", *build(by_einsums))
    assert_fires(NAME, *build(by_matmul, torch.bfloat16))


def by_gelu(q, k, w):
    return (F.gelu(torch.einsum("bthc,bsc->bths", q, k)) * w[..., None]).sum(2)


def two_weights(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None] * w.sigmoid()[..., None]).sum(2)


def masked_between(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None]).tril().sum(2)


def mean_of_heads(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None]).mean(2)


def largest_of_heads(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None]).amax(2)


def over_keys(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None]).sum(-1)


def over_heads_and_keys(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w[..., None]).sum((2, 3))


def with_a_bias(q, k, w):
    return ((torch.einsum("bthc,bsc->bths", q, k) + w[..., None]).relu() * w[..., None]).sum(2)


def capped(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).clamp(0, 6) * w[..., None]).sum(2)


def above_a_number(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).clamp(min=0.1) * w[..., None]).sum(2)


def turned_around(q, k, w):
    """A negative number behind."""
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * -2 * w[..., None]).sum(2)


def squared(q, k, w):
    return (torch.einsum("bthc,bsc->bths", q, k).relu().square() * w[..., None]).sum(2)


def without_weights(q, k, w):
    return torch.einsum("bthc,bsc->bths", q, k).relu().sum(2) + w.sum()


def by_itself(q, k, w):
    scores = torch.einsum("bthc,bsc->bths", q, k).relu()
    return (scores * scores).sum(2) + w.sum()


def many_heads(q, k, w):
    """A sum over more than heads are."""
    q, w = (t.repeat(1, 50, 1, 1)[:, :300] for t in (q, w[..., None]))
    return (torch.einsum("bthc,bsc->bths", q, k).relu() * w).sum(1)


LEFT = [by_gelu, two_weights, masked_between, mean_of_heads, largest_of_heads, over_keys,
        over_heads_and_keys, many_heads, with_a_bias, capped, above_a_number, turned_around, squared, without_weights, by_itself]  # fmt: skip


@pytest.mark.parametrize("body", LEFT, ids=shown)
def test_left_as_it_is(body):
    frames = check_graph(*build(body, torch.float64), tolerance=1e-12)
    assert not frames.counts[NAME]
