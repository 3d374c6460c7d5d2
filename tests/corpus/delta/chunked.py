"""The delta rule in chunks (arXiv:2406.06484): U = (I + L)^-1 diag(beta) (V - K S) within each, a state between them."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .parts import (
    by_doubling,
    by_general_inverse,
    by_halves,
    by_power_series,
    by_rows_in_a_list,
    by_rows_in_place,
    by_solving,
    causal,
    chunked,
    expanded,
    padded,
    repeated,
    zeros_for,
)


def padded_into_zeros(q, k, v, g, beta, state, size, scale, norm, inverse=by_rows_in_place):
    """Heads first and in float32, padded to whole chunks; an inverse made of rows; results into zeros."""
    dtype, length = v.dtype, v.shape[1]
    q, k = norm(repeated(q, v.shape[2])), norm(repeated(k, v.shape[2]))
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, beta, g = (x.transpose(1, 2).contiguous().to(wide) for x in (q, k, v, beta, g))
    behind = (size - length % size) % size
    q, k, v, beta, g = (padded(x, behind) for x in (q, k, v, beta, g))
    q = q * scale
    weighted_v, weighted_k = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    q, k, v, weighted_k, weighted_v = (chunked(x, size) for x in (q, k, v, weighted_k, weighted_v))
    g = g.reshape(*g.shape[:2], -1, size).cumsum(dim=-1)
    upper = torch.triu(torch.ones(size, size, dtype=torch.bool, device=k.device), diagonal=0)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    solved = inverse((weighted_k @ k.transpose(-1, -2) * decay).masked_fill(upper, 0))
    v = solved @ weighted_v
    read = solved @ (weighted_k * g.exp().unsqueeze(-1))
    state = zeros_for(k, v) if state is None else state.to(v)
    out = torch.zeros_like(v)
    for i in range(v.shape[2]):
        scores = q[:, :, i] @ k[:, :, i].transpose(-1, -2) * decay[:, :, i]
        new = v[:, :, i] - read[:, :, i] @ state
        entered = (q[:, :, i] * g[:, :, i, :, None].exp()) @ state
        out[:, :, i] = entered + scores @ new
        left = (g[:, :, i, -1, None] - g[:, :, i]).exp()[..., None]
        state = state * g[:, :, i, -1, None, None].exp() + (k[:, :, i] * left).transpose(-1, -2) @ new
    out = out.reshape(out.shape[0], out.shape[1], -1, out.shape[-1])[:, :, :length]
    return out.transpose(1, 2).contiguous().to(dtype), state


def by_slices(x, sizes):
    return x[..., : sizes[0]], x[..., sizes[0] :]


def einsums_solved_at_once(q, k, v, g, beta, state, size, scale, norm, parted=None):
    """Tokens before heads; values and keys side by side behind one triangular solve; a list of chunks, stacked."""
    b, t, h, width = v.shape
    q, k = (expanded(norm(x), h).unflatten(1, (-1, size)) for x in (q, k))
    v, beta, total = v.unflatten(1, (-1, size)), beta.unflatten(1, (-1, size)), g.unflatten(1, (-1, size)).cumsum(2)
    apart = (total[:, :, :, None] - total[:, :, None]).permute(0, 1, 4, 2, 3)
    decay = apart.masked_fill(~causal(size, k), -torch.inf).exp()
    lower = torch.einsum("bnchk,bnshk,bnch->bnhcs", k, k, beta) * decay * causal(size, k, -1)
    both = torch.cat((v, k * total.exp()[..., None]), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(
        lower + torch.eye(size, dtype=v.dtype, device=v.device), both.transpose(2, 3), upper=False, unitriangular=True)
    new, read = (parted or functools.partial(torch.split, dim=-1))(solved, (width, k.shape[-1]))
    scores = torch.einsum("bnchk,bnshk->bnhcs", q, k) * decay
    state = torch.zeros(b, h, k.shape[-1], width, dtype=v.dtype, device=v.device) if state is None else state
    out = []
    for i in range(t // size):
        corrected = new[:, i] - torch.einsum("bhck,bhkv->bhcv", read[:, i], state)
        entered = torch.einsum("bchk,bhkv,bch->bhcv", q[:, i], state, total[:, i].exp())
        out.append(entered + torch.einsum("bhcs,bhsv->bhcv", scores[:, i], corrected))
        left = (total[:, i, -1:] - total[:, i]).exp()
        added = torch.einsum("bchk,bhcv,bch->bhkv", k[:, i], corrected, left)
        state = state * total[:, i, -1].exp()[..., None, None] + added
    return torch.stack(out, 1).transpose(2, 3).reshape(b, t, h, width) * scale, state


def one_chunk(q, k, v, g, beta, state, inverse):
    """One chunk [b, h, c, ...]; g: [b, h, c, 1], or a gate a channel [b, h, c, K]."""
    total = g.cumsum(2)
    strictly, here = causal(k.shape[2], k, -1), causal(k.shape[2], k)
    apart = total[:, :, :, None] - total[:, :, None]  # [b, h, c, c, K or 1]
    decay = apart.masked_fill(~here[..., None], -torch.inf).exp()
    lower = beta * (k[:, :, :, None] * decay * k[:, :, None]).sum(-1) * strictly
    new = inverse(lower) @ (beta * (v - (k * total.exp()) @ state))
    scores = (q[:, :, :, None] * decay * k[:, :, None]).sum(-1)
    out = (q * total.exp()) @ state + scores @ new
    kept = k * (total[:, :, -1:] - total).exp()
    return out, total[:, :, -1, :, None].exp() * state + kept.mT @ new


def chunk_after_chunk(q, k, v, g, beta, state, size, scale, norm, inverse=by_solving):
    """Everything within the loop, chunks cut out of the sequence; a gate a channel or a head."""
    q, k = (expanded(norm(x), v.shape[2]) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q * scale, k, v, g, beta[..., None]))
    state, out = zeros_for(k, v) if state is None else state, []
    for start in range(0, v.shape[2], size):
        part, state = one_chunk(*(x[:, :, start : start + size] for x in (q, k, v, g, beta)), state, inverse)
        out.append(part)
    return torch.cat(out, 2).transpose(1, 2), state


def chunks_split_off(q, k, v, g, beta, state, size, scale, norm):
    """Chunks by `split`, and the last one shorter."""
    q, k = (repeated(norm(x), v.shape[2]) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    parts = [x.transpose(1, 2).split(size, dim=2) for x in (q, k, v, g, beta[..., None])]
    state, out = zeros_for(k.transpose(1, 2), v.transpose(1, 2)) if state is None else state, []
    for chunk in zip(*parts, strict=True):
        part, state = one_chunk(*chunk, state, by_doubling)
        out.append(part * scale)
    return torch.cat(out, 2).transpose(1, 2), state


def channel_gates_by_columns(q, k, v, g, beta, state, size, scale, norm):
    """Kimi Delta Attention: the triangles a column at a time, as decays differ in every channel."""
    b, t, h, _ = v.shape
    q, k = (repeated(norm(x), h) for x in (q, k))
    q, k, v, g, beta = (chunked(x.transpose(1, 2), size) for x in (q * scale, k, v, g, beta))
    total = g.cumsum(-2)
    lower = torch.zeros(*k.shape[:-1], size, dtype=k.dtype, device=k.device)
    scores = torch.zeros_like(lower)
    for i in range(size):
        decayed = k[..., i : i + 1, :] * (total - total[..., i : i + 1, :]).clamp(max=0).exp()
        lower[..., i] = torch.einsum("...cd,...cd->...c", k, decayed)
        scores[..., i] = torch.einsum("...cd,...cd->...c", q, decayed)
    lower = (lower * beta[..., None]).masked_fill(~causal(size, k, -1), 0)
    scores = scores.masked_fill(~causal(size, k), 0)
    solved = by_rows_in_place(lower) * beta[..., None, :]
    read, new = solved @ (total.exp() * k), solved @ v
    state = zeros_for(k, v) if state is None else state
    out = torch.zeros_like(v)
    for i in range(t // size):
        corrected = new[:, :, i] - read[:, :, i] @ state
        out[:, :, i] = (q[:, :, i] * total[:, :, i].exp()) @ state + scores[:, :, i] @ corrected
        kept = (total[:, :, i, -1:] - total[:, :, i]).exp() * k[:, :, i]
        state = state * total[:, :, i, -1, :, None].exp() + kept.transpose(-1, -2) @ corrected
    return out.flatten(2, 3).transpose(1, 2), state


def gates_in_the_operands(q, k, v, g, beta, state, size, scale, norm):
    """exp(G) into queries and keys, exp(-G) into the keys they meet; chunks unbound, heads grouped by a view."""
    b, t, h, width = v.shape
    groups = k.shape[2]
    q, k = (norm(x).transpose(1, 2)[:, :, None] for x in (q, k))  # [b, hk, 1, t, K]
    g = g if g.dim() == 4 else g[..., None]
    v, g, beta = (x.transpose(1, 2).reshape(b, groups, h // groups, t, -1) for x in (v, g, beta))
    state = torch.zeros(b, groups, h // groups, k.shape[-1], width, dtype=v.dtype, device=v.device) if state is None else (
        state.reshape(b, groups, h // groups, k.shape[-1], width))
    out = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*(x.chunk(t // size, 3) for x in (q, k, v, g, beta)), strict=True):
        total = g_c.cumsum(3)
        ahead, behind, last = k_c * total.exp(), k_c * (-total).exp(), total[:, :, :, -1:]
        solved = by_power_series((beta_c * (ahead @ behind.mT)).tril(-1))
        new = solved @ (beta_c * v_c) - solved @ (beta_c * ahead) @ state
        asked = q_c * total.exp() * scale
        out.append(asked @ state + (asked @ behind.mT).tril() @ new)
        state = last.mT.exp() * state + (behind * last.exp()).mT @ new
    return torch.cat(out, 3).reshape(b, h, t, width).transpose(1, 2), state.reshape(b, h, -1, width)


def no_gate_row_by_row(q, k, v, g, beta, state, size, scale, norm):
    """DeltaNet's WY form: pseudo values and keys, each row out of those above it."""
    q, k = (repeated(norm(x), v.shape[2]).transpose(1, 2) for x in (q, k))
    q, k, v = (chunked(x, size) for x in (q * scale, k, v.transpose(1, 2)))
    beta = chunked(beta.transpose(1, 2), size)[..., None]
    met = k @ k.mT
    values, keys = [], []
    for i in range(size):
        value, key = v[..., i, :], k[..., i, :]
        if i:
            value = value - (met[..., i, :i, None] * torch.stack(values, -2)).sum(-2)
            key = key - (met[..., i, :i, None] * torch.stack(keys, -2)).sum(-2)
        values.append(beta[..., i, :] * value)
        keys.append(beta[..., i, :] * key)
    new, read = torch.stack(values, -2), torch.stack(keys, -2)
    state, out = zeros_for(k, v) if state is None else state, []
    for i in range(k.shape[2]):
        corrected = new[:, :, i] - read[:, :, i] @ state
        out.append(q[:, :, i] @ state + (q[:, :, i] @ k[:, :, i].mT).tril() @ corrected)
        state = state + k[:, :, i].mT @ corrected
    return torch.stack(out, 2).flatten(2, 3).transpose(1, 2), state


