"""Mamba-1's scan as plain code has it, and what looks like it and is none.

A form takes (u [b, t, d], dt [b, t, d], A [d, n], B, C [b, t, n], D [d], state [b, d, n] or None) and returns y
[b, t, d] and the last state.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan


def first_state(u, A, state):
    return u.new_zeros(u.shape[0], *A.shape) if state is None else state


def as_transformers(u, dt, A, B, C, D, state):
    """Channels before tokens, float32 decays and products in front of the loop, results stacked last."""
    u, dt, dtype = u.mT, dt.mT, u.dtype
    decays = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    added = (dt[:, :, :, None] * B[:, None].float()) * u[:, :, :, None].float()
    state, out = first_state(u.mT, A, state), []
    for i in range(u.shape[2]):
        state = decays[:, :, i] * state + added[:, :, i]
        out.append(torch.matmul(state.to(dtype), C[:, i].unsqueeze(-1))[:, :, 0])
    return (torch.stack(out, dim=-1) + u * D[None, :, None]).mT, state


def einsums(u, dt, A, B, C, D, state):
    """As in minimal rewritings of the paper's code."""
    decays = torch.einsum("bld,dn->bldn", dt, A).exp()
    added = torch.einsum("bld,bln,bld->bldn", dt, B, u)
    state, out = first_state(u, A, state), []
    for i in range(u.shape[1]):
        state = decays[:, i] * state + added[:, i]
        out.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
    return torch.stack(out, 1) + u * D, state


def within(u, dt, A, B, C, D, state, *, skip=lambda D, u: D * u):
    """All of a step within the step, the skip included."""
    state, out = first_state(u, A, state), []
    for i in range(u.shape[1]):
        step = dt[:, i, :, None]
        state = torch.exp(step * A) * state + step * B[:, i, None] * u[:, i, :, None]
        out.append((state * C[:, i, None]).sum(-1) + skip(D, u[:, i]))
    return torch.stack(out, 1), state


def unbound(u, dt, A, B, C, D, state):
    """Tokens unbound, kept as a dimension in results, which are concatenated."""
    inputs = ((dt * u)[..., None] * B[:, :, None]).unbind(1)
    state, out = first_state(u, A, state), []
    for step, added, c in zip(dt.unbind(1), inputs, C.unbind(1), strict=True):
        state = state * (step[..., None] * A).exp() + added
        out.append((state @ c[..., None]).mT)
    return torch.cat(out, 1) + D * u, state


def into_zeros(u, dt, A, B, C, D, state):
    decays, added = (dt[..., None] * A[None, None]).exp(), dt[..., None] * (u[..., None] * B[:, :, None])
    state, out = first_state(u, A, state), torch.zeros_like(u)
    for i in range(u.shape[1]):
        state = decays[:, i] * state + added[:, i]
        out[:, i] = (state @ C[:, i, :, None]).squeeze(-1)
    return out + u * D, state


def states_first(u, dt, A, B, C, D, state):
    """States before channels, and tokens sliced."""
    state, out = first_state(u, A, state).mT, []
    for i in range(u.shape[1]):
        step = dt[:, i : i + 1]
        state = torch.exp(step * A.T) * state + B[:, i, :, None] * (step * u[:, i : i + 1])
        out.append(C[:, i : i + 1] @ state)
    return torch.cat(out, 1) + D * u, state.mT


def from_none(u, dt, A, B, C, D, state):
    """The first step has no state, and reads no decay."""
    out = []
    for i in range(u.shape[1]):
        added = (dt[:, i] * u[:, i])[..., None] * B[:, i, None]
        state = added if state is None else state * torch.exp(dt[:, i, :, None] * A) + added
        out.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
    return torch.stack(out, 1) + D * u, state


