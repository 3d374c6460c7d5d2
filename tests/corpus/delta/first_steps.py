"""Loops over tokens whose first step has no state to enter it: states begin as the number 0, as `None`, or as what the
first token adds; and first steps that are none of the recurrence."""

from __future__ import annotations

import torch

from .block import Spelling
from .parts import heads_of, no_norm


def delta_from_the_number(q, k, v, g, beta, state, size, scale, norm):
    """Every step is the same code."""
    q, k = heads_of(q, k, v, scale, norm)
    state, out = 0, []
    for i in range(v.shape[1]):
        state = state * g[:, i].exp()[..., None, None]
        predicted = (k[:, i, ..., None] * state).sum(-2)
        new = (v[:, i] - predicted) * beta[:, i, :, None]
        state = state + k[:, i, ..., None] * new[..., None, :]
        out.append((q[:, i, ..., None] * state).sum(-2))
    return torch.stack(out, 1), state


def delta_from_none(q, k, v, g, beta, state, size, scale, norm):
    """The first step corrects nothing, and reads no gate."""
    q, k = heads_of(q, k, v, scale, norm)
    state, out = None, []
    for i in range(v.shape[1]):
        new = v[:, i]
        if state is not None:
            state = g[:, i].exp().reshape(*g.shape[:1], v.shape[2], -1, 1) * state
            new = new - torch.einsum("bhkv,bhk->bhv", state, k[:, i])
        added = torch.einsum("bhk,bhv->bhkv", k[:, i], beta[:, i, :, None] * new)
        state = added if state is None else state + added
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(out, 1), state


def linear_from_none(q, k, v, g, beta, state, size, scale, norm):
    q, k = heads_of(q, k, v, scale, norm)
    state, out = None, torch.zeros_like(v)
    for i in range(v.shape[1]):
        added = k[:, i, ..., None] @ v[:, i, :, None]
        state = added if state is None else g[:, i].exp().reshape(*g.shape[:1], v.shape[2], -1, 1) * state + added
        out[:, i] = (q[:, i, :, None] @ state).squeeze(-2)
    return out, state


def linear_from_zeros_like_it(q, k, v, g, beta, state, size, scale, norm):
    q, k = heads_of(q, k, v, scale, norm)
    decays, state, out = g.exp(), None, []
    for i in range(v.shape[1]):
        added = torch.einsum("bhk,bhv->bhkv", k[:, i], v[:, i])
        state = torch.zeros_like(added) if state is None else state
        state = decays[:, i].reshape(*g.shape[:1], v.shape[2], -1, 1) * state + added
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, i], state))
    return torch.stack(out, 1), state


def linear_from_the_first_product(q, k, v, g, beta, state, size, scale, norm):
    """Products of all tokens in front, of which the first is the state; the loop begins at the second."""
    q, k = heads_of(q, k, v, scale, norm)
    added, decays = k[..., None] * v[..., None, :], g.exp().reshape(*g.shape[:2], v.shape[2], -1, 1)
    states = [added[:, 0]]
    for i in range(1, v.shape[1]):
        states.append(decays[:, i] * states[-1] + added[:, i])
    return torch.stack([(q[:, i, ..., None] * s).sum(-2) for i, s in enumerate(states)], 1), states[-1]


def rate_from_the_number(q, k, v, g, beta, state, size, scale, norm):
    """RetNet's, as its recurrent form is tested against the parallel one."""
    q, k = heads_of(q, k, v, scale, norm)
    rates, state, out = g.exp()[:, None, None], 0, []
    for i in range(v.shape[1]):
        state = rates * state + k[:, i, ..., None] * v[:, i, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, i], state))
    return torch.stack(out, 1), state


def gates_within_the_steps(q, k, v, g, beta, state, size, scale, norm):
    """Decays and weights are a step's own, and the first has no decay."""
    q, k = heads_of(q, k, v, scale, norm)
    state, out = None, []
    for i in range(v.shape[1]):
        new = v[:, i]
        if i > 0:
            state = torch.sigmoid(g[:, i] + 0.5 * beta[:, i])[..., None, None] * state
            new = new - (state * k[:, i, ..., None]).sum(-2)
        added = k[:, i, ..., None] * (beta[:, i, :, None].sigmoid() * new)[..., None, :]
        state = added + state if i else added
        out.append((state * q[:, i, ..., None]).sum(-2))
    return torch.stack(out, 1), state


FIRST_STEPS = {
    "delta_from_the_number": Spelling(delta_from_the_number, norm=no_norm),
    "delta_from_none": Spelling(delta_from_none),
    "delta_from_none_channel_gates": Spelling(delta_from_none, gate="channel"),
    "gates_within_the_steps": Spelling(gates_within_the_steps, norm=no_norm),
    "linear_from_none": Spelling(linear_from_none, delta=False, norm=no_norm),
    "linear_from_none_channel_gates": Spelling(linear_from_none, gate="channel", delta=False),
    "linear_from_zeros_like_it": Spelling(linear_from_zeros_like_it, delta=False, norm=no_norm),
    "linear_from_the_first_product": Spelling(linear_from_the_first_product, delta=False, norm=no_norm),
    "rate_from_the_number": Spelling(rate_from_the_number, gate="rate", delta=False, norm=no_norm),
}


def other_first_step(first, read=lambda o: o):
    """A linear attention whose first state is `first(k v^T of a token, its decay)`, of which `read` is collected."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k = heads_of(q, k, v, scale, norm)
        added, decays = k[..., None] * v[..., None, :], g.exp()[..., None, None]
        state, out = None, []
        for i in range(v.shape[1]):
            here = k[:, i, ..., None] * v[:, i, :, None]
            state = first(here, decays[:, i], added) if state is None else decays[:, i] * state + here
            o = torch.einsum("bhk,bhkv->bhv", q[:, i], state)
            out.append(o if i else read(o))
        return torch.stack(out, 1), state

    return Spelling(form, delta=False, norm=no_norm)


OTHER_FIRST_STEPS = {
    "twice": other_first_step(lambda here, decay, added: 2 * here),
    "decayed": other_first_step(lambda here, decay, added: decay * here),
    "from_one": other_first_step(lambda here, decay, added: decay * 1 + here),
    "subtracted": other_first_step(lambda here, decay, added: 0 - here),
    "read_otherwise": other_first_step(lambda here, decay, added: here, read=lambda o: 2 * o),
}
of_another_token = other_first_step(lambda here, decay, added: added[:, 1])
