"""What looks like a delta rule or a gated linear attention and is none: another function of the same operands."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from .chunked import chunk_after_chunk, inverse_in_halves, padded_into_zeros
from .parts import by_blocks, by_doubling, by_solving, causal, chunked, expanded, repeated, zeros_for


def not_all_rows(lower, rows=2):
    """Forward substitution that stops early."""
    inverse = -lower
    for i in range(1, lower.shape[-1] - rows):
        row, above = inverse[..., i, :i].clone(), inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row[..., None] * above).sum(-2)
    return inverse + torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)


def first_order(lower):
    """I - L alone."""
    return torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device) - lower


def one_doubling_less(lower):
    """(I - L)(I + L^2)...: enough for half of a chunk."""
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse, power = unit - lower, lower
    for _ in range(lower.shape[-1].bit_length() - 3):
        power = power @ power
        inverse = inverse @ (unit + power)
    return inverse


def in_chunks_of(own, form):
    """`form` with chunks of `own` tokens, whatever it is asked for."""
    return lambda q, k, v, g, beta, state, size, scale, norm: form(q, k, v, g, beta, state, own, scale, norm)


def with_its_diagonal(lower):
    """(2I + L)^-1."""
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower + 2 * unit, unit.expand_as(lower), upper=False)


def chunk_after_chunk_with(fault):
    """Chunks in a loop, right in all but `fault`."""

    def near(q, k, v, g, beta, state, size, scale, norm):
        q, k = (repeated(norm(x), v.shape[2]) for x in (q * scale, k))
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta[..., None]))
        state, out = zeros_for(k, v) if state is None else state, []
        for start in range(0, v.shape[2], size):
            cut = slice(start, start + size)
            o, state = _chunk(*(x[:, :, cut] for x in (q, k, v, g, beta)), state, fault)
            out.append(o)
        return torch.cat(out, 2).transpose(1, 2), state

    return near


def _chunk(q, k, v, g, beta, state, fault):
    total = g.cumsum(2)
    if fault == "gate_a_token_late":
        total = total - g
    decay = (total[..., None] - total[..., None, :]).masked_fill(~causal(k.shape[2], k), -torch.inf).exp()
    lower = beta * (k @ k.mT) * (1 if fault == "no_gate_in_the_triangle" else decay)
    if fault == "keys_meet_queries":
        lower = beta * (k @ q.mT) * decay
    solved = by_solving(lower.tril(-1))
    read = k * (1 if fault == "no_gate_where_the_state_is_read" else total.exp()[..., None])
    weighted = v - read @ state if fault == "no_weight" else beta * v - read @ state * (
        1 if fault == "weight_on_values_alone" else beta)
    new = solved @ weighted
    scores = (q @ k.mT * decay).tril(-1 if fault == "token_does_not_see_itself" else 0)
    entered = q * (1 if fault == "no_gate_on_the_queries" else total.exp()[..., None])
    left = (total if fault == "left_is_entered" else total[..., -1:] - total).exp()
    kept = total[..., -1:].exp()[..., None] ** (2 if fault == "state_decays_twice" else 1)
    out = entered @ state + scores @ (v if fault == "output_of_values" else new)
    return out, kept * state + (k * left[..., None]).mT @ new


FAULTS = (
    "gate_a_token_late", "no_gate_in_the_triangle", "keys_meet_queries", "no_gate_where_the_state_is_read", "no_weight",
    "weight_on_values_alone", "token_does_not_see_itself", "no_gate_on_the_queries", "left_is_entered",
    "state_decays_twice", "output_of_values",
)  # fmt: skip


def by_token_with(step):
    """A loop over tokens around `step(state, q, k, v, decay, weight) -> (o, state)`, operands [b, h, ...]."""

    def near(q, k, v, g, beta, state, size, scale, norm):
        q, k = (repeated(norm(x), v.shape[2]).transpose(1, 2) for x in (q, k))
        v, g, beta = (x.transpose(1, 2) for x in (v, g, beta))
        state, out = zeros_for(k, v) if state is None else state, []
        for i in range(v.shape[2]):
            decay, weight = g[:, :, i].exp()[..., None, None], beta[:, :, i, None]
            o, state = step(state, q[:, :, i] * scale, k[:, :, i], v[:, :, i], decay, weight)
            out.append(o)
        return torch.stack(out, 2).transpose(1, 2), state

    return near


def known(state, k):
    return (state * k[..., None]).sum(-2)


def corrected(by, then=lambda state: state):
    """A step that writes `by(state, q, k, v, weight)` after its decay, and `then` something becomes of the state."""

    def step(state, q, k, v, decay, weight):
        state = state * decay
        state = then(state + k[..., None] * by(state, q, k, v, weight)[..., None, :])
        return known(state, q), state

    return by_token_with(step)


def by_rule(state, q, k, v, weight):
    return (v - known(state, k)) * weight


def read_before_the_update(state, q, k, v, decay, weight):
    state = state * decay
    return known(state, q), state + k[..., None] * by_rule(state, q, k, v, weight)[..., None, :]


def decayed_after_the_correction(state, q, k, v, decay, weight):
    """The correction is of what the state held before it forgot."""
    state = state * decay + k[..., None] * by_rule(state, q, k, v, weight)[..., None, :]
    return known(state, q), state


def all_forgotten(state, q, k, v, decay, weight):
    """The decay takes what is written, too."""
    state = (state + k[..., None] * by_rule(state * decay, q, k, v, weight)[..., None, :]) * decay
    return known(state, q), state


def bonus(state, q, k, v, decay, weight):
    """RWKV's: the token itself is read with a weight of its own."""
    written = k[..., None] * v[..., None, :]
    return known(state + weight[..., None] * written, q), state * decay + written


