"""Routed experts by masks, by matrices of gates and by GEMMs over all experts at once, and what looks like them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import CHOICES, DIM, EXPERTS

GROUPED_MM = getattr(F, "grouped_mm", torch._grouped_mm)  # which torch 2.9 has under its private name alone


def matrix(indices: Tensor, gates: Tensor) -> Tensor:
    """[T, E], zero where an expert was not chosen."""
    return torch.zeros(*gates.shape[:-1], EXPERTS, dtype=gates.dtype).scatter(-1, indices, gates)


def one_hots(indices: Tensor, gates: Tensor) -> Tensor:
    return (F.one_hot(indices, EXPERTS).to(gates.dtype) * gates[..., None]).sum(1)


# --- modules of their own


def dense_loop(m, x, indices, gates):
    combine, y = matrix(indices, gates), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y += combine[:, e, None] * expert(x)
    return y


def dense_sum_of_batches(m, x, indices, gates):
    """As python's `sum`, with more than one dimension of tokens."""
    x, combine = x.view(1, -1, DIM).expand(2, -1, -1), matrix(*(t.expand(2, -1, -1) for t in (indices, gates)))
    return sum(expert(x) * combine[..., e : e + 1] for e, expert in enumerate(m.experts))[0]


def dense_on_the_residual(m, x, indices, gates):
    y = x
    for share, expert in zip(one_hots(indices, gates).unbind(-1), m.experts, strict=True):
        y = y + expert(x) * share.unsqueeze(-1)
    return y


def dense_masked_scores(m, x, indices, gates):
    """All scores but the largest struck out, as Switch Transformers' mask does."""
    scores = m.router(x).softmax(-1)
    kept = scores * F.one_hot(scores.topk(CHOICES, -1).indices, EXPERTS).sum(1)
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.stack([expert(x) for expert in m.experts], 1).mul(kept.unsqueeze(-1)).sum(1)


def in_turn(indices, gates, which=range(CHOICES)):
    """`matrix`, one choice of every token after the other."""
    found = torch.zeros(*gates.shape[:-1], EXPERTS, dtype=gates.dtype)
    for i in which:
        found.scatter_(dim=-1, index=indices[..., i : i + 1], src=gates[..., i : i + 1])
    return found


def dense_cat_of_choices_in_turn(m, x, indices, gates):
    """As "LLMs from scratch" has Qwen3's experts."""
    outs = torch.cat([expert(x).unsqueeze(-2) for expert in m.experts], dim=-2)
    return (in_turn(indices, gates).unsqueeze(-1) * outs).sum(dim=-2)


def dense_marked_gates(m, x, indices, gates):
    """No matrix: every expert sums up the gates of the choices that are it."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y += (gates * (indices == e)).sum(dim=-1, keepdim=True) * expert(x)
    return y


def dense_marks_as_numbers(m, x, indices, gates):
    return sum(expert(x) * ((indices == e).to(x.dtype) * gates).sum(1)[:, None] for e, expert in enumerate(m.experts))


def dense_gates_where_chosen(m, x, indices, gates):
    y = x
    for e, expert in enumerate(m.experts):
        y = y + torch.where(indices == e, gates, 0.0).sum(-1).unsqueeze(-1) * expert(x)
    return y


def dense_stack_einsum(m, x, indices, gates):
    combine = torch.einsum("tk,tke->te", gates, F.one_hot(indices, EXPERTS).to(gates.dtype))
    return torch.einsum("etd,te->td", torch.stack([expert(x) for expert in m.experts]), combine)


def mask_any_choice(m, x, indices, gates):
    """As makeMoE and nanoMoE have it, but for their branch: a softmax over what is minus infinity elsewhere."""
    combine = torch.full_like(m.router(x), float("-inf")).scatter(-1, indices, gates).softmax(-1)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (indices == e).any(dim=-1)
        y[mask] += expert(x[mask]) * combine[mask, e].unsqueeze(1)
    return y


def mask_any_of_flattened_choices(m, x, indices, gates):
    """Chosen for tokens in two dimensions, and read with these in one."""
    scores, chosen = m.router(x.unsqueeze(0)).softmax(-1).topk(CHOICES, dim=-1)
    gates, indices = scores.reshape(-1, CHOICES), chosen.reshape(-1, CHOICES)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = indices == e
        token = mask.any(dim=-1).nonzero().squeeze(-1)
        y.index_add_(0, token, expert(x.index_select(0, token)) * (gates * mask).sum(-1)[token].unsqueeze(-1))
    return y


def mask_and_marked_gates(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        hit = indices == e
        mask = hit.any(dim=-1)
        y[mask] += expert(x[mask]) * (gates * hit).sum(-1)[mask].unsqueeze(-1)
    return y


def mask_of_each_choice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        for e, expert in enumerate(m.experts):
            mask = indices[:, k] == e
            y[mask] += gates[mask][:, k, None] * expert(x[mask])
    return y


def mask_of_the_first_choice(m, x, indices, gates):
    first, gate, y = indices[:, 0], gates[:, 0], torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = first == e
        y[mask] = expert(x[mask]) * gate[mask, None]
    return y


def mask_of_the_largest(m, x, indices, gates):
    scores = m.router(x).softmax(-1)
    best, y = scores.argmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y[best == e] += expert(x[best == e]) * scores[best == e, e, None]
    return y


def slots_in_their_places(m, x, indices, gates):
    """As DeepSeek's own modelling files train."""
    slots, rows = indices.view(-1), x.repeat_interleave(indices.shape[-1], dim=0)
    y = torch.empty_like(rows)
    for e, expert in enumerate(m.experts):
        y[slots == e] = expert(rows[slots == e])
    return (y.view(*gates.shape, -1) * gates.unsqueeze(-1)).sum(dim=1)


