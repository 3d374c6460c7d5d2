"""Routed experts by masks, by matrices of gates and by GEMMs over all experts at once, and what looks like them."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import CHOICES, DIM, EXPERTS, by_name, clamped_swiglu, loop, matrix, over_experts, swiglu, weighted

GROUPED_MM = getattr(F, "grouped_mm", torch._grouped_mm)  # which torch 2.9 has under its private name alone


def one_hots(indices: Tensor, gates: Tensor) -> Tensor:
    return (F.one_hot(indices, EXPERTS).to(gates.dtype) * gates[..., None]).sum(1)


def added_up(m, x, share, y=None, add=operator.iadd):
    """`share(e, expert)` of all tokens, added one after the other to zeros or to `y`."""
    y = torch.zeros_like(x) if y is None else y
    for e, expert in enumerate(m.experts):
        y = add(y, share(e, expert))
    return y


# --- modules of their own


def dense_loop(m, x, indices, gates):
    combine = matrix(indices, gates)
    return added_up(m, x, lambda e, expert: combine[:, e, None] * expert(x))


def dense_sum_of_batches(m, x, indices, gates):
    """As python's `sum`, with more than one dimension of tokens."""
    x, combine = x.view(1, -1, DIM).expand(2, -1, -1), matrix(*(t.expand(2, -1, -1) for t in (indices, gates)))
    return sum(expert(x) * combine[..., e : e + 1] for e, expert in enumerate(m.experts))[0]


def dense_on_the_residual(m, x, indices, gates):
    shares = one_hots(indices, gates).unbind(-1)
    return added_up(m, x, lambda e, expert: expert(x) * shares[e].unsqueeze(-1), x, operator.add)


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
    return added_up(m, x, lambda e, expert: (gates * (indices == e)).sum(dim=-1, keepdim=True) * expert(x))


def dense_gates_where_chosen(m, x, indices, gates):
    share = lambda e, expert: torch.where(indices == e, gates, 0.0).sum(-1).unsqueeze(-1) * expert(x)  # noqa: E731
    return added_up(m, x, share, x, operator.add)


def dense_stack_einsum(m, x, indices, gates):
    combine = torch.einsum("tk,tke->te", gates, F.one_hot(indices, EXPERTS).to(gates.dtype))
    return torch.einsum("etd,te->td", torch.stack([expert(x) for expert in m.experts]), combine)


def mask_any_choice(m, x, indices, gates):
    """As makeMoE and nanoMoE have it, but for their branch: a softmax over what is minus infinity elsewhere."""
    combine = torch.full_like(m.router(x), float("-inf")).scatter(-1, indices, gates).softmax(-1)
    out = lambda e, mask: m.experts[e](x[mask]) * combine[mask, e].unsqueeze(1)  # noqa: E731
    return over_experts(m, x, lambda e: ((indices == e).any(dim=-1),), out, add="+=")


def mask_any_of_flattened_choices(m, x, indices, gates):
    """Chosen for tokens in two dimensions, and read with these in one."""
    scores, chosen = m.router(x.unsqueeze(0)).softmax(-1).topk(CHOICES, dim=-1)

    def out(m, x, gates, e, token, mask):
        return m.experts[e](x.index_select(0, token)) * (gates * mask).sum(-1)[token].unsqueeze(-1)

    body = loop(out, found=lambda mask: (mask.any(dim=-1).nonzero().squeeze(-1), mask))
    return body(m, x, chosen.reshape(-1, CHOICES), scores.reshape(-1, CHOICES))


def mask_of_each_choice(m, x, indices, gates, own=lambda e, k: e):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        for e in range(EXPERTS):
            mask = indices[:, k] == e
            y[mask] += gates[mask][:, k, None] * m.experts[own(e, k)](x[mask])
    return y


def mask_of_the_first_choice(m, x, indices, gates):
    first, gate = indices[:, 0], gates[:, 0]
    out = lambda e, mask: m.experts[e](x[mask]) * gate[mask, None]  # noqa: E731
    return over_experts(m, x, lambda e: (first == e,), out, add="=")


def mask_of_the_largest(m, x, indices, gates):
    scores = m.router(x).softmax(-1)
    best, y = scores.argmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y[best == e] += expert(x[best == e]) * scores[best == e, e, None]
    return y


