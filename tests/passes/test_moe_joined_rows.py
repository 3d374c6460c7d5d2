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


def at_once(outs, own):
    return torch.cat(outs) * torch.cat(own)[:, None]


def joined(rows=at_once, add=None, changed=lambda parts: parts, **kwargs):
    """The body that adds `rows(outputs, gates)` at the tokens, of `changed` (outputs, tokens, gates)."""

    def body(m, x, indices, gates):
        outs, tokens, own = changed(of_experts(m, x, indices, gates))
        made = rows(outs, own)
        return summed(x, tokens, made, **kwargs) if add is None else add(x, torch.cat(tokens), made.to(x.dtype))

    return body


FIRES = {
    "weighted_one_by_one": joined(
        lambda outs, own: torch.cat([out * g[:, None] for out, g in zip(outs, own, strict=True)])),
    "weighted_at_once": joined(lambda outs, own: torch.cat(own).unsqueeze(-1) * torch.cat(outs)),
    "by_columns_of_gates": joined(
        lambda outs, own: torch.cat(outs, dim=0) * torch.cat([g.view(-1, 1) for g in own])),
    "scattered": joined(
        add=lambda x, at, rows: torch.zeros_like(x).scatter_add_(0, at[:, None].expand_as(rows), rows)),
    "put": joined(add=lambda x, at, rows: torch.zeros_like(x).index_put((at,), rows, accumulate=True)),
    "to_the_residual": joined(add=lambda x, at, rows: x.index_add(0, at, rows)),
    "without_gates": joined(lambda outs, _: torch.cat(outs)),
    "last_expert_first": joined(changed=lambda parts: [part[::-1] for part in parts]),
}  # fmt: skip


def tokens(n=11, dtype=torch.float64):
    return (torch.randn(n, DIM, dtype=dtype).requires_grad_(),)


@pytest.mark.parametrize("name", FIRES)
def test_fires(name):
    assert_fires("moe", MoE(FIRES[name]).double(), tokens())


@pytest.mark.parametrize("name", ["weighted_one_by_one", "scattered"])
def test_every_length(name):
    assert_dynamic("moe", MoE(FIRES[name]), lambda n: tokens(n, torch.float32), everything=True)


@pytest.mark.end_to_end
def test_sixteen_bits():
    assert_half_precision("moe", MoE(FIRES["weighted_at_once"]).bfloat16(), tokens(200, torch.bfloat16))


@pytest.mark.parametrize("name", ["weighted_one_by_one", "scattered", "put"])
def test_autocast(name):
    assert_autocast("moe", MoE(FIRES[name]), tokens(200, torch.float32))


def read_elsewhere(m, x, indices, gates):
    outs, at, own = of_experts(m, x, indices, gates)
    made = torch.cat(outs)
    return summed(x, at, made * torch.cat(own)[:, None]) + made.mean()


# name: (the tag of the refusal, body)
NEAR_MISSES = {
    "gates_of_another_expert": ("no-rows", joined(lambda outs, own: torch.cat(outs) * torch.cat(own[::-1])[:, None])),
    "rows_of_another_expert": ("no-rows", joined(changed=lambda parts: (parts[0], parts[1][::-1], parts[2]))),
    "an_expert_twice": ("twice", joined(changed=lambda parts: [part + part[:1] for part in parts])),
    "twice_as_much": ("no-rows", joined(alpha=2)),
    "read_elsewhere": ("escapes", read_elsewhere),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_refused(name):
    tag, body = NEAR_MISSES[name]
    assert_refused("moe", tag, MoE(body), tokens(dtype=torch.float32))