def slots_in_other_places(m, x, indices, gates):
    """Tokens repeated as a whole, not each of them: experts are those of single rows, and the sum is added up behind."""
    slots, rows = indices.view(-1), x.repeat(CHOICES, 1)
    y = torch.empty_like(rows)
    for e, expert in enumerate(m.experts):
        y[slots == e] = expert(rows[slots == e])
    return (y.view(*gates.shape, -1) * gates.unsqueeze(-1)).sum(dim=1)


def scatter_add(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        y.scatter_add_(0, token[:, None].expand(-1, DIM), expert(x[token]) * gates[token, choice, None])
    return y


def _scatter_reduce(m, x, indices, gates, **kwargs):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        places = token.unsqueeze(-1).repeat(1, DIM)
        y = y.scatter_reduce(0, places, expert(x[token]) * gates[token, choice, None], **kwargs)
    return y


def scatter_reduce(m, x, indices, gates):
    return _scatter_reduce(m, x, indices, gates, reduce="sum")


LISTS = [dense_loop, dense_cat_of_choices_in_turn, dense_sum_of_batches, dense_on_the_residual, dense_masked_scores, dense_stack_einsum,
         dense_marked_gates, dense_marks_as_numbers, dense_gates_where_chosen,
         mask_any_choice, mask_any_of_flattened_choices, mask_and_marked_gates, mask_of_each_choice, mask_of_the_first_choice, mask_of_the_largest,
         slots_in_their_places, slots_in_other_places, scatter_add, scatter_reduce]  # fmt: skip


# --- stacked weights


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def einsum_of_all(m, x, indices, gates):
    hidden = _swiglu(torch.einsum("td,ehd->teh", x, m.gate_up))
    return torch.einsum("ted,te->td", torch.einsum("teh,edh->ted", hidden, m.down), matrix(indices, gates))


def bmm_with_biases(m, x, indices, gates):
    """As transformers' dense GEMMs with biases, which a gate of 0 strikes out."""
    rows = x.repeat(EXPERTS, 1).view(EXPERTS, -1, DIM)
    hidden = _swiglu(torch.bmm(rows, m.gate_up.mT) + m.gate_up.sum(-1)[..., None, :])
    out = torch.bmm(hidden, m.down.mT) + m.down.sum(-1)[:, None]
    return (out * matrix(indices, gates).transpose(0, 1).view(EXPERTS, -1, 1)).sum(dim=0)


def einsum_with_biases(m, x, indices, gates):
    hidden = _swiglu(torch.einsum("td,ehd->teh", x, m.gate_up) + m.gate_up.sum(-1))
    return torch.einsum("ted,te->td", torch.einsum("teh,edh->ted", hidden, m.down) + m.down.sum(-1), matrix(indices, gates))


def einsum_of_chosen_with_biases(m, x, indices, gates):
    """As OpenAI's own model has it: channels in turn, clamped, every choice with its own copy of weights and biases."""
    both = torch.einsum("beck,bk->bec", m.gate_up[indices], x) + m.gate_up.mean(-1)[indices]
    gate, up = both[..., ::2].clamp(min=None, max=0.7), both[..., 1::2].clamp(min=-0.7, max=0.7)
    hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    out = torch.einsum("beck,bek->bec", m.down[indices], hidden) + m.down.mean(-1)[indices]
    return torch.einsum("bec,be->bc", out, gates)


def einsum_of_three(m, x, indices, gates):
    hidden = _swiglu(torch.einsum("td,ehd->eth", x, m.gate_up))
    return torch.einsum("eth,edh,te->td", hidden, m.down, matrix(indices, gates))


def bmm_of_all(m, x, indices, gates):
    """Dense GEMMs as transformers has them for inference."""
    rows = x.repeat(EXPERTS, 1).view(EXPERTS, -1, DIM)
    out = torch.bmm(_swiglu(torch.bmm(rows, m.gate_up.transpose(1, 2))), m.down.transpose(1, 2))
    return (out * matrix(indices, gates).transpose(0, 1).view(EXPERTS, -1, 1)).sum(dim=0)


def matmul_of_all(m, x, indices, gates):
    out = _swiglu(x.unsqueeze(0) @ m.gate_up.mT) @ m.down.mT
    return torch.bmm(out.permute(1, 2, 0), one_hots(indices, gates)[..., None]).squeeze(-1)


def einsum_of_chosen(m, x, indices, gates):
    """As gpt-fast has it."""
    hidden = _swiglu(torch.einsum("td,tkhd->tkh", x, m.gate_up[indices]))
    return torch.einsum("tkd,tk->td", torch.einsum("tkh,tkdh->tkd", hidden, m.down[indices]), gates)


def matmul_of_chosen(m, x, indices, gates):
    hidden = _swiglu((m.gate_up[indices] @ x[:, None, :, None]).squeeze(-1))
    return ((m.down[indices] @ hidden.unsqueeze(-1)).squeeze(-1) * gates[..., None]).sum(1)


def bmm_of_slots(m, x, indices, gates):
    ids = indices.view(-1)
    rows = x[:, None].expand(-1, CHOICES, -1).reshape(-1, 1, DIM)
    out = torch.bmm(_swiglu(torch.bmm(rows, m.gate_up[ids].mT)), m.down[ids].mT).squeeze(1)
    return (out.view(-1, CHOICES, DIM) * gates.unsqueeze(-1)).sum(1)


def scaled_rows_of_all(m, x, indices, gates):
    """As transformers' Llama 4: every expert reads every token, times its score, which is 0 but for the chosen."""
    scores = torch.full_like(m.router(x), float("-inf")).scatter_(1, indices, gates).sigmoid()
    rows = (x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)).view(EXPERTS, -1, DIM)
    out = torch.bmm(_swiglu(torch.bmm(rows, m.gate_up.mT)), m.down.mT).view(-1, DIM)
    return out.reshape(EXPERTS, -1, DIM).sum(dim=0)


