"""Routed experts where there is one token, one sequence or one choice: dimensions of 1 that views drop, insert or keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .experts import DIM, EXPERTS, by_name, matrix, swiglu


def einsum_of_chosen(m, x, indices, gates):
    """As gpt-fast has it, over however many dimensions of tokens."""
    hidden = swiglu(torch.einsum("bsd,bskhd->bskh", x, m.gate_up[indices]))
    return torch.einsum("bskd,bsk->bsd", torch.einsum("bskh,bskdh->bskd", hidden, m.down[indices]), gates)


def matmul_of_chosen(m, x, indices, gates):
    hidden = swiglu((m.gate_up[indices] @ x[..., None, :, None]).squeeze(-1))
    return ((m.down[indices] @ hidden.unsqueeze(-1)).squeeze(-1) * gates[..., None]).sum(-2)


def bmm_of_slots(m, x, indices, gates):
    """As transformers' `batched_mm`."""
    ids = indices.reshape(-1)
    rows = x.reshape(-1, DIM).repeat_interleave(indices.shape[-1], dim=0)
    hidden = swiglu(torch.bmm(m.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1))
    out = torch.bmm(m.down[ids], hidden.unsqueeze(-1)).squeeze(-1) * gates.reshape(-1, 1)
    return out.view(-1, indices.shape[-1], DIM).sum(1).view(x.shape)


def normed_slots(m, x, indices, gates):
    """A norm of the rows that experts read multiplies each of them by one number, too, and is no gate."""
    return bmm_of_slots(m, x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt(), indices, gates)


def einsum_of_all(m, x, indices, gates):
    hidden = swiglu(torch.einsum("bsd,ehd->bseh", x, m.gate_up))
    return torch.einsum("bseh,edh,bse->bsd", hidden, m.down, matrix(indices, gates))


def one_hots_of_all(m, x, indices, gates):
    out = swiglu(x.unsqueeze(-3) @ m.gate_up.mT) @ m.down.mT
    combine = (F.one_hot(indices, EXPERTS).to(x.dtype) * gates[..., None]).sum(-2)
    return torch.einsum("besd,bse->bsd", out, combine)


# Of any number of tokens.
ANY = by_name(einsum_of_chosen, matmul_of_chosen, bmm_of_slots, normed_slots, einsum_of_all, one_hots_of_all)


# --- one token, without its dimensions


def squeezed_bmm(m, x, indices, gates):
    ids, rows = indices.squeeze(), x.squeeze().expand(indices.shape[-1], -1)
    hidden = swiglu(torch.bmm(rows.unsqueeze(1), m.gate_up[ids].mT).squeeze(1))
    out = torch.bmm(hidden.unsqueeze(1), m.down[ids].mT).squeeze(1)
    return (out * gates.squeeze()[:, None]).sum(0).view(x.shape)


def weights_by_vector(m, x, indices, gates):
    ids = indices[0, 0]
    hidden = swiglu(m.gate_up[ids] @ x[0, 0])
    return (gates[0, 0] @ (m.down[ids] @ hidden.unsqueeze(-1)).squeeze(-1))[None, None]


def vector_by_weights(m, x, indices, gates):
    ids = indices.flatten()
    hidden = swiglu(x.flatten() @ m.gate_up.index_select(0, ids).mT)
    out = torch.bmm(hidden[:, None], m.down.index_select(0, ids).mT)[:, 0]
    return torch.mm(gates.view(1, -1), out).view(x.shape)


def einsum_of_one(m, x, indices, gates, sums="kh,kdh,k->d", down=lambda ids: ids, weight=lambda row, gates: gates):
    ids, row = indices[0, 0], x[0, 0]
    hidden = swiglu(torch.einsum("d,khd->kh", row, m.gate_up[ids]))
    return torch.einsum(sums, hidden, m.down[down(ids)], weight(row, gates[0, 0])).view(x.shape)


def scaled_vector(m, x, indices, gates):
    ids = indices.view(-1)
    hidden = swiglu(torch.einsum("kd,khd->kh", x.view(1, -1) * gates.view(-1, 1), m.gate_up[ids]))
    return torch.einsum("kh,kdh->d", hidden, m.down[ids])[None, None]


ONE = by_name(squeezed_bmm, weights_by_vector, vector_by_weights, einsum_of_one, scaled_vector)


# --- near misses


def another_scale_for_the_channels(m, x, indices, gates, scale=lambda x, gates: x.reshape(-1, DIM).softmax(-1)):
    """Of one choice a token, and no gate."""
    ids = indices.flatten()
    hidden = swiglu(torch.bmm(m.gate_up[ids], x.reshape(-1, DIM, 1)).squeeze(-1))
    out = torch.bmm(m.down[ids], hidden.unsqueeze(-1)).squeeze(-1) * scale(x, gates)
    return out.view(-1, 1, DIM).sum(1).view(x.shape)


def a_gate_for_the_channels(m, x, indices, gates):
    return another_scale_for_the_channels(m, x, indices, gates, scale=lambda x, gates: gates.reshape(-1, 1))


def every_expert_works(m, x, indices, gates):
    hidden = swiglu(torch.einsum("d,ehd->eh", x[0, 0], m.gate_up))
    return torch.einsum("eh,edh,e->d", hidden, m.down, m.router(x[0, 0]).softmax(-1)).view(x.shape)


# name: (the tag of the refusal, body)
NEAR_MISSES = {
    # numbers that may be negative count from the end, as python's do
    "any_numbers": ("range", lambda m, x, i, g: squeezed_bmm(m, x, i - 1, g)),
    "other_choices_going_down": ("indices", lambda m, x, i, g: einsum_of_one(m, x, i, g, down=lambda ids: ids.flip(0))),
    "gates_of_channels": ("gates", lambda m, x, i, g: einsum_of_one(
        m, x, i, g, "kh,kdh,d->d", weight=lambda row, _: row.softmax(-1))),
    "every_expert_works": ("dense-gates", every_expert_works),
}  # fmt: skip
