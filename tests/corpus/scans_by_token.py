"""Mamba-2's scan token after token, as naive and reference code has it, and what looks like it and is none.

Forms as in `scans.py`; `size` is of no matter here.
"""

from __future__ import annotations

from functools import partial

import torch

from .scans import to_heads


def first_state(x, B, state):
    return x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]) if state is None else state


def einsums_within(x, dt, A, B, C, D, state, size, *, skip=lambda D, x: D[:, None] * x):
    """All of a step within the step, the skip included; results stacked."""
    B, C = to_heads(B, x.shape[2]), to_heads(C, x.shape[2])
    state, out = first_state(x, B, state), []
    for i in range(x.shape[1]):
        entered = (dt[:, i] * A).exp()[..., None, None] * state
        state = entered + torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i], B[:, i])
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]) + skip(D, x[:, i]))
    return torch.stack(out, 1), state


def by_state(x, dt, A, B, C, D, state, size, *, decay=torch.exp, weigh=lambda dt: dt,
             products=lambda added: added, read_first=False):  # fmt: skip
    """Decays and products of all tokens in front of the loop, as Mamba-1's reference has them."""
    h = x.shape[2]
    decays, B, C = decay(dt * A), to_heads(B, h), to_heads(C, h)
    added = products(torch.einsum("blh,blhp,blhn->blhpn", weigh(dt), x, B))
    state, out = first_state(x, B, state), []
    for i in range(x.shape[1]):
        following = decays[:, i, :, None, None] * state + added[:, i]
        out.append(((state if read_first else following) * C[:, i, :, None]).sum(-1))
        state = following
    return torch.stack(out, 1) + D[:, None] * x, state


def weighted_inputs(x, dt, A, B, C, D, state, size):
    """Inputs weighted in front, logarithms of decays too; states with their channels last, outer products as GEMMs."""
    h = x.shape[2]
    x_dt, a, B, C = x * dt[..., None], dt * A, to_heads(B, h), to_heads(C, h)
    state, out = first_state(x, B, state).mT, []
    for i in range(x.shape[1]):
        state = torch.exp(a[:, i])[..., None, None] * state + B[:, i, ..., None] @ x_dt[:, i, :, None]
        out.append((C[:, i, :, None] @ state).squeeze(-2))
    return torch.stack(out, 1) + D[:, None] * x, state.mT


def into_zeros(x, dt, A, B, C, D, state, size):
    """Steps multiply B; tokens unbound, results written into zeros."""
    h = x.shape[2]
    decays, dB, C = (A * dt).exp().unbind(1), (dt[..., None] * to_heads(B, h)).unbind(1), to_heads(C, h)
    state, out = first_state(x, dB[0], state), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = state * decays[i][..., None, None] + x[:, i, ..., None] * dB[i][..., None, :]
        out[:, i] = (state @ C[:, i, ..., None])[..., 0]
    return out + x * D[None, None, :, None], state


def groups_within(x, dt, A, B, C, D, state, size):
    """B and C become those of heads within a step."""
    h, state, out = x.shape[2], first_state(x, B, state), []
    for i in range(x.shape[1]):
        b, c = (z[:, i].repeat_interleave(h // z.shape[2], 1) for z in (B, C))
        added = (dt[:, i, :, None] * x[:, i])[..., None] * b[:, :, None]
        state = torch.exp(dt[:, i] * A)[:, :, None, None] * state + added
        out.append((state * c[:, :, None]).sum(-1) + D[None, :, None] * x[:, i])
    return torch.stack(out, 1), state


def one_step_for_all_heads(x, dt, A, B, C, D, state, size):
    return einsums_within(x, dt[..., :1].expand_as(dt), A, B, C, D, state, size)


SCANS_BY_TOKEN = {
    f.__name__: f
    for f in (einsums_within, by_state, weighted_inputs, into_zeros, groups_within, one_step_for_all_heads)
}


def rates_of_channels(x, dt, A, B, C, D, state, size):
    """Mamba-1's rates, one for each channel of a head: no key's channel, so no linear attention either."""
    decays = (dt[..., None] * A[:, None] * torch.linspace(1, 2, x.shape[3])).exp()
    added = torch.einsum("blh,blhp,blhn->blhpn", dt, x, to_heads(B, x.shape[2]))
    C, state, out = to_heads(C, x.shape[2]), first_state(x, B, state), []
    for i in range(x.shape[1]):
        state = decays[:, i, ..., None] * state + added[:, i]
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
    return torch.stack(out, 1) + D[:, None] * x, state


# Other weights than the step: linear attentions whose decays are the step's.
WEIGHED = {"squared": torch.square, "summed": lambda dt: dt.cumsum(1), "unweighted": torch.ones_like}


def first_left_out(added):
    return added * (torch.arange(added.shape[1]) > 0)[:, None, None, None]


# (form, the tag of the refusal; None where it is nobody's loop)
NEAR_SCANS_BY_TOKEN = {
    "read_before_the_update": (partial(by_state, read_first=True), "differs"),
    "a_further_factor": (partial(by_state, decay=lambda a: 0.9 * a.exp()), "decay"),
    "rates_of_channels": (rates_of_channels, None),
    # What is made in front of the loop is not made token by token.
    "products_summed": (partial(by_state, products=lambda added: added.cumsum(1)), None),
    "products_reversed": (partial(by_state, products=lambda added: added.flip(1)), None),
    "first_product_left_out": (partial(by_state, products=first_left_out), None),
    "products_of_all": (partial(by_state, products=lambda added: added.mean(1, keepdim=True).expand_as(added)), None),
    "products_mixed": (
        partial(by_state, products=lambda added: torch.einsum(
            "ts,bshpn->bthpn", torch.ones(added.shape[1], added.shape[1]).tril(), added)), None),
}  # fmt: skip