def slots_in_their_places(m, x, indices, gates, repeated=lambda x, n: x.repeat_interleave(n, dim=0), read=lambda rows: rows):
    """As DeepSeek's own modelling files train."""
    slots, rows = indices.view(-1), repeated(x, indices.shape[-1])
    y = torch.empty_like(rows)
    for e, expert in enumerate(m.experts):
        y[slots == e] = expert(read(rows[slots == e]))
    return (y.view(*gates.shape, -1) * gates.unsqueeze(-1)).sum(dim=1)


scatter_add = loop(weighted, "scatter_add", add=lambda y, t, out: y.scatter_add_(0, t[:, None].expand(-1, DIM), out))


def scattered(**kwargs):
    return loop(weighted, add=lambda y, t, out: y.scatter_reduce(0, t.unsqueeze(-1).repeat(1, DIM), out, **kwargs))


LISTS = by_name(
    dense_loop, dense_cat_of_choices_in_turn, dense_sum_of_batches, dense_on_the_residual, dense_masked_scores,
    dense_stack_einsum, dense_marked_gates, dense_gates_where_chosen, mask_any_choice, mask_any_of_flattened_choices,
    mask_of_each_choice, mask_of_the_first_choice, mask_of_the_largest, slots_in_their_places, scatter_add,
) | {
    "dense_marks_as_numbers": lambda m, x, i, g: sum(
        expert(x) * ((i == e).to(x.dtype) * g).sum(1)[:, None] for e, expert in enumerate(m.experts)),
    "mask_and_marked_gates": loop(
        lambda m, x, g, e, mask, hit: m.experts[e](x[mask]) * (g * hit).sum(-1)[mask].unsqueeze(-1),
        found=lambda hit: (hit.any(dim=-1), hit), add="+="),
    # Tokens repeated as a whole, not each of them: experts are those of single rows, and the sum is added up behind.
    "slots_in_other_places": lambda m, x, i, g: slots_in_their_places(m, x, i, g, lambda x, n: x.repeat(n, 1)),
    "detached_slots": lambda m, x, i, g: slots_in_their_places(m, x, i, g, read=Tensor.detach),
    "scatter_reduce": scattered(reduce="sum"),
}  # fmt: skip


# --- stacked weights


def einsum_of_all(m, x, indices, gates):
    hidden = swiglu(torch.einsum("td,ehd->teh", x, m.gate_up))
    return torch.einsum("ted,te->td", torch.einsum("teh,edh->ted", hidden, m.down), matrix(indices, gates))


def bmm_with_biases(m, x, indices, gates):
    """As transformers' dense GEMMs with biases, which a gate of 0 strikes out."""
    rows = x.repeat(EXPERTS, 1).view(EXPERTS, -1, DIM)
    hidden = swiglu(torch.bmm(rows, m.gate_up.mT) + m.gate_up.sum(-1)[..., None, :])
    out = torch.bmm(hidden, m.down.mT) + m.down.sum(-1)[:, None]
    return (out * matrix(indices, gates).transpose(0, 1).view(EXPERTS, -1, 1)).sum(dim=0)


def einsum_with_biases(m, x, indices, gates):
    hidden = swiglu(torch.einsum("td,ehd->teh", x, m.gate_up) + m.gate_up.sum(-1))
    out = torch.einsum("teh,edh->ted", hidden, m.down) + m.down.sum(-1)
    return torch.einsum("ted,te->td", out, matrix(indices, gates))


def einsum_of_chosen_with_biases(m, x, indices, gates):
    """As OpenAI's own model has it: channels in turn, clamped, every choice with its own copy of weights and biases."""
    both = torch.einsum("beck,bk->bec", m.gate_up[indices], x) + m.gate_up.mean(-1)[indices]
    gate, up = both[..., ::2].clamp(min=None, max=0.7), both[..., 1::2].clamp(min=-0.7, max=0.7)
    hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    out = torch.einsum("beck,bek->bec", m.down[indices], hidden) + m.down.mean(-1)[indices]
    return torch.einsum("bec,be->bc", out, gates)


def bmm_of_all(m, x, indices, gates, read=lambda rows: rows):
    """Dense GEMMs as transformers has them for inference."""
    rows = read(x.repeat(EXPERTS, 1).view(EXPERTS, -1, DIM))
    out = torch.bmm(swiglu(torch.bmm(rows, m.gate_up.transpose(1, 2))), m.down.transpose(1, 2))
    return (out * matrix(indices, gates).transpose(0, 1).view(EXPERTS, -1, 1)).sum(dim=0)


