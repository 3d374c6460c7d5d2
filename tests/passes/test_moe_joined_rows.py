"""Experts whose rows are joined by `cat` and added up at once, at their tokens, which are joined alike."""

from __future__ import annotations

import pytest
import torch

from .contract import assert_autocast, assert_dynamic, assert_fires, assert_half_precision, assert_refused
from .experts import DIM, MoE


def of_experts(m, x, indices, gates):
    """(outputs, tokens, gates) of every expert."""
    found = [torch.where(indices == e) for e in range(m.num_experts)]
    outs = [expert(x[token]) for expert, (token, _) in zip(m.experts, found, strict=True)]
    return outs, [token for token, _ in found], [gates[at] for at in found]


def summed(x, tokens, rows, **kwargs):
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), rows.to(x.dtype), **kwargs)


def weighted_one_by_one(m, x, indices, gates):
    outs, tokens, own = of_experts(m, x, indices, gates)
    return summed(x, tokens, torch.cat([out * g[:, None] for out, g in zip(outs, own, strict=True)]))


def weighted_at_once(m, x, indices, gates):
    outs, tokens, own = of_experts(m, x, indices, gates)
    return summed(x, tokens, torch.cat(own).unsqueeze(-1) * torch.cat(outs))


def by_columns_of_gates(m, x, indices, gates):
    outs, tokens, own = of_experts(m, x, indices, gates)
    return summed(x, tokens, torch.cat(outs, dim=0) * torch.cat([g.view(-1, 1) for g in own]))


def scattered(m, x, indices, gates):
    outs, tokens, own = of_experts(m, x, indices, gates)
    rows = (torch.cat(outs) * torch.cat(own)[:, None]).to(x.dtype)
    at = torch.cat(tokens)[:, None].expand_as(rows)
    return torch.zeros_like(x).scatter_add_(0, at, rows)


def put(m, x, indices, gates):
    outs, tokens, own = of_experts(m, x, indices, gates)
    rows = (torch.cat(outs) * torch.cat(own)[:, None]).to(x.dtype)
    return torch.zeros_like(x).index_put((torch.cat(tokens),), rows, accumulate=True)


def to_the_residual(m, x, indices, gates):
    outs, tokens, own = of_experts(m, x, indices, gates)
    return x.index_add(0, torch.cat(tokens), (torch.cat(outs) * torch.cat(own)[:, None]).to(x.dtype))


def without_gates(m, x, indices, gates):
    outs, tokens, _ = of_experts(m, x, indices, gates)
    return summed(x, tokens, torch.cat(outs))


def last_expert_first(m, x, indices, gates):
    outs, tokens, own = (part[::-1] for part in of_experts(m, x, indices, gates))
    return summed(x, tokens, torch.cat(outs) * torch.cat(own)[:, None])


FIRES = [weighted_one_by_one, weighted_at_once, by_columns_of_gates, scattered, put, to_the_residual, without_gates,
         last_expert_first]  # fmt: skip


def tokens(n=11, dtype=torch.float64):
    return (torch.randn(n, DIM, dtype=dtype).requires_grad_(),)


@pytest.mark.parametrize("body", FIRES, ids=lambda body: body.__name__)
def test_fires(body):
    assert_fires("moe", MoE(body).double(), tokens())


@pytest.mark.parametrize("body", [weighted_one_by_one, scattered], ids=lambda body: body.__name__)
def test_every_length(body):
    assert_dynamic("moe", MoE(body), lambda n: tokens(n, torch.float32), everything=True)


def test_sixteen_bits():
    assert_half_precision("moe", MoE(weighted_at_once).bfloat16(), tokens(200, torch.bfloat16))


@pytest.mark.parametrize("body", [weighted_one_by_one, scattered, put], ids=lambda body: body.__name__)
def test_autocast(body):
    assert_autocast("moe", MoE(body), tokens(200, torch.float32))


# --- what stays


def gates_of_another_expert(m, x, indices, gates):
    outs, at, own = of_experts(m, x, indices, gates)
    joined, mixed = torch.cat(outs), torch.cat(own[::-1])
    return summed(x, at, joined * mixed[:, None])


def rows_of_another_expert(m, x, indices, gates):
    outs, at, own = of_experts(m, x, indices, gates)
    return summed(x, at[::-1], torch.cat(outs) * torch.cat(own)[:, None])


def an_expert_twice(m, x, indices, gates):
    outs, at, own = (part + part[:1] for part in of_experts(m, x, indices, gates))
    return summed(x, at, torch.cat(outs) * torch.cat(own)[:, None])


def twice_as_much(m, x, indices, gates):
    outs, at, own = of_experts(m, x, indices, gates)
    return summed(x, at, torch.cat(outs) * torch.cat(own)[:, None], alpha=2)


def read_elsewhere(m, x, indices, gates):
    outs, at, own = of_experts(m, x, indices, gates)
    joined = torch.cat(outs)
    return summed(x, at, joined * torch.cat(own)[:, None]) + joined.mean()


NEAR_MISSES = {gates_of_another_expert: "no-rows", rows_of_another_expert: "no-rows", an_expert_twice: "twice",
               twice_as_much: "no-rows", read_elsewhere: "escapes"}  # fmt: skip


@pytest.mark.parametrize(("body", "tag"), NEAR_MISSES.items(), ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_refused(body, tag):
    assert_refused("moe", tag, MoE(body), tokens(dtype=torch.float32))