def gate_of_each_value(q, k, v, g, beta, state, size, scale, norm):
    """The decay is one of each row that is read, not of each that is asked."""
    q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
    state = zeros_for(k.transpose(1, 2), v.transpose(1, 2)) if state is None else state
    out, decays = [], torch.sigmoid(v)
    for i in range(v.shape[1]):
        state = state * decays[:, i, :, None, :] + k[:, i, :, :, None] * v[:, i, :, None, :]
        out.append((q[:, i, :, :, None] * state).sum(-2))
    return torch.stack(out, 1), state


def values_a_token_late(q, k, v, g, beta, state, size, scale, norm):
    """A key is stored with the value of the token before."""
    q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
    state = zeros_for(k.transpose(1, 2), v.transpose(1, 2)) if state is None else state
    out, before = [], torch.zeros_like(v[:, 0])
    for i in range(v.shape[1]):
        state = state * g[:, i, :, None, None].exp() + k[:, i, :, :, None] * before[:, :, None, :]
        out.append((q[:, i, :, :, None] * state).sum(-2))
        before = v[:, i]
    return torch.stack(out, 1), state


def all_solved_at_once(values=lambda i, chunks: i, changed=lambda state: state):
    """Chunks in a loop behind one solve for all of them. values: of which chunk a chunk has them; changed: what becomes
    of the state from chunk to chunk."""

    def near(q, k, v, g, beta, state, size, scale, norm):
        q, k = (repeated(norm(x), v.shape[2]) for x in (q * scale, k))
        q, k, v, g, beta = (chunked(x.transpose(1, 2), size) for x in (q, k, v, g, beta[..., None]))
        total = g.cumsum(-1)
        decay = (total[..., None] - total[..., None, :]).tril().exp().tril()
        solved = by_blocks((beta * k @ k.mT * decay).tril(-1))
        state, out, chunks = zeros_for(k, v) if state is None else state, [], k.shape[2]
        for i in range(chunks):
            entered, last = total[:, :, i, :, None].exp(), total[:, :, i, -1:, None]
            new = solved[:, :, i] @ (beta[:, :, i] * (v[:, :, values(i, chunks)] - entered * k[:, :, i] @ state))
            out.append(entered * q[:, :, i] @ state + (q[:, :, i] @ k[:, :, i].mT * decay[:, :, i]) @ new)
            left = (last - total[:, :, i, :, None]).exp()
            state = changed(last.exp() * state + (k[:, :, i] * left).mT @ new)
        return torch.cat(out, 2).transpose(1, 2), state

    return near