def states_collected(u, dt, A, B, C, D, state):
    """A loop for the states alone; all are read at once behind it."""
    decays, added = (dt[..., None] * A).exp(), (dt * u)[..., None] * B[:, :, None]
    state, states = first_state(u, A, state), []
    for i in range(u.shape[1]):
        state = decays[:, i] * state + added[:, i]
        states.append(state)
    y = (torch.stack(states, 1) @ C[..., None]).squeeze(-1)
    return y + D * u, state


FORMS = {f.__name__: f for f in (as_transformers, einsums, within, unbound, into_zeros, states_first, from_none)}


def step_by_step(u, dt, A, B, C, D, state, *, decay=lambda dt, A, state, i: (dt[..., None] * A).exp(),
                 add=lambda dt, u, B: (dt * u)[..., None] * B[:, None], read=lambda state, C: (state * C[:, None]).sum(-1),
                 after=lambda state: state, before=False, late=0):  # fmt: skip
    """A loop of which each part may be another. late: how many tokens late C is read, around the end."""
    state, out = first_state(u, A, state), []
    for i in range(u.shape[1]):
        entering = state
        state = after(decay(dt[:, i], A, state, i) * state + add(dt[:, i], u[:, i], B[:, i]))
        out.append(read(entering if before else state, C[:, i - late]))
    return torch.stack(out, 1) + D * u, state


def products(change, u, dt, A, B, C, D, state):
    """What enters of all tokens, changed in front of the loop."""
    decays, added = (dt[..., None] * A).exp(), change((dt * u)[..., None] * B[:, :, None])
    state, out = first_state(u, A, state), []
    for i in range(u.shape[1]):
        state = decays[:, i] * state + added[:, i]
        out.append((state * C[:, i, None]).sum(-1))
    return torch.stack(out, 1) + D * u, state


def read_again(u, dt, A, B, C, D, state):
    """A state in the middle is read elsewhere, too."""
    state, out, kept = first_state(u, A, state), [], []
    for i in range(u.shape[1]):
        state = (dt[:, i, :, None] * A).exp() * state + (dt[:, i] * u[:, i])[..., None] * B[:, i, None]
        kept.append(state.square())
        out.append((state * C[:, i, None]).sum(-1))
    return torch.stack(out, 1) + D * u, state + kept[1]


def two_states(u, dt, A, B, C, D, state):
    """A second state, without decays, is mixed into the first."""
    state, out = first_state(u, A, state), []
    other = torch.zeros_like(state)
    for i in range(u.shape[1]):
        added = (dt[:, i] * u[:, i])[..., None] * B[:, i, None]
        other = other * 0.5 + added
        state = (dt[:, i, :, None] * A).exp() * state + added + 0.1 * other
        out.append((state * C[:, i, None]).sum(-1))
    return torch.stack(out, 1) + D * u, state


def last_left_out(u, dt, A, B, C, D, state):
    """The last token does not decay what came before."""
    state, out = first_state(u, A, state), []
    for i in range(u.shape[1]):
        decay = (dt[:, i, :, None] * A).exp() if i + 1 < u.shape[1] else 1.0
        state = decay * state + (dt[:, i] * u[:, i])[..., None] * B[:, i, None]
        out.append((state * C[:, i, None]).sum(-1))
    return torch.stack(out, 1) + D * u, state


def other_steps(u, dt, A, B, C, D, state):
    """What enters is weighted with the step of another token."""
    decays, added = (dt[..., None] * A).exp(), (dt.roll(1, 1) * u)[..., None] * B[:, :, None]
    state, out = first_state(u, A, state), []
    for i in range(u.shape[1]):
        state = decays[:, i] * state + added[:, i]
        out.append((state * C[:, i, None]).sum(-1))
    return torch.stack(out, 1) + D * u, state