def no_gate_inverse_first(q, k, v, g, beta, state, size, scale, norm):
    """DeltaNet's WY form by an inverse: of queries alone, chunks are all that is read, as few as there are."""
    q, k = (repeated(norm(x), v.shape[2]).transpose(1, 2) for x in (q, k))
    q, k, v = (chunked(x, size) for x in (q * scale, k, v.transpose(1, 2)))
    beta = chunked(beta.transpose(1, 2), size)[..., None]
    inverse = by_rows_in_place((k * beta @ k.mT).tril(-1))
    new, read = inverse @ (v * beta), inverse @ (k * beta)
    state, out = zeros_for(k, v) if state is None else state, []
    for i in range(k.shape[2]):
        q_c, k_c = q[:, :, i], k[:, :, i]
        corrected = new[:, :, i] - read[:, :, i] @ state
        out.append(q_c @ state + (q_c @ k_c.mT).tril() @ corrected)
        state = state + k_c.mT @ corrected
    return torch.stack(out, 2).flatten(2, 3).transpose(1, 2), state


def whole_sequence(q, k, v, g, beta, state, size, scale, norm):
    """One triangle over all tokens, and no loop."""
    q, k = (repeated(norm(x), v.shape[2]) for x in (q, k))
    total = g.cumsum(1).transpose(1, 2)
    decay = torch.where(causal(v.shape[1], k), (total[..., :, None] - total[..., None, :]), -torch.inf).exp()
    lower = torch.einsum("bthk,bshk->bhts", k, k) * decay * beta.transpose(1, 2)[..., None]
    wanted = v if state is None else v - torch.einsum("bthk,bhkv,bht->bthv", k, state, total.exp())
    new = torch.linalg.solve_triangular(
        lower.tril(-1), (wanted * beta[..., None]).transpose(1, 2), upper=False, unitriangular=True)
    out = torch.einsum("bhts,bhsv->bthv", torch.einsum("bthk,bshk->bhts", q, k) * decay, new)
    final = torch.einsum("bthk,bhtv,bht->bhkv", k, new, (total[..., -1:] - total).exp())
    if state is not None:
        out = out + torch.einsum("bthk,bhkv,bht->bthv", q, state, total.exp())
        final = final + total[..., -1].exp()[..., None, None] * state
    return out * scale, final