def band(q, k, v, g, beta, state, size, scale, norm):
    """Decays, but nothing further away than two tokens is seen."""
    q, k = expanded(norm(q), v.shape[2]), expanded(norm(k), v.shape[2])
    total, t = g.cumsum(1), v.shape[1]
    mask = causal(t, k) & ~causal(t, k, -3)
    decay = (total[:, :, None] - total[:, None]).masked_fill(~mask[None, :, :, None], -torch.inf).exp()
    out = torch.einsum("btsh,bshv->bthv", torch.einsum("bthk,bshk->btsh", q, k) * decay, v)
    return out * scale, zeros_for(k.transpose(1, 2), v.transpose(1, 2))


NEAR_DELTA_RULES = {
    "not_all_rows": partial(padded_into_zeros, inverse=not_all_rows),
    "first_order": partial(inverse_in_halves, inverse=first_order),
    # I - L + L^2: enough for chunks of three tokens
    "second_order": partial(padded_into_zeros, inverse=lambda lower: first_order(lower) + lower @ lower),
    "one_doubling_less": in_chunks_of(8, partial(padded_into_zeros, inverse=one_doubling_less)),
    "other_sign": partial(chunk_after_chunk, inverse=lambda lower: by_doubling(-lower)),
    "upper_instead": partial(inverse_in_halves, inverse=lambda lower: by_solving(lower).mT),
    "with_its_diagonal": partial(padded_into_zeros, inverse=with_its_diagonal),
    **{fault: chunk_after_chunk_with(fault) for fault in FAULTS},
    # The first chunk has the values of the last. As many chunks as blocks of one: their numbers tell nothing.
    "values_of_another_chunk": all_solved_at_once(values=lambda i, chunks: chunks - 1 - i),
    "state_clamped": all_solved_at_once(changed=lambda state: state.clamp(-0.2, 0.2)),
    "state_gated_by_itself": all_solved_at_once(
        changed=lambda s: (s / 2) * F.gelu(2 * s / (s.norm(dim=-1, keepdim=True) + 1e-6), approximate="tanh")),
    "state_squashed": all_solved_at_once(changed=torch.tanh),
    "state_of_unit_rows": all_solved_at_once(changed=lambda state: F.normalize(state, dim=-1)),
    "state_within_a_norm": all_solved_at_once(
        changed=lambda state: state / state.norm(dim=(-2, -1), keepdim=True).clamp(min=1)),
    "state_of_unit_mean": all_solved_at_once(
        changed=lambda state: state * torch.rsqrt(state.square().mean((-2, -1), keepdim=True) + 1e-6)),
    "read_before_the_update": by_token_with(read_before_the_update),
    "decayed_after_the_correction": by_token_with(decayed_after_the_correction),
    "all_forgotten": by_token_with(all_forgotten),
    "corrected_by_the_query": corrected(lambda state, q, k, v, weight: (v - known(state, q)) * weight),
    "weight_on_the_value_alone": corrected(lambda state, q, k, v, weight: v * weight - known(state, k)),
    # TTT's kin: what is predicted goes through a nonlinearity
    "squashed": corrected(lambda state, q, k, v, weight: (v - known(state, k).tanh()) * weight),
    "state_normed": corrected(by_rule, lambda state: state / (1 + state.square().sum((-1, -2), keepdim=True)).sqrt()),
}  # fmt: skip
NEAR_LINEAR = {
    "bonus": by_token_with(bonus), "gate_of_each_value": gate_of_each_value, "values_a_token_late": values_a_token_late,
    "band": band,
}  # fmt: skip