def matmul_of_all(m, x, indices, gates):
    out = swiglu(x.unsqueeze(0) @ m.gate_up.mT) @ m.down.mT
    return torch.bmm(out.permute(1, 2, 0), one_hots(indices, gates)[..., None]).squeeze(-1)


def einsum_of_chosen(m, x, indices, gates):
    """As gpt-fast has it."""
    hidden = swiglu(torch.einsum("td,tkhd->tkh", x, m.gate_up[indices]))
    return torch.einsum("tkd,tk->td", torch.einsum("tkh,tkdh->tkd", hidden, m.down[indices]), gates)


def matmul_of_chosen(m, x, indices, gates):
    hidden = swiglu((m.gate_up[indices] @ x[:, None, :, None]).squeeze(-1))
    return ((m.down[indices] @ hidden.unsqueeze(-1)).squeeze(-1) * gates[..., None]).sum(1)


def bmm_of_slots(m, x, indices, gates):
    ids = indices.view(-1)
    rows = x[:, None].expand(-1, CHOICES, -1).reshape(-1, 1, DIM)
    out = torch.bmm(swiglu(torch.bmm(rows, m.gate_up[ids].mT)), m.down[ids].mT).squeeze(1)
    return (out.view(-1, CHOICES, DIM) * gates.unsqueeze(-1)).sum(1)


def scaled_rows_of_all(m, x, indices, gates, biased=lambda into: into, read=lambda rows: rows, scaled=lambda rows: rows):
    """As transformers' Llama 4: every expert reads every token, times its score, which is 0 but for the chosen."""
    scores = torch.full_like(m.router(x), float("-inf")).scatter_(1, indices, gates).sigmoid()
    rows = (read(x.repeat(EXPERTS, 1)) * scores.transpose(0, 1).reshape(-1, 1)).view(EXPERTS, -1, DIM)
    out = torch.bmm(swiglu(biased(torch.bmm(scaled(rows), m.gate_up.mT))), m.down.mT).view(-1, DIM)
    return out.reshape(EXPERTS, -1, DIM).sum(dim=0)


def scaled_rows_of_chosen(m, x, indices, gates, outer: Tensor | None = None):
    ids = indices.view(-1)
    rows = (x[:, None] * gates[..., None]).reshape(-1, 1, DIM)
    out = torch.bmm(swiglu(torch.bmm(rows, m.gate_up[ids].mT)), m.down[ids].mT).view(-1, CHOICES, DIM)
    return (out if outer is None else out * outer[..., None]).sum(1)


def einsum_of_three(m, x, weights, biased=lambda into: into, into="td,ehd->teh", out="teh,edh,te->td"):
    return torch.einsum(out, swiglu(biased(torch.einsum(into, x, m.gate_up))), m.down, weights)


STACKED = by_name(
    einsum_of_all, bmm_of_all, matmul_of_all, einsum_of_chosen, matmul_of_chosen, bmm_of_slots, scaled_rows_of_all,
    scaled_rows_of_chosen, bmm_with_biases, einsum_with_biases, einsum_of_chosen_with_biases,
) | {
    "bmm_of_detached_rows": lambda m, x, i, g: bmm_of_all(m, x, i, g, Tensor.detach),
    "scaled_detached_rows": lambda m, x, i, g: scaled_rows_of_all(m, x, i, g, read=Tensor.detach),
    "detached_scaled_rows": lambda m, x, i, g: scaled_rows_of_all(m, x, i, g, scaled=Tensor.detach),
    "einsum_of_three": lambda m, x, i, g: einsum_of_three(
        m, x, matrix(i, g), into="td,ehd->eth", out="eth,edh,te->td"),
}  # fmt: skip


# --- rows sorted by expert, in bfloat16


def _sorted(m, x, indices, gates, top: int | None = None, marked: int = 0, first: bool = False):
    ids = indices.reshape(-1)
    order = ids.argsort(stable=True)
    if top is None:
        chosen = (indices + marked) % EXPERTS if marked else indices
        marks = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter(-1, chosen, True)
        ends = marks.sum(0).cumsum(0, dtype=torch.int32)
    else:
        ends = torch.histc(ids.float(), EXPERTS, 0, top).cumsum(0).to(torch.int32)

    def expert(rows):
        if first:
            rows = rows * gates.view(-1)[order, None]
        hidden = swiglu(torch._grouped_mm(rows, m.gate_up.mT, offs=ends))
        out = torch._grouped_mm(hidden, m.down.mT, offs=ends)
        return out if first else out * gates.view(-1)[order, None]

    return order // CHOICES, expert