def scaled_rows_of_chosen(m, x, indices, gates, outer: Tensor | None = None):
    ids = indices.view(-1)
    rows = (x[:, None] * gates[..., None]).reshape(-1, 1, DIM)
    out = torch.bmm(_swiglu(torch.bmm(rows, m.gate_up[ids].mT)), m.down[ids].mT).view(-1, CHOICES, DIM)
    return (out if outer is None else out * outer[..., None]).sum(1)


STACKED = [einsum_of_all, einsum_of_three, bmm_of_all, matmul_of_all, einsum_of_chosen, matmul_of_chosen, bmm_of_slots,
           scaled_rows_of_all, scaled_rows_of_chosen, bmm_with_biases, einsum_with_biases,
           einsum_of_chosen_with_biases]  # fmt: skip


# --- rows sorted by expert, in bfloat16


def _sorted(m, x, indices, gates, top: int | None = None, marked: int = 0, first: bool = False):
    ids = indices.reshape(-1)
    order = ids.argsort(stable=True)
    if top is None:
        marks = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter(-1, (indices + marked) % EXPERTS if marked else indices, True)
        ends = marks.sum(0).cumsum(0, dtype=torch.int32)
    else:
        ends = torch.histc(ids.float(), EXPERTS, 0, top).cumsum(0).to(torch.int32)

    def expert(rows):
        if first:
            rows = rows * gates.view(-1)[order, None]
        hidden = _swiglu(torch._grouped_mm(rows, m.gate_up.mT, offs=ends))
        out = torch._grouped_mm(hidden, m.down.mT, offs=ends)
        return out if first else out * gates.view(-1)[order, None]

    return order // CHOICES, expert


