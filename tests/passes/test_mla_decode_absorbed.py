"""Latent attention that a model absorbs itself: a near miss where it is trained, in every spelling, and nowhere else."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.config.options import Config
from tests.frames import check, check_graph

from .conditions import sampled, shown

NAME = "mla_decode"
B, T, D, H, N, P, R, V = 2, 6, 20, 3, 4, 2, 8, 5


class Absorbed(nn.Module):
    """Queries of N and P channels, latents of R and rope keys of P, for `body(m, q_nope, q_rope, latents, ropes)`."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.q, self.kv_a = nn.Linear(D, H * (N + P), bias=False), nn.Linear(D, R + P, bias=False)
        self.kv_b, self.wide = nn.Linear(R, H * (N + V), bias=False), nn.Linear(D, H * R, bias=False)

    def forward(self, x):
        q_nope, q_rope = self.q(x).view(*x.shape[:2], H, N + P).split([N, P], -1)
        latents, ropes = self.kv_a(x).split([R, P], -1)
        self.x = x
        return self.body(self, q_nope, q_rope, F.rms_norm(latents, (R,)), ropes.sin())

    @property
    def up(self):
        return self.kv_b.weight.view(H, N + V, R).split([N, V], 1)


def queries(m, q_nope, q_rope):
    return torch.cat((torch.einsum("bthn,hnr->bhtr", q_nope, m.up[0]), q_rope.transpose(1, 2)), -1)


def results(m, out):
    return torch.einsum("bhtr,hvr->bthv", out, m.up[1]).flatten(2)


def shared(x):
    return x[:, None].expand(-1, H, -1, -1)


def by_op(m, q_nope, q_rope, c, ropes):
    q, k = queries(m, q_nope, q_rope), shared(torch.cat((c, ropes), -1))
    return results(m, F.scaled_dot_product_attention(q, k, shared(c), is_causal=True, scale=0.4))


def by_op_for_groups(m, q_nope, q_rope, c, ropes):
    rows = torch.cat((c, ropes), -1)[:, None]
    q = queries(m, q_nope, q_rope) * 0.4
    return results(m, F.scaled_dot_product_attention(q, rows, rows[..., :R], scale=1.0, enable_gqa=True))


def repeated(m, q_nope, q_rope, c, ropes):
    k, v = (x[:, None].repeat(1, H, 1, 1) for x in (torch.cat((ropes, c), -1), c))
    q = torch.cat((q_rope.transpose(1, 2), q_nope.transpose(1, 2) @ m.up[0]), -1)
    return results(m, F.scaled_dot_product_attention(q, k, v))


def deepseek(m, q_nope, q_rope, c, ropes):
    """DeepSeek-V3's inference code (https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/model.py)."""
    q = torch.einsum("bshd,hdc->bshc", q_nope, m.up[0])
    scores = torch.einsum("bshc,btc->bsht", q, c) + torch.einsum("bshr,btr->bsht", q_rope, ropes)
    scores = scores * 0.4 + torch.full((T, T), float("-inf")).triu(1).unsqueeze(1)
    out = torch.einsum("bsht,btc->bshc", scores.softmax(-1, dtype=torch.float32).type_as(c), c)
    return torch.einsum("bshc,hdc->bshd", out, m.up[1]).flatten(2)


def by_bmm(m, q_nope, q_rope, c, ropes):
    q = torch.bmm(q_nope.permute(2, 0, 1, 3).reshape(H, B * T, N), m.up[0]).view(H, B, T, R).transpose(0, 1)
    q = torch.cat((q, q_rope.transpose(1, 2)), -1).reshape(B, H * T, R + P)
    weights = (torch.bmm(q, torch.cat((c, ropes), -1).mT) * 0.4).softmax(-1)
    return results(m, torch.bmm(weights, c).view(B, H, T, R))


def without_ropes(m, q_nope, q_rope, c, ropes):
    weights = (torch.einsum("bthn,hnr->bhtr", q_nope, m.up[0]) @ c[:, None].mT * 0.4).softmax(-1)
    return results(m, weights @ c[:, None])


SPELLINGS = [by_op, by_op_for_groups, repeated, deepseek, by_bmm, without_ropes]


def case(body):
    torch.manual_seed(0)
    return Absorbed(body), (torch.randn(B, T, D),)


def missed(module, args, how=check_graph):
    return [m for m in how(module, args, Config()).misses if m.pass_name == NAME]


@pytest.mark.parametrize("body", SPELLINGS, ids=shown)
def test_trained(body):
    (miss,) = missed(*case(body))
    p = 0 if body is without_ropes else P
    assert miss.tag == "training" and f"{R + p} channels instead of {N + p}" in miss.reason


def test_through_dynamo_of_symbolic_sizes():
    how = functools.partial(check, dynamic=True)
    assert [m.tag for m in missed(*case(by_op), how=how)] == ["training"]


@pytest.mark.parametrize("body", SPELLINGS, ids=shown)
def test_decoding_is_no_news(body):
    module, args = case(body)
    assert not missed(module.requires_grad_(False), args)
    with torch.no_grad():
        assert not missed(module.requires_grad_(True), args)


def of_one_projection(m, q_nope, q_rope, c, ropes):
    """Shared keys that are values, too, and queries as wide, as in DeepSeek-V4: nothing is absorbed."""
    q = m.wide(m.x).view(B, T, H, R).transpose(1, 2)
    return results(m, F.scaled_dot_product_attention(q, shared(c), shared(c), is_causal=True))


def values_of_their_own(m, q_nope, q_rope, c, ropes):
    q, k = queries(m, q_nope, q_rope), shared(torch.cat((c, ropes), -1))
    return results(m, F.scaled_dot_product_attention(q, k, shared(m.wide(m.x)[..., :R])))


def values_of_other_channels(m, q_nope, q_rope, c, ropes):
    q, k = queries(m, q_nope, q_rope), shared(torch.cat((c, ropes), -1))
    return results(m, F.scaled_dot_product_attention(q, k, shared(c.flip(-1))))


def keys_of_each_head(m, q_nope, q_rope, c, ropes):
    q, k = queries(m, q_nope, q_rope)[..., :R], m.wide(m.x).view(B, T, H, R).transpose(1, 2)
    return results(m, F.scaled_dot_product_attention(q, k, k))


def expanded(m, q_nope, q_rope, c, ropes):
    k, v = m.kv_b(c).view(B, T, H, N + V).transpose(1, 2).split([N, V], -1)
    q, k = torch.cat((q_nope, q_rope), -1).transpose(1, 2), torch.cat((k, shared(ropes)), -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2)


def one_weight_for_all_heads(m, q_nope, q_rope, c, ropes):
    q = (q_nope @ m.up[0][0]).transpose(1, 2)
    return results(m, F.scaled_dot_product_attention(q, shared(c), shared(c)))


def narrow_latents(m, q_nope, q_rope, c, ropes):
    """Fewer channels than the heads have: absorbed takes fewer."""
    q = torch.einsum("bthn,hnr->bhtr", q_nope, m.up[0][..., :2])
    return F.scaled_dot_product_attention(q, shared(c[..., :2]), shared(c[..., :2]))


@sampled(4, "body", [of_one_projection, values_of_their_own, values_of_other_channels, keys_of_each_head, expanded,
                     one_weight_for_all_heads, narrow_latents], ids=shown)  # fmt: skip
def test_what_is_not_absorbed(body):
    assert not missed(*case(body))