def sorted_body(add, name: str = "", top=EXPERTS, read=lambda x, token: x[token], **options):
    """The body that adds what experts make of rows `read(x, token)`: `add(zeros, token, out)`."""

    def body(m, x, indices, gates):
        token, expert = _sorted(m, x, indices, gates, top, **options)
        return add(torch.zeros_like(x), token, expert(read(x, token)))

    body.__name__ = name
    return body


def by_index_add(zeros, token, out):
    return zeros.index_add(0, token, out)


sorted_index_add = sorted_body(by_index_add, "sorted_index_add", EXPERTS - 1)
sorted_by_marks = sorted_body(by_index_add, "sorted_by_marks", None)
sorted_scaled_rows = sorted_body(by_index_add, "sorted_scaled_rows", first=True)


def sorted_scatter_add(m, x, indices, gates):
    token, expert = _sorted(m, x, indices, gates, EXPERTS)
    token = token.reshape(-1, 1).expand(-1, DIM)
    return torch.zeros_like(x).scatter_add(0, token, expert(torch.gather(x, 0, token)))


def sorted_as_transformers(m, x, indices, gates):
    """As transformers' `grouped_mm`: slots of no expert, which another rank has, are sorted behind all others."""
    ids, order = torch.sort(indices.reshape(-1))
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    others = (ids >= EXPERTS).unsqueeze(-1)
    rows = x[order // indices.size(-1)].masked_fill_(others, 0.0)
    hidden = swiglu(GROUPED_MM(rows, m.gate_up.transpose(-2, -1), offs=ends).masked_fill(others, 0.0))
    out = GROUPED_MM(hidden, m.down.transpose(-2, -1), offs=ends).masked_fill(others, 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0), device=x.device)
    out = (out * gates.reshape(-1)[order].unsqueeze(-1))[back]
    return out.view(x.size(0), indices.size(-1), -1).sum(dim=1).to(x.dtype)


def numbered(token, rows, summed):
    """The body of rows `rows(x, token, order)` where each slot's `token(x, choices)` is a number, sorted along."""

    def body(m, x, indices, gates):
        numbers, order = token(x, indices.shape[-1]), torch.argsort(indices.reshape(-1))
        ids = indices.reshape(-1)[order]
        ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        hidden = swiglu(GROUPED_MM(rows(x, numbers, order), m.gate_up.mT, offs=ends))
        out = GROUPED_MM(hidden, m.down.mT, offs=ends) * gates.reshape(-1)[order].unsqueeze(-1)
        return summed(x, numbers, order, out)

    return body


def back_in_their_places(x, token, order, out):
    return out[torch.argsort(order)].view(len(x), CHOICES, -1).sum(dim=1)


def into_rows(x, token, order, out):
    return torch.zeros_like(x).index_add(0, token[order], out)