NEAR = {
    "decay_of_the_state": partial(step_by_step, decay=lambda dt, A, s, i: (dt[..., None] * A * s.square()).exp()),
    "decay_of_the_position": partial(step_by_step, decay=lambda dt, A, s, i: (dt[..., None] * A * (i + 1)).exp()),
    "decay_with_a_factor": partial(step_by_step, decay=lambda dt, A, s, i: 0.9 * (dt[..., None] * A).exp()),
    "decay_less_than_one": partial(step_by_step, decay=lambda dt, A, s, i: 1 - (dt[..., None] * A).exp()),
    "decay_clamped": partial(step_by_step, decay=lambda dt, A, s, i: (dt[..., None] * A).exp().clamp(min=0.5)),
    "decay_of_the_step_squared": partial(step_by_step, decay=lambda dt, A, s, i: (dt.square()[..., None] * A).exp()),
    "read_before_the_update": partial(step_by_step, before=True),
    "C_of_another_token": partial(step_by_step, late=1),
    "step_squared_in_the_input": partial(step_by_step, add=lambda dt, u, B: (dt * dt * u)[..., None] * B[:, None]),
    "no_step_in_the_input": partial(step_by_step, add=lambda dt, u, B: u[..., None] * B[:, None]),
    "input_squared": partial(step_by_step, add=lambda dt, u, B: (dt * u * u)[..., None] * B[:, None]),
    "squashed": partial(step_by_step, after=torch.tanh),
    "states_mixed": partial(step_by_step, after=lambda s: s + 0.1 * s.flip(-1)),
    "largest_read": partial(step_by_step, read=lambda s, C: (s * C[:, None]).amax(-1)),
    "read_squared": partial(step_by_step, read=lambda s, C: (s * s * C[:, None]).sum(-1)),
    "products_summed": partial(products, lambda added: added.cumsum(1)),
    "products_reversed": partial(products, lambda added: added.flip(1)),
    "products_averaged": partial(products, lambda added: added.mean(1, keepdim=True).expand_as(added)),
    "products_of_another_row": partial(products, lambda added: added.flip(0)),
    "read_again": read_again, "two_states": two_states, "last_left_out": last_left_out, "other_steps": other_steps,
}  # fmt: skip


