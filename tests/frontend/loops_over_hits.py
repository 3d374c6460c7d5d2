"""Loops over the experts that have tokens as people write them: all of them are loops over all experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.experts import DIM, skipping_idle_experts


def hits(mask):
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def choices_by_expert(m, indices):
    return F.one_hot(indices, num_classes=m.num_experts).permute(2, 1, 0)


def add(m, y, x, indices, gates, e):
    token, choice = torch.where(indices == e)
    y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])


def hit(m, indices):
    return hits(choices_by_expert(m, indices)).flatten()


def named(bodies):
    """The functions of a table, each by its name there."""
    for name, body in bodies.items():
        body.__name__ = name
    return tuple(bodies.values())


def over(listed, number=lambda m, e: e):
    """A loop over a list that runs the expert with the `number` of each entry."""

    def body(m, x, indices, gates):
        y = torch.zeros_like(x)
        for e in listed(m, indices):
            add(m, y, x, indices, gates, number(m, e))
        return y

    return body


# --- lists of the experts that have tokens


def as_mixtral(m, x, indices, gates):
    """As transformers' Mixtral up to 4.56."""
    y = torch.zeros((x.shape[0], DIM), dtype=x.dtype)
    mask = choices_by_expert(m, indices)
    for e in hits(mask):
        expert = m.experts[e]
        choice, token = torch.where(mask[e].squeeze(0))
        current = x[None, token].reshape(-1, DIM)
        y.index_add_(0, token, (expert(current) * gates[token, choice, None]).to(x.dtype))
    return y


def as_eager_experts(m, x, indices, gates):
    """As transformers' experts since 5.0, with weights in one tensor each."""
    y = torch.zeros_like(x)
    with torch.no_grad():
        mask = choices_by_expert(m, indices)
        hit = hits(mask)
    for e in hit:
        e = e[0]
        if e == m.num_experts:
            continue
        choice, token = torch.where(mask[e])
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, m.down[e])
        y.index_add_(0, token, (out * gates[token, choice, None]).to(y.dtype))
    return y


def by_number(m, x, indices, gates):
    y = torch.zeros_like(x)
    counts = torch.bincount(indices.flatten(), minlength=m.num_experts)
    for e in torch.nonzero(counts != 0, as_tuple=True)[0]:
        e = int(e)
        token, choice = torch.where(indices == e)
        y = y.index_add(0, token, m.experts[e](x[token]) * gates[token, choice].unsqueeze(-1))
    return y


def by_any(m, x, indices, gates):
    y = torch.zeros_like(x)
    mask = F.one_hot(indices, m.num_experts).permute(2, 0, 1).bool()
    for e in mask.any(-1).any(-1).nonzero().flatten():
        token, choice = mask[e].nonzero(as_tuple=True)
        y[token] += m.experts[e](x[token]) * gates[token, choice, None]
    return y


by_distinct_choices = over(lambda m, indices: torch.unique(indices))


def by_distinct_choices_of_all(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in indices.flatten().unique(sorted=True):
        token, choice = (indices == e).nonzero(as_tuple=True)
        y[token] += m.experts[int(e)](x[token]) * gates[token, choice, None]
    return y


# --- branches on how many tokens an expert has


def as_deepseek(m, x, indices, gates):
    """As DeepSeek publishes its inference code."""
    y = torch.zeros_like(x)
    counts = torch.bincount(indices.flatten(), minlength=m.num_experts).tolist()
    for i in range(m.num_experts):
        if counts[i] == 0:
            continue
        expert = m.experts[i]
        token, choice = torch.where(indices == i)
        y[token] += expert(x[token]) * gates[token, choice, None]
    return y


def by_length(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        if len(token) == 0:
            continue
        y.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
    return y


def by_numel(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = (indices == e).nonzero(as_tuple=True)
        if token.numel():
            y[token] += expert(x[token]) * gates[token, choice, None]
    return y


def by_sum(m, x, indices, gates):
    y = torch.zeros_like(x)
    mask = F.one_hot(indices, m.num_experts).permute(2, 0, 1)
    counts = mask.sum(dim=(1, 2))
    for e in range(m.num_experts):
        if not counts[e] > 0:
            continue
        token, choice = torch.where(mask[e])
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y


def by_item(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).sum().item() == 0:
            continue
        add(m, y, x, indices, gates, e)
    return y


def with_idle_experts(m, x, indices, gates):
    """As LongCat-Flash: one expert returns what it reads, and an iteration may end before its sum."""
    y = torch.zeros_like(x)
    mask = choices_by_expert(m, indices)
    for e in hits(mask):
        e = int(e.item())
        choice, token = torch.where(mask[e].squeeze(0))
        if token.numel() == 0:
            continue
        out = x[token]
        if e < m.num_experts - 1:
            gate, up = F.linear(out, m.gate_up[e]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, m.down[e])
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def without_gradients_inside(m, x, indices, gates):
    """As DBRX: its list has a place for an expert that nobody can choose."""
    y = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(indices, num_classes=m.num_experts + 1).permute(2, 1, 0)
        hit = hits(mask)
    for e in hit:
        e = e[0]
        with torch.no_grad():
            choice, token = torch.where(mask[e])
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, dim=-1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, m.down[e]) * gates[token, choice, None])
    return y


def in_other_places(m, x, indices, gates):
    """Scores of all experts but the first, which lie in other places."""
    gates, indices = m.router(x)[:, 1:].softmax(-1).topk(2, dim=-1)
    y, places = torch.zeros_like(x), torch.arange(m.num_experts - 1, 0, -1)[indices]
    mask = choices_by_expert(m, places)
    for e in hits(mask):
        e = e[0]
        choice, token = torch.where(mask[e])
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, dim=-1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, m.down[e]) * gates[token, choice, None])
    return y


# --- branches with an `else`, which gives an expert without tokens a gradient of zeros


def zeros_otherwise(m, x, indices, gates):
    """In training; in evaluation there is nothing to do."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = indices == e
        if mask.any():
            token = mask.any(dim=-1).nonzero().flatten()
            y.index_add_(0, token, expert(x[token]) * gates[mask].view(-1, 1))
        elif m.training:
            y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return y


def zeros_to_all_otherwise(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        if len(token) == 0:
            y = y + sum(p.sum() for p in expert.parameters()) * 0.0
        else:
            y = y.index_add(0, token, expert(x[token]) * gates[token, choice, None])
    return y


def written_in_either_way(m, x, indices, gates):
    slots, rows = indices.view(-1), x.repeat_interleave(indices.shape[-1], dim=0)
    y = torch.empty_like(rows)
    for e, expert in enumerate(m.experts):
        out = expert(rows[slots == e])
        if out.shape[0] > 0:
            y[slots == e] = out
        else:
            y[slots == e] = out + 0 * sum(p.sum() for p in expert.parameters())
    return (y.view(*gates.shape, -1) * gates.unsqueeze(-1)).sum(dim=1)


EITHER_WAY = (zeros_otherwise, zeros_to_all_otherwise, written_in_either_way)
STACKED = (as_eager_experts, with_idle_experts, without_gradients_inside, in_other_places)
LOOPS = (as_mixtral, as_eager_experts, by_number, by_any, *named({"by_distinct_choices": by_distinct_choices}),
         by_distinct_choices_of_all, as_deepseek, skipping_idle_experts, by_length, by_numel, by_sum, by_item,
         with_idle_experts, without_gradients_inside, in_other_places)  # fmt: skip