def sorted_with_biases(m, x, indices, gates, others: int = 0):
    """As transformers runs gpt-oss with grouped GEMMs, sentinels of other ranks' experts and all."""
    ids, order = torch.sort(indices.reshape(-1))
    ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    nobody = (ids >= EXPERTS).unsqueeze(-1)
    own = (ids.clone() if others else ids).clamp_(max=EXPERTS - 1 - others)
    rows = x[order // CHOICES].masked_fill_(nobody, 0.0)
    both = torch._grouped_mm(rows, m.gate_up.mT, offs=ends).add_(m.gate_up.mean(-1)[own]).masked_fill(nobody, 0.0)
    out = torch._grouped_mm(clamped_swiglu(both), m.down.mT, offs=ends).add_(m.down.mean(-1)[own])
    out = out.masked_fill(nobody, 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return (out * gates.reshape(-1)[order].unsqueeze(-1))[back].view(len(x), CHOICES, -1).sum(dim=1)


SORTED = by_name(
    sorted_as_transformers, sorted_index_add, sorted_scatter_add, sorted_by_marks, sorted_scaled_rows,
    sorted_with_biases,
) | {
    "sorted_scatter_reduce": sorted_body(lambda zeros, token, out: zeros.scatter_reduce(
        -2, token.view(-1, 1).expand(-1, DIM), out, "sum", include_self=False)),
    "sorted_accumulated": sorted_body(lambda zeros, token, out: zeros.index_put_((token,), out, accumulate=True)),
    # as transformers had it first
    "sorted_numbers_of_tokens": numbered(
        lambda x, choices: torch.arange(len(x), device=x.device).unsqueeze(1).expand(-1, choices).reshape(-1),
        lambda x, token, order: x[token[order]], back_in_their_places),
    "sorted_numbers_into_rows": numbered(
        lambda x, choices: torch.arange(len(x)).repeat_interleave(choices),
        lambda x, token, order: x[token][order], into_rows),
    "sorted_repeated_rows": numbered(
        lambda x, choices: torch.arange(len(x) * choices) // choices,
        lambda x, token, order: x.repeat_interleave(CHOICES, 0)[order], into_rows),
}  # fmt: skip
sorted_back_to_others = sorted_body(
    by_index_add, "sorted_back_to_others", EXPERTS - 1, lambda x, token: x[token.flip(0)])  # fmt: skip
sorted_into_other_groups = sorted_body(by_index_add, "sorted_into_other_groups", EXPERTS + 1)
# name: (the tag of the refusal, body)
SORTED_NEAR_MISSES = {
    "sorted_with_biases_of_others": ("bias", lambda m, x, i, g: sorted_with_biases(m, x, i, g, others=1)),
    "sorted_back_to_others": ("rows", sorted_back_to_others),
    # all tokens' first choices before all tokens' second ones, which the slots are not
    "sorted_numbers_of_others": ("rows", numbered(
        lambda x, choices: torch.arange(len(x)).repeat(choices), lambda x, token, order: x[token[order]],
        back_in_their_places)),
    "sorted_into_other_groups": ("offsets", sorted_into_other_groups),
    "sorted_by_marks_of_others": ("offsets", sorted_body(by_index_add, top=None, marked=1)),
}  # fmt: skip


# --- near misses


def every_expert_works(m, x, indices, gates):
    combine = m.router(x).softmax(-1)
    return added_up(m, x, lambda e, expert: combine[:, e, None] * expert(x), add=operator.add)


def a_column_left_out(m, x, indices, gates):
    combine = matrix(indices, gates)
    return combine[:, 0, None] * m.experts[0](x) + combine[:, 1, None] * m.experts[1](x)


def marked_gates_of_others(m, x, indices, gates):
    def share(e, expert):
        return ((gates if e else gates.flip(-1)) * (indices == e)).sum(dim=-1, keepdim=True) * expert(x)

    return added_up(m, x, share)


def stack_of_unlike(m, x, indices, gates):
    outs = [expert(x + e) for e, expert in enumerate(m.experts)]
    return (torch.stack(outs, 1) * matrix(indices, gates)[..., None]).sum(1)


def any_of_what_may_come_twice(m, x, indices, gates):
    combine = m.router(x)
    out = lambda e, mask: m.experts[e](x[mask]) * combine[mask, e].unsqueeze(1)  # noqa: E731
    return over_experts(m, x, lambda e: ((indices // 2 == e).any(-1),), out, add="+=")


def two_of_three_choices(m, x, indices, gates):
    gates, indices = m.router(x).softmax(-1).topk(3, -1)
    return mask_of_each_choice(m, x, indices, gates)


def written_over_the_input(m, x, indices, gates):
    """By some of the experts: other tokens keep what they are."""
    found, out = lambda e: (indices[:, 0] == e,), lambda e, mask: m.experts[e](x[mask]) * gates[mask, 0, None]
    return over_experts(m, x, found, out, onto=Tensor.clone, experts=lambda n: range(n - 1), add="=")


scatter_add_of_a_few = loop(
    weighted, "scatter_add_of_a_few", found=lambda marks: [found[:3] for found in torch.where(marks)],
    add=lambda y, t, out: y.scatter_add_(0, t[:, None].expand(-1, DIM), out))  # fmt: skip


def of_columns(m, x, combine):
    return sum(expert(x) * combine[:, e, None] for e, expert in enumerate(m.experts))


# name: (the tag of the refusal, body)
NEAR_MISSES = {
    "every_expert_works": ("dense-gates", every_expert_works),
    # of a choice that comes twice one gate is left
    "scattered_over_each_other": ("dense-gates", lambda m, x, i, g: dense_loop(m, x, i // 2, g)),
    "in_turn_but_one": ("dense-gates", lambda m, x, i, g: of_columns(m, x, in_turn(i, g, [1, 1]))),
    "in_turn_with_other_gates": (
        "dense-gates", lambda m, x, i, g: of_columns(m, x, in_turn(i, g, [0]).scatter(-1, i[:, 1:2], g[:, :1]))),
    "a_column_left_out": ("gaps", a_column_left_out),
    "one_marked_gate_left_out": (
        "gaps", lambda m, x, i, g: sum(m.experts[e](x) * (g * (i == e)).sum(-1, keepdim=True) for e in (0, 2))),
    "stack_of_unlike": ("inputs", stack_of_unlike),
    "some_rows_detached": ("inputs", loop(
        lambda m, x, g, e, t, k: m.experts[e](x[t].detach() if e else x[t]) * g[t, k, None])),
    "any_of_what_may_come_twice": ("gates", any_of_what_may_come_twice),
    "marked_gates_of_others": ("gates", marked_gates_of_others),
    "written_over_the_input": ("twice", written_over_the_input),
    "another_expert_for_the_second_choice": (
        "experts-differ", lambda m, x, i, g: mask_of_each_choice(m, x, i, g, lambda e, k: (e + k) % EXPERTS)),
    "two_of_three_choices": ("choices", two_of_three_choices),
    "scatter_add_of_a_few": ("no-rows", scatter_add_of_a_few),
    # of a token's two outputs the second is left
    "scatter_reduce_without_what_is_there": ("no-sum", scattered(reduce="sum", include_self=False)),
    "scatter_reduce_to_means": ("no-sum", scattered(reduce="mean")),
}  # fmt: skip


def einsum_of_every_expert(m, x, indices, gates):
    return einsum_of_three(m, x, m.router(x).softmax(-1))


def einsum_with_a_bias_of_all(m, x, indices, gates):
    """One for all experts, which is no expert's own."""
    return einsum_of_three(m, x, matrix(indices, gates), lambda into: into + m.gate_up.sum(-1).sum(0))


def einsum_of_slots(m, x, indices, gates, biased=lambda into: into, down=lambda indices: indices):
    hidden = swiglu(biased(torch.einsum("td,tkhd->tkh", x, m.gate_up[indices])))
    return torch.einsum("tkh,tkdh,tk->td", hidden, m.down[down(indices)], gates)


def scaled_at_both_ends(m, x, indices, gates):
    return scaled_rows_of_chosen(m, x, indices, gates, gates)


def experts_merged_into_one(m, x, indices, gates):
    """Weights are averaged, one expert a token, rather than outputs."""
    merged = torch.einsum("te,ehd->thd", matrix(indices, gates), m.gate_up)
    return torch.einsum("thd,td->th", merged, x).mean(-1, keepdim=True) * x


# name: (the tag of the refusal, body)
STACKED_NEAR_MISSES = {
    "experts_merged_into_one": ("unread", experts_merged_into_one),
    "einsum_of_every_expert": ("dense-gates", einsum_of_every_expert),
    "einsum_with_a_bias_of_all": ("bias", einsum_with_a_bias_of_all),
    "einsum_of_other_choices": ("indices", lambda m, x, i, g: einsum_of_slots(m, x, i, g, down=lambda i: i.flip(-1))),
    "biases_of_other_choices": ("indices", lambda m, x, i, g: einsum_of_slots(
        m, x, i, g, lambda into: into + m.gate_up.sum(-1)[i.flip(-1)])),
    "sines_of_rows_of_all": ("rows", lambda m, x, i, g: bmm_of_all(m, x, i, g, torch.sin)),
    "scaled_sines_of_rows": ("rows", lambda m, x, i, g: scaled_rows_of_all(m, x, i, g, scaled=torch.sin)),
    # of rows that a score of 0 makes zeros, a bias makes something
    "scaled_rows_with_biases": ("bias", lambda m, x, i, g: scaled_rows_of_all(
        m, x, i, g, lambda into: into + m.gate_up.sum(-1)[:, None])),
}  # fmt: skip