def combine(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def at_once(u, dt, A, B, C, D, state, *, pair=combine, add=lambda dt, u, B: (dt[..., None] * B[:, None].float()) * u[..., None].float(),
            decay=lambda dt, A: torch.exp(A[None, :, None, :] * dt[:, :, :, None]), reverse=False,
            read=lambda s, C: torch.matmul(s, C.unsqueeze(-1)).squeeze(-1), last=-1, mode="generic"):  # fmt: skip
    """As transformers when it is compiled: no state enters."""
    u, dt, dtype = u.mT, dt.mT, u.dtype
    _, states = associative_scan(pair, (decay(dt, A), add(dt, u, B)), dim=2, reverse=reverse, combine_mode=mode)
    y = read(states.transpose(1, 2).to(dtype), C).transpose(1, 2)
    return (y + u * D[None, :, None]).mT, states[:, :, last]


def at_once_tokens_first(u, dt, A, B, C, D, state):
    """Products in einsums, tokens in front, a sum for y."""
    u, dt, B, C = (x.transpose(0, 1) for x in (u, dt, B, C))
    a, b = torch.einsum("tbd,dn->tbdn", dt, A).exp(), torch.einsum("tbd,tbn,tbd->tbdn", dt, B, u)
    _, states = associative_scan(combine, (a, b), dim=0, combine_mode="generic")
    return ((states * C[:, :, None]).sum(-1) + D * u).transpose(0, 1), states[-1]


def by_doubling(u, dt, A, B, C, D, state):
    """Hillis and Steele's: in steps of 1, 2, 4, ... tokens."""
    u, dt, B, C = (x.transpose(0, 1) for x in (u, dt, B, C))
    a, b, reach = (dt[..., None] * A).exp(), (dt * u)[..., None] * B[:, :, None], 1
    while reach < len(u):
        b = torch.cat((b[:reach], b[reach:] + a[reach:] * b[:-reach]))
        a = torch.cat((a[:reach], a[reach:] * a[:-reach]))
        reach *= 2
    return (torch.einsum("tbdn,tbn->tbd", b, C) + D * u).transpose(0, 1), b[-1]


AT_ONCE = {f.__name__: f for f in (at_once, at_once_tokens_first, by_doubling)}


def states_read_again(u, dt, A, B, C, D, state):
    return at_once(u, dt, A, B, C, D, state, read=lambda s, C: (s @ C[..., None]).squeeze(-1) * s.mean(-1))


NEAR_AT_ONCE = {
    "forgets_the_left_decay": partial(at_once, pair=lambda a, b: (b[0], b[0] * a[1] + b[1])),
    "half_of_the_left": partial(at_once, pair=lambda a, b: (a[0] * b[0], 0.5 * b[0] * a[1] + b[1])),
    "sums_alone": partial(at_once, pair=lambda a, b: (a[0] * b[0], a[1] + b[1])),
    "decays_with_the_left": partial(at_once, pair=lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1])),
    "from_the_end": partial(at_once, reverse=True),
    "no_exponential": partial(at_once, decay=lambda dt, A: torch.sigmoid(A[None, :, None, :] * dt[:, :, :, None])),
    "step_squared": partial(at_once, decay=lambda dt, A: torch.exp(A[None, :, None, :] * dt.square()[:, :, :, None])),
    "no_step_in_the_input": partial(at_once, add=lambda dt, u, B: B[:, None] * u[..., None]),
    "input_squared": partial(at_once, add=lambda dt, u, B: dt[..., None] * B[:, None] * u.square()[..., None] * u[..., None]),
    "inputs_reversed": partial(at_once, add=lambda dt, u, B: (dt[..., None] * B[:, None] * u[..., None]).flip(2)),
    "inputs_summed": partial(at_once, add=lambda dt, u, B: (dt[..., None] * B[:, None] * u[..., None]).cumsum(2)),
    "largest_read": partial(at_once, read=lambda s, C: (s * C[:, :, None]).amax(-1)),
    "squared_when_read": partial(at_once, read=lambda s, C: (s * s * C[:, :, None]).sum(-1)),
    "states_of_another_token": partial(at_once, read=lambda s, C: (s.roll(1, 1) * C[:, :, None]).sum(-1)),
    "first_state_returned": partial(at_once, last=0), "states_read_again": states_read_again,
}  # fmt: skip


class PlainMamba1(nn.Module):
    """A mixer without its convolution. `form` is the scan's spelling.

    given: a state carried in is an argument; state: the state at the end is returned.
    """

    def __init__(self, form=as_transformers, *, dim=10, d=6, n=4, given=False, state=False):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.given, self.state, self.sizes = form, given, state, (d, d, 3, n, n)
        self.in_proj, self.dt_proj = nn.Linear(dim, sum(self.sizes), bias=False), nn.Linear(3, d)
        self.out_proj, self.D = nn.Linear(d, dim, bias=False), nn.Parameter(torch.randn(d))
        self.A_log = nn.Parameter(torch.rand(d, n))

    def forward(self, x, state=None):
        u, z, low, B, C = self.in_proj(x).split(self.sizes, -1)
        u, dt, A = F.silu(u), F.softplus(self.dt_proj(low)), -torch.exp(self.A_log.float())
        y, final = self.form(u, dt, A, B, C, self.D, state)
        y = self.out_proj((y * F.silu(z)).to(x.dtype))
        return (y, final) if self.state else y

    def example_inputs(self, length=5, batch=2, dtype=torch.float32):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        x = torch.randn(batch, length, self.in_proj.in_features, generator=generator).to(dtype).requires_grad_()
        state = torch.randn(batch, *self.A_log.shape, generator=generator).requires_grad_()
        return (x, state) if self.given else (x,)