def sorted_index_add(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS - 1)
    return torch.zeros_like(x).index_add(0, token, expert(x[token]))


def sorted_scatter_add(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS)
    token = token.reshape(-1, 1).expand(-1, DIM)
    return torch.zeros_like(x).scatter_add(0, token, expert(torch.gather(x, 0, token)))


def sorted_scatter_reduce(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS)
    places = token.view(-1, 1).expand(-1, DIM)
    return torch.zeros_like(x).scatter_reduce(-2, places, expert(x[token]), "sum", include_self=False)


def sorted_accumulated(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS)
    return torch.zeros_like(x).index_put_((token,), expert(x[token]), accumulate=True)


def sorted_by_marks(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates)
    return torch.zeros_like(x).index_add(0, token, expert(x[token]))


def sorted_by_marks_of_others(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, marked=1)
    return torch.zeros_like(x).index_add(0, token, expert(x[token]))


def sorted_scaled_rows(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS, first=True)
    return torch.zeros_like(x).index_add(0, token, expert(x[token]))


def sorted_as_transformers(m, x, indices, gates):
    """As transformers' `grouped_mm`: slots of no expert, which another rank has, are sorted behind all others."""
    ids, order = torch.sort(indices.reshape(-1))
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    others = (ids >= EXPERTS).unsqueeze(-1)
    rows = x[order // indices.size(-1)].masked_fill_(others, 0.0)
    hidden = _swiglu(GROUPED_MM(rows, m.gate_up.transpose(-2, -1), offs=ends).masked_fill(others, 0.0))
    out = GROUPED_MM(hidden, m.down.transpose(-2, -1), offs=ends).masked_fill(others, 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0), device=x.device)
    out = (out * gates.reshape(-1)[order].unsqueeze(-1))[back]
    return out.view(x.size(0), indices.size(-1), -1).sum(dim=1).to(x.dtype)


def _sorted_behind(m, x, indices, gates, rows, order):
    ids = indices.reshape(-1)[order]
    ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    out = GROUPED_MM(_swiglu(GROUPED_MM(rows, m.gate_up.mT, offs=ends)), m.down.mT, offs=ends)
    return out * gates.reshape(-1)[order].unsqueeze(-1)


def sorted_numbers_of_tokens(m, x, indices, gates):
    """As transformers had it first: each slot's token is a number, sorted along."""
    count, choices = indices.shape
    token = torch.arange(count, device=x.device).unsqueeze(1).expand(-1, choices).reshape(-1)
    order = torch.argsort(indices.reshape(-1))
    out = _sorted_behind(m, x, indices, gates, x[token[order]], order)
    return out[torch.argsort(order)].view(count, choices, -1).sum(dim=1)


def sorted_numbers_into_rows(m, x, indices, gates):
    token = torch.arange(len(x)).repeat_interleave(CHOICES)
    order = torch.argsort(indices.reshape(-1))
    rows = _sorted_behind(m, x, indices, gates, x[token][order], order)
    return torch.zeros_like(x).index_add(0, token[order], rows)


def sorted_repeated_rows(m, x, indices, gates):
    order = torch.argsort(indices.reshape(-1))
    token = torch.arange(len(x) * CHOICES) // CHOICES
    rows = _sorted_behind(m, x, indices, gates, x.repeat_interleave(CHOICES, 0)[order], order)
    return torch.zeros_like(x).index_add(0, token[order], rows)


def sorted_numbers_of_others(m, x, indices, gates):
    """All tokens' first choices before all tokens' second ones, which the slots are not."""
    token = torch.arange(len(x)).repeat(CHOICES)
    order = torch.argsort(indices.reshape(-1))
    out = _sorted_behind(m, x, indices, gates, x[token[order]], order)
    return out[torch.argsort(order)].view(len(x), CHOICES, -1).sum(dim=1)