def inverse_in_halves(q, k, v, g, beta, state, size, scale, norm, inverse=by_halves):
    """Decays as running products of what is kept; the values weighted before, the keys behind the inverse."""
    b, t, h, width = v.shape
    q, k = (chunked(repeated(norm(x), h).transpose(1, 2), size) for x in (q, k))
    v, beta, g = (chunked(x.transpose(1, 2), size) for x in (v, beta, g))
    total = torch.cumsum(g, -1)
    decay = torch.exp((total[..., None] - total[..., None, :]).masked_fill(~causal(size, k), float("-inf")))
    solved = inverse(torch.tril(torch.einsum("bhnck,bhnsk->bhncs", k * beta[..., None], k) * decay, -1))
    new = torch.einsum("bhncs,bhns,bhnsv->bhncv", solved, beta, v)
    read = torch.einsum("bhncs,bhns,bhnsk->bhnck", solved, beta * total.exp(), k)
    out = torch.empty_like(v)
    state = zeros_for(k, v) if state is None else state
    for i in range(t // size):
        at = (slice(None), slice(None), i)
        corrected = new[at] - read[at] @ state
        scores = (scale * q[at]) @ k[at].mT * decay[at]
        out[at] = torch.baddbmm(
            (scores @ corrected).flatten(0, 1), (q[at] * total[at].exp()[..., None]).flatten(0, 1),
            state.flatten(0, 1), alpha=scale).unflatten(0, (b, h))
        last = total[..., i, -1:]
        state = last.exp()[..., None] * state + (k[at] * (last - total[at]).exp()[..., None]).mT @ corrected
    return out.reshape(b, h, t, width).transpose(1, 2), state


def low_precision(q, k, v, g, beta, state, size, scale, norm):
    """Results of each chunk in the operands' dtype, sums of gates and the inverse in float32."""
    dtype, t = v.dtype, v.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (expanded(norm(x.to(wide)).to(dtype), v.shape[2]) for x in (q, k))
    behind = -t % size
    q, k, v, beta, g = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, behind)).transpose(1, 2) for x in (q, k, v, beta, g))
    q, k, v, beta, total = (chunked(x.to(wide), size) for x in (q, k, v, beta, g))
    total = total.cumsum(-1)
    decay = (total[..., None] - total[..., None, :]).masked_fill(~causal(size, k), -torch.inf).exp()
    lower = ((beta[..., None] * k) @ k.mT * decay).masked_fill(~causal(size, k, -1), 0)
    solved = by_general_inverse(lower) * beta[..., None, :]
    state, out = zeros_for(k, v) if state is None else state.to(wide), []
    for i in range(v.shape[2]):
        kept = total[:, :, i].exp()[..., None]
        new = solved[:, :, i] @ (v[:, :, i] - kept * k[:, :, i] @ state)
        o = (q[:, :, i] * kept) @ state + (q[:, :, i] @ k[:, :, i].mT * decay[:, :, i]) @ new
        out.append((o * scale).to(dtype))
        state = state * kept[:, :, -1:] + ((kept[:, :, -1:] / kept) * k[:, :, i]).mT @ new
    return torch.cat(out, 2)[:, :, :t].transpose(1, 2), state


