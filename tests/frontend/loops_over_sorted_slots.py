"""Loops over experts whose rows follow one another, cut where each expert's end, by numbers that are read from tensors:
all of them are loops over all experts. A slot is one choice of a token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.frontend.loops_over_hits import named


def counted(m, indices):
    return torch.bincount(indices.flatten(), minlength=m.num_experts)


def ends_of(indices):
    """No more than to the last expert chosen."""
    return indices.view(-1).bincount().cpu().numpy().cumsum(0)


# --- with a branch on how many slots an expert has


def adds_counted_parts(m, x, indices, gates):
    tokens = torch.arange(x.shape[0]).repeat_interleave(m.choices)
    ids, order = indices.flatten().sort(stable=True)
    token, gate = tokens[order], gates.flatten()[order]
    y, start = torch.zeros_like(x), 0
    for e, n in enumerate(torch.bincount(ids, minlength=m.num_experts).tolist()):
        if n == 0:
            continue
        rows = token[start : start + n]
        y.index_add_(0, rows, m.experts[e](x[rows]) * gate[start : start + n].unsqueeze(-1))
        start += n
    return y


def adds_parts_by_items(m, x, indices, gates):
    order = indices.reshape(-1).argsort()
    token, gate, counts = order // m.choices, gates.reshape(-1)[order][:, None], counted(m, indices)
    y, end = x.new_zeros(x.shape), 0
    for e in range(m.num_experts):
        start, end = end, end + int(counts[e].item())
        if start != end:
            own = token[start:end]
            y[own] += gate[start:end] * m.experts[e](x[own])
    return y


def adds_parts_between_ends(m, x, indices, gates):
    """As the first DeepSeek MoE publishes its inference."""
    return _adds_parts(m, x, indices, gates, ends_of(indices))


def _adds_parts(m, x, indices, gates, ends, each=lambda y: y):
    y, order = torch.zeros_like(x), indices.view(-1).argsort()
    token = order // m.choices
    for e, end in enumerate(ends):
        y = each(y)
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        own = token[start:end]
        out = m.experts[e](x[own]) * gates.view(-1, 1)[order[start:end]]
        y.scatter_add_(0, own.view(-1, 1).repeat(1, x.shape[-1]), out)
    return y


def writes_parts(m, x, indices, gates):
    order = torch.argsort(indices.flatten())
    token, gate = order // m.choices, gates.flatten()[order]
    ends = torch.cat([torch.tensor([0]), counted(m, indices).cumsum(0)])
    rows = x[token]
    out = torch.zeros_like(rows)
    for e in range(m.num_experts):
        start, end = ends[e], ends[e + 1]
        if start == end:
            continue
        out[start:end] = m.experts[e](rows[start:end]) * gate[start:end, None]
    return torch.zeros_like(x).scatter_add_(0, token[:, None].expand_as(out), out)


def joins_parts(m, x, indices, gates):
    """As DeepSeek-V3 publishes its inference."""
    counts = indices.new_zeros((indices.shape[0], m.num_experts))
    counts.scatter_(1, indices, 1)
    order = indices.view(-1).argsort()
    rows, outs, start = x[order // indices.shape[1]], [], 0
    for e, n in enumerate(counts.sum(dim=0).cpu().numpy()):
        end = start + n
        if n == 0:
            continue
        outs.append(m.experts[e](rows[start:end]))
        start = end
    joined = torch.cat(outs, dim=0) if len(outs) else rows.new_empty(0)
    out = torch.empty_like(joined)
    out[order] = joined
    return out.view(*indices.shape, -1).type(gates.dtype).mul_(gates.unsqueeze(-1)).sum(dim=1).type(out.dtype)


def joins_parts_by_numbers(m, x, indices, gates):
    order = indices.flatten().argsort(stable=True)
    rows, outs, start = x.repeat_interleave(m.choices, dim=0)[order], [], 0
    for e, n in enumerate(counted(m, indices).tolist()):
        if n > 0:
            outs.append(m.experts[e](rows[start : start + n]))
        start += n
    out = torch.cat(outs)[order.argsort()]
    return (out.view(-1, m.choices, x.shape[-1]) * gates[..., None]).sum(1)


def joins_parts_that_have_rows(m, x, indices, gates):
    """By a comprehension with a condition."""
    order = indices.flatten().argsort()
    parts = x[order // m.choices].split(counted(m, indices).tolist())
    out = torch.cat([m.experts[e](rows) for e, rows in enumerate(parts) if rows.shape[0] > 0])
    out = out * gates.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).scatter_reduce(0, (order // m.choices)[:, None].expand_as(out), out, reduce="sum")


# --- without one


def splits(m, x, indices, gates):
    order = indices.flatten().argsort()
    token = order // m.choices
    parts = torch.split(x[token], counted(m, indices).tolist())
    out = torch.cat([expert(rows) for expert, rows in zip(m.experts, parts, strict=True)])
    return torch.zeros_like(x).index_add(0, token, out * gates.flatten()[order].unsqueeze(-1))


def splits_by_numbers_of_each(m, x, indices, gates):
    return _by_numbers_of_each(m, x, indices, gates, indices)


def _by_numbers_of_each(m, x, indices, gates, counted):
    order = indices.flatten().argsort()
    token = order // m.choices
    parts = torch.split(x[token], [int((counted == e).sum()) for e in range(m.num_experts)])
    out = torch.cat([expert(rows) for expert, rows in zip(m.experts, parts, strict=True)])
    return torch.zeros_like(x).index_put((token,), out * gates.flatten()[order].unsqueeze(-1), accumulate=True)


def splits_what_gates_multiply(m, x, indices, gates):
    """As torchtitan's experts without a grouped GEMM."""
    counts = torch.histc(indices.flatten().float(), bins=m.num_experts, min=0, max=m.num_experts)
    order = torch.argsort(indices.flatten(), stable=True)
    token = (order // m.choices).reshape(-1, 1).expand(-1, x.shape[-1])
    rows = torch.gather(x, 0, token)
    rows = (rows.float() * gates.flatten()[order].reshape(-1, 1)).to(x.dtype)
    outs = []
    for e, own in enumerate(torch.split(rows, counts.long().tolist(), dim=0)):
        gate, up = F.linear(own, m.gate_up[e]).chunk(2, dim=-1)
        outs.append(F.linear(F.silu(gate) * up, m.down[e]))
    return torch.zeros_like(x).scatter_add(0, token, torch.cat(outs, dim=0))


BRANCHES = [
    adds_counted_parts, adds_parts_by_items, adds_parts_between_ends, writes_parts, joins_parts, joins_parts_by_numbers,
    joins_parts_that_have_rows,
]  # fmt: skip
NO_BRANCHES = [splits, splits_by_numbers_of_each, splits_what_gates_multiply]


# --- what is none


def _joined(m, x, indices, gates, counts, ids=None, experts=None, combine=torch.cat):
    ids = indices if ids is None else ids
    order = ids.flatten().argsort()
    rows, outs, start = x[order // m.choices], [], 0
    for e, n in enumerate(counts.tolist()):
        if n == 0:
            continue
        outs.append((experts or m.experts)[e](rows[start : start + n]))
        start += n
    out = combine(outs)[order.argsort()]
    return (out.view(-1, m.choices, x.shape[-1]) * gates[..., None]).sum(1)


def counts_outputs_of_a_comprehension(m, x, indices, gates):
    parts = x[indices.flatten().argsort() // m.choices].split(counted(m, indices).tolist())
    outs = [m.experts[e](rows) for e, rows in enumerate(parts) if rows.shape[0] > 0]
    out = torch.cat(outs)[indices.flatten().argsort().argsort()] / len(outs)
    return (out.view(-1, m.choices, x.shape[-1]) * gates[..., None]).sum(1)


def joins_some(m, x, indices, gates):
    def all_but_one(outs):
        last = outs.pop()
        return torch.cat([*outs, last * 2])

    return _joined(m, x, indices, gates, counted(m, indices), combine=all_but_one)


def an_expert_behind(m, x, indices, gates):
    order = indices.flatten().argsort()
    token, y, start = order // m.choices, torch.zeros_like(x), 0
    for e, n in enumerate(counted(m, indices).tolist()):
        if n == 0:
            start += n
            continue
        rows = token[start : start + n]
        y.index_add_(0, rows, m.experts[e](x[rows]) * gates.flatten()[order[start : start + n], None])
        start = n
    return y


def moves_without_tokens(m, x, indices, gates):
    order = indices.flatten().argsort()
    token, y, start = order // m.choices, torch.zeros_like(x), 0
    for e, n in enumerate(counted(m, indices).tolist()):
        end = start + n
        if n > 1:
            rows = token[start:end]
            y.index_add_(0, rows, m.experts[e](x[rows]) * gates.flatten()[order[start:end], None])
            start = end
    return y


def numbers_iterations(m, x, indices, gates):
    n = 0

    def each(y):
        nonlocal n
        n += 1
        return y

    return _adds_parts(m, x, indices, gates, ends_of(indices), each) * n


def of_others(indices):
    """Other choices than the tokens made."""
    return indices.flip(0)[:1].expand_as(indices)


CUT_BY_OTHERS = named({
    "counts_of_other_choices": lambda m, x, i, gates: _joined(m, x, i, gates, counted(m, of_others(i))),
    "sorted_by_other_choices": lambda m, x, i, gates: _joined(m, x, i, gates, counted(m, i), ids=i.flip(0) + 0),
    "splits_by_numbers_of_others": lambda m, x, i, gates: _by_numbers_of_each(m, x, i, gates, of_others(i)),
})  # fmt: skip
JOINED_OTHERWISE = named({
    "counts_outputs": lambda m, x, i, gates: _joined(
        m, x, i, gates, counted(m, i), combine=lambda outs: torch.cat(outs) / len(outs)
    ),
    "joins_backwards": lambda m, x, i, gates: _joined(
        m, x, i, gates, counted(m, i), combine=lambda outs: torch.cat(outs[::-1])
    ),
})  # fmt: skip
# What asks how long counts are that end with the last expert chosen.
OF_THE_LENGTH = named({
    "counts_their_entries": lambda m, x, i, gates: _adds_parts(m, x, i, gates, ends := ends_of(i)) * len(ends),
    "reads_the_last_count": lambda m, x, i, gates: _adds_parts(
        m, x, i, gates, (counts := i.view(-1).bincount()).cpu().numpy().cumsum(0)
    ) * counts[-1],
    "adds_in_every_iteration": lambda m, x, i, gates: _adds_parts(m, x, i, gates, ends_of(i), lambda y: y + 0.5),
})  # fmt: skip
OTHERS = [*CUT_BY_OTHERS, *JOINED_OTHERWISE, joins_some, an_expert_behind, moves_without_tokens,
          counts_outputs_of_a_comprehension, *OF_THE_LENGTH, numbers_iterations]  # fmt: skip