def sorted_back_to_others(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS - 1)
    return torch.zeros_like(x).index_add(0, token, expert(x[token.flip(0)]))


def sorted_into_other_groups(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS + 1)
    return torch.zeros_like(x).index_add(0, token, expert(x[token]))


def sorted_with_biases(m, x, indices, gates, others: int = 0):
    """As transformers runs gpt-oss with grouped GEMMs, sentinels of other ranks' experts and all."""
    ids, order = torch.sort(indices.reshape(-1))
    ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    nobody = (ids >= EXPERTS).unsqueeze(-1)
    own = (ids.clone() if others else ids).clamp_(max=EXPERTS - 1 - others)
    rows = x[order // CHOICES].masked_fill_(nobody, 0.0)
    both = torch._grouped_mm(rows, m.gate_up.mT, offs=ends).add_(m.gate_up.mean(-1)[own]).masked_fill(nobody, 0.0)
    gate, up = both[..., ::2].clamp(max=0.7), both[..., 1::2].clamp(-0.7, 0.7)
    hidden = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    out = torch._grouped_mm(hidden, m.down.mT, offs=ends).add_(m.down.mean(-1)[own]).masked_fill(nobody, 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return (out * gates.reshape(-1)[order].unsqueeze(-1))[back].view(len(x), CHOICES, -1).sum(dim=1)


def sorted_with_biases_of_others(m, x, indices, gates):
    return sorted_with_biases(m, x, indices, gates, others=1)


SORTED = [sorted_as_transformers, sorted_index_add, sorted_scatter_add, sorted_scatter_reduce, sorted_accumulated,
          sorted_by_marks, sorted_scaled_rows,
          sorted_with_biases, sorted_numbers_of_tokens, sorted_numbers_into_rows, sorted_repeated_rows]  # fmt: skip
SORTED_NEAR_MISSES = {
    "bias": [sorted_with_biases_of_others],
    "rows": [sorted_back_to_others, sorted_numbers_of_others],
    "offsets": [sorted_into_other_groups, sorted_by_marks_of_others],
}


# --- near misses


def every_expert_works(m, x, indices, gates):
    combine, y = m.router(x).softmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y = y + combine[:, e, None] * expert(x)
    return y


def a_column_left_out(m, x, indices, gates):
    combine = matrix(indices, gates)
    return combine[:, 0, None] * m.experts[0](x) + combine[:, 1, None] * m.experts[1](x)


def scattered_over_each_other(m, x, indices, gates):
    """Of a choice that comes twice one gate is left."""
    return dense_loop(m, x, indices // 2, gates)


def marked_gates_of_others(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y += ((gates if e else gates.flip(-1)) * (indices == e)).sum(dim=-1, keepdim=True) * expert(x)
    return y


def one_marked_gate_left_out(m, x, indices, gates):
    return sum(m.experts[e](x) * (gates * (indices == e)).sum(-1, keepdim=True) for e in (0, 2))


def stack_of_unlike(m, x, indices, gates):
    outs = [expert(x + e) for e, expert in enumerate(m.experts)]
    return (torch.stack(outs, 1) * matrix(indices, gates)[..., None]).sum(1)


def any_of_what_may_come_twice(m, x, indices, gates):
    y, combine = torch.zeros_like(x), m.router(x)
    for e, expert in enumerate(m.experts):
        mask = (indices // 2 == e).any(-1)
        y[mask] += expert(x[mask]) * combine[mask, e].unsqueeze(1)
    return y


def another_expert_for_the_second_choice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        for e in range(EXPERTS):
            mask = indices[:, k] == e
            y[mask] += gates[mask, k, None] * m.experts[(e + k) % EXPERTS](x[mask])
    return y


def two_of_three_choices(m, x, indices, gates):
    gates, indices = m.router(x).softmax(-1).topk(3, -1)
    return mask_of_each_choice(m, x, indices, gates)


def written_over_the_input(m, x, indices, gates):
    """By some of the experts: other tokens keep what they are."""
    y = x.clone()
    for e, expert in enumerate(m.experts[:2]):
        mask = indices[:, 0] == e
        y[mask] = expert(x[mask]) * gates[mask, 0, None]
    return y


def scatter_add_of_a_few(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        token, choice = token[:3], choice[:3]
        y.scatter_add_(0, token[:, None].expand(-1, DIM), expert(x[token]) * gates[token, choice, None])
    return y


def scatter_reduce_without_what_is_there(m, x, indices, gates):
    """Of a token's two outputs the second is left."""
    return _scatter_reduce(m, x, indices, gates, reduce="sum", include_self=False)


def scatter_reduce_to_means(m, x, indices, gates):
    return _scatter_reduce(m, x, indices, gates, reduce="mean")


def in_turn_but_one(m, x, indices, gates):
    combine = in_turn(indices, gates, [1, 1])
    return sum(expert(x) * combine[:, e, None] for e, expert in enumerate(m.experts))


def in_turn_with_other_gates(m, x, indices, gates):
    combine = in_turn(indices, gates, [0]).scatter(-1, indices[:, 1:2], gates[:, :1])
    return sum(expert(x) * combine[:, e, None] for e, expert in enumerate(m.experts))


NEAR_MISSES = {
    "dense-gates": [every_expert_works, scattered_over_each_other, in_turn_but_one, in_turn_with_other_gates],
    "gaps": [a_column_left_out, one_marked_gate_left_out],
    "inputs": [stack_of_unlike],
    "gates": [any_of_what_may_come_twice, marked_gates_of_others],
    "twice": [written_over_the_input],
    "experts-differ": [another_expert_for_the_second_choice],
    "choices": [two_of_three_choices],
    "no-rows": [scatter_add_of_a_few],
    "no-sum": [scatter_reduce_without_what_is_there, scatter_reduce_to_means],
}


def einsum_of_every_expert(m, x, indices, gates):
    hidden = _swiglu(torch.einsum("td,ehd->teh", x, m.gate_up))
    return torch.einsum("teh,edh,te->td", hidden, m.down, m.router(x).softmax(-1))


def einsum_with_a_bias_of_all(m, x, indices, gates):
    """One for all experts, which is no expert's own."""
    hidden = _swiglu(torch.einsum("td,ehd->teh", x, m.gate_up) + m.gate_up.sum(-1).sum(0))
    return torch.einsum("teh,edh,te->td", hidden, m.down, matrix(indices, gates))


def biases_of_other_choices(m, x, indices, gates):
    hidden = torch.einsum("td,tkhd->tkh", x, m.gate_up[indices]) + m.gate_up.sum(-1)[indices.flip(-1)]
    return torch.einsum("tkh,tkdh,tk->td", _swiglu(hidden), m.down[indices], gates)


def scaled_rows_with_biases(m, x, indices, gates):
    """Of rows that a score of 0 makes zeros, a bias makes something."""
    scores = torch.full_like(m.router(x), float("-inf")).scatter_(1, indices, gates).sigmoid()
    rows = (x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)).view(EXPERTS, -1, DIM)
    hidden = _swiglu(torch.bmm(rows, m.gate_up.mT) + m.gate_up.sum(-1)[:, None])
    return torch.bmm(hidden, m.down.mT).view(-1, DIM).reshape(EXPERTS, -1, DIM).sum(dim=0)


def einsum_of_other_choices(m, x, indices, gates):
    hidden = _swiglu(torch.einsum("td,tkhd->tkh", x, m.gate_up[indices]))
    return torch.einsum("tkh,tkdh,tk->td", hidden, m.down[indices.flip(-1)], gates)


def scaled_at_both_ends(m, x, indices, gates):
    return scaled_rows_of_chosen(m, x, indices, gates, gates)


def experts_merged_into_one(m, x, indices, gates):
    """Weights are averaged, one expert a token, rather than outputs."""
    merged = torch.einsum("te,ehd->thd", matrix(indices, gates), m.gate_up)
    return torch.einsum("thd,td->th", merged, x).mean(-1, keepdim=True) * x


STACKED_NEAR_MISSES = {
    "unread": experts_merged_into_one,
    "dense-gates": einsum_of_every_expert,
    "bias": einsum_with_a_bias_of_all,
    "indices": einsum_of_other_choices,
}
STACKED_NEAR_MISSES_OF_BIASES = {"indices": biases_of_other_choices, "bias": scaled_rows_with_biases}