def with_rows_in_a_list(*args):
    return chunk_after_chunk(*args, inverse=by_rows_in_a_list)


def chunks_put_together(q, k, v, g, beta, state, size, scale, norm):
    """What each chunk reads is concatenated along the tokens; one solve for values and keys that gates are in."""
    q, k = expanded(norm(q) * scale, v.shape[2]), expanded(norm(k), v.shape[2])
    q, k, v, g, beta = (x.unflatten(1, (-1, size)).movedim(3, 1) for x in (q, k, v, g[..., None], beta[..., None]))
    total = g.squeeze(-1).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    both = torch.cat((beta * v, beta * total[..., None].exp() * k), -1)
    one = torch.eye(size, dtype=v.dtype, device=v.device)
    both = torch.linalg.solve_triangular(((beta * k) @ k.mT * decay).tril(-1) + one, both, upper=False)
    values, keys = both.split([v.shape[-1], k.shape[-1]], -1)
    scores, left = q @ k.mT * decay, (total[..., -1:] - total)[..., None].exp() * k
    state, out = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]) if state is None else state, []
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        out.append(total[:, :, i, :, None].exp() * q[:, :, i] @ state + scores[:, :, i] @ new)
        state = total[:, :, i, -1, None, None].exp() * state + left[:, :, i].mT @ new
    return torch.cat(out, 2).transpose(1, 2), state


def with_zeros_behind(form):
    """`form`, which takes whole chunks, over operands that zeros are concatenated to."""

    def padded(q, k, v, g, beta, state, chunk, scale, norm):
        t = q.shape[1]
        operands = (
            x if x is None else torch.cat((x, x.new_zeros(x.shape[0], -t % chunk, *x.shape[2:])), 1)
            for x in (q, k, v, g, beta)
        )
        o, final = form(*operands, state, chunk, scale, norm)
        return o[:, :t], final

    return padded
