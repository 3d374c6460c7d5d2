"""Mamba-2's scan as different authors write it, a block around it, and what looks like it and is none.

A form takes x [b, t, h, p], dt [b, t, h], A [h], B and C [b, t, g, n], D [h], state [b, h, p, n] or None, and the chunk
size; it returns y [b, t, h, p] and the state at the end.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 4


def segment_sums(a, upper=-torch.inf, diagonal=0):
    """By a masked cumsum, as in the paper's listing."""
    t = a.size(-1)
    a = a[..., None].expand(*a.size(), t)
    a = a.masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool), diagonal=-1), 0)
    return torch.cumsum(a, -2).masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool), diagonal), upper)


def chunks(z, size):
    return z.reshape(z.shape[0], -1, size, *z.shape[2:])


def padded(z, behind):
    return F.pad(z, (0, 0) * (z.dim() - 2) + (0, behind))


def to_heads(z, heads):
    return z.repeat_interleave(heads // z.shape[2], dim=2)


def broadcast_products(x, dt, A, B, C, D, state, size):
    """Sums of products over every index at once, padded to whole chunks."""
    b, t, h, p = x.shape
    behind = (size - t % size) % size
    x, B, C = x.float(), to_heads(B.float(), h), to_heads(C.float(), h)
    skip = D[..., None] * padded(x, behind)
    x, a = x * dt[..., None], A.to(x.dtype) * dt
    x, a, B, C = (chunks(padded(z, behind), size) for z in (x, a, B, C))
    a = a.permute(0, 3, 1, 2)
    sums = torch.cumsum(a, dim=-1)
    scores = (C[:, :, :, None] * B[:, :, None]).sum(-1)
    scores = (scores[..., None] * torch.exp(segment_sums(a)).permute(0, 2, 3, 4, 1)[..., None]).sum(-1)
    y = (scores[..., None] * x[:, :, None]).sum(3)
    left = torch.exp(sums[..., -1:] - sums)
    states = ((B * left.permute(0, -2, -1, 1)[..., None])[..., None, :] * x[..., None]).sum(2)
    first = torch.zeros_like(states[:, :1]) if state is None else state[:, None].to(states.dtype)
    states = torch.cat([first, states], 1)
    carried = torch.exp(segment_sums(F.pad(sums[..., -1], (1, 0)))).transpose(1, 3)
    states = (carried[..., None, None] * states[:, :, None]).sum(1)
    states, final = states[:, :-1], states[:, -1]
    entered = (C[..., None, :] * states[:, :, None]).sum(-1)
    y = y + entered * torch.exp(sums).permute(0, 2, 3, 1)[..., None]
    y = y.reshape(b, -1, h, p) + skip
    return y[:, :t] if behind else y, final


def prefix_sums(a):
    return torch.cumsum(a, dim=-1)


def einsums(x, dt, A, B, C, D, state, size, sums_of=segment_sums, cumsum=prefix_sums):
    """The paper's listing 1."""
    b, t, h, p = x.shape
    X, a, B, C = (chunks(z, size) for z in (x * dt.unsqueeze(-1), dt * A, to_heads(B, h), to_heads(C, h)))
    a = a.permute(0, 3, 1, 2)
    sums = cumsum(a)
    y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, torch.exp(sums_of(a)), X)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, torch.exp(sums[..., -1:] - sums), X)
    first = torch.zeros_like(states[:, :1]) if state is None else state.unsqueeze(1)
    states = torch.cat([first, states], dim=1)
    carried = torch.exp(segment_sums(F.pad(sums[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", carried, states)
    states, final = states[:, :-1], states[:, -1]
    y = y + torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, torch.exp(sums))
    return y.reshape(b, t, h, p) + x * D.unsqueeze(-1), final


def matrix_products_heads_first(x, dt, A, B, C, D, state, size):
    """Differences of prefix sums under a mask of positions, batched products, a loop over chunks."""
    b, t, h, p = x.shape
    B, C = (z[:, :, :, None].expand(-1, -1, -1, h // z.shape[2], -1).reshape(b, t, h, -1) for z in (B, C))
    X, B, C = (chunks(z, size).permute(0, 3, 1, 2, 4) for z in (x * dt[..., None], B, C))
    sums = chunks(dt * A, size).permute(0, 3, 1, 2).cumsum(-1)
    position = torch.arange(size)
    causal = position[:, None] >= position
    decay = torch.where(causal, sums[..., :, None] - sums[..., None, :], -torch.inf).exp()
    y = (decay * (C @ B.transpose(-1, -2))) @ X
    total = sums[..., -1]
    added = ((total[..., None] - sums).exp()[..., None] * X).transpose(-1, -2) @ B
    state = torch.zeros(b, h, p, B.shape[-1], dtype=x.dtype) if state is None else state
    entered = []
    for c in range(t // size):
        entered.append((C[:, :, c] @ state.transpose(-1, -2)) * sums[:, :, c].exp()[..., None])
        state = total[:, :, c].exp()[..., None, None] * state + added[:, :, c]
    y = (y + torch.stack(entered, 2)).permute(0, 2, 3, 1, 4).reshape(b, t, h, p)
    return y + D[:, None] * x, state


def written_chunk_by_chunk(x, dt, A, B, C, D, state, size, late=0):
    """Results and states that are written into zeros, a chunk at a time. late: by so many chunks are states read late."""
    b, t, h, p = x.shape
    X, B, C = (chunks(z, size).transpose(2, 3) for z in (x * dt[..., None], to_heads(B, h), to_heads(C, h)))
    sums = chunks(dt * A, size).transpose(2, 3).cumsum(-1)
    entering = torch.zeros(b, t // size + 1, h, p, B.shape[-1], dtype=x.dtype)
    y = torch.zeros_like(X)
    if state is not None:
        entering[:, 0] = state
    for c in range(t // size):
        total, own = sums[:, c, :, -1:], sums[:, c]
        decay = torch.exp(own[..., None] - own[:, :, None]).masked_fill(~torch.ones(size, size).bool().tril(), 0)
        asked = C[:, c] @ entering[:, max(c - late, 0)].clone().mT
        y[:, c] = (C[:, c] @ B[:, c].mT * decay) @ X[:, c] + asked * own.exp()[..., None]
        added = (X[:, c] * (total - own).exp()[..., None]).mT @ B[:, c]
        entering[:, c + 1] = total.exp()[..., None] * entering[:, c].clone() + added
    return y.transpose(2, 3).reshape(b, t, h, p) + D[:, None] * x, entering[:, -1]


def sliced(z, size):
    return [z[:, i : i + size] for i in range(0, z.shape[1], size)]


def chunks_cut_off(x, dt, A, B, C, D, state, size, cut=sliced, turn=lambda pieces: pieces):
    """Products with steps of all tokens, then a loop over chunks that writes results in their place. turn: those of one
    operand, in the order that the loop meets them in."""
    b, t, h, p = x.shape
    X, logs, B, C = x * dt[..., None], dt * A, to_heads(B, h), to_heads(C, h)
    state = torch.zeros(b, h, p, B.shape[-1], dtype=x.dtype) if state is None else state
    y = torch.zeros_like(X)
    parts = zip(cut(X, size), cut(logs, size), turn(cut(B, size)), cut(C, size), strict=True)
    for i, (X_c, logs_c, B_c, C_c) in enumerate(parts):
        sums, n = logs_c.cumsum(1), X_c.shape[1]
        seen = torch.ones(n, n).bool().tril()[None, :, :, None]
        decay = (sums[:, :, None] - sums[:, None]).masked_fill(~seen, -torch.inf).exp()
        within = torch.einsum("blhn,bshn,blsh,bshp->blhp", C_c, B_c, decay, X_c)
        y[:, i * size : (i + 1) * size] = within + torch.einsum("blhn,bhpn,blh->blhp", C_c, state, sums.exp())
        left = (sums[:, -1:] - sums).exp()
        state = sums[:, -1].exp()[..., None, None] * state + torch.einsum("blhn,blh,blhp->bhpn", B_c, left, X_c)
    return y + D[:, None] * x, state


def one_triangle(x, dt, A, B, C, D, state, size):
    """The quadratic form over the whole sequence; prefix sums by a product with a triangle of ones."""
    b, t, h, _ = x.shape
    sums = torch.einsum("st,bth->bsh", torch.ones(t, t, dtype=x.dtype).tril(), A * dt)
    decay = torch.exp(sums[:, :, None] - sums[:, None]) * torch.ones(t, t, dtype=x.dtype).tril()[None, :, :, None]
    groups = torch.einsum("blgn,bsgn->blsg", C, B)
    scores = groups.repeat_interleave(h // B.shape[2], -1) * decay * dt[:, None]
    y = torch.einsum("blsh,bshp->blhp", scores, x)
    weight = torch.exp(sums[:, -1:] - sums) * dt
    final = torch.einsum("bth,bthp,bthn->bhpn", weight, x, to_heads(B, h))
    if state is not None:
        y = y + torch.einsum("blhn,bhpn,blh->blhp", to_heads(C, h), state, sums.exp())
        final = final + sums[:, -1].exp()[..., None, None] * state
    return y + D[:, None] * x, final


FORMS = {
    "broadcast_products": broadcast_products,
    "einsums": einsums,
    "einsums_differences": partial(
        einsums, sums_of=lambda a: (a.cumsum(-1)[..., None] - a.cumsum(-1)[..., None, :]).masked_fill(
            torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool).triu(1), -torch.inf)),
    "matrix_products_heads_first": matrix_products_heads_first,
    "written_chunk_by_chunk": written_chunk_by_chunk,
    "chunks_sliced_off": chunks_cut_off,
    "chunks_split_off": partial(chunks_cut_off, cut=lambda z, size: z.split(size, 1)),
    "chunks_by_their_number": partial(chunks_cut_off, cut=lambda z, size: z.chunk(z.shape[1] // size, 1)),
    "one_triangle": one_triangle,
}  # fmt: skip


class PlainMamba2(nn.Module):
    """A mixer without its convolution and norm. `form` is the scan's spelling.

    given: a state carried in is an argument; state: the state at the end is returned.
    """

    def __init__(self, form=broadcast_products, *, dim=10, heads=4, p=3, groups=2, n=5, chunk=CHUNK, given=False,
                 state=False, act=torch.sigmoid):  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.form, self.chunk, self.given, self.state, self.act = form, chunk, given, state, act
        self.sizes, self.shape = (heads * p, groups * n, groups * n, heads), (heads, p, groups, n)
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.out_proj = nn.Linear(heads * p, dim, bias=False)
        self.dt_bias, self.D = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads))
        self.A_log = nn.Parameter(torch.rand(heads))

    def forward(self, u, state=None):
        b, t, _ = u.shape
        heads, p, groups, n = self.shape
        x, B, C, dt = self.in_proj(u).split(self.sizes, -1)
        x, B, C = self.act(x).view(b, t, heads, p), self.act(B).view(b, t, groups, n), C.view(b, t, groups, n)
        dt = F.softplus(dt + self.dt_bias)
        y, final = self.form(x, dt, -torch.exp(self.A_log.float()), B, C, self.D, state, self.chunk)
        y = self.out_proj(y.reshape(b, t, -1).to(u.dtype).tanh())
        return (y, final) if self.state else y

    def example_inputs(self, length=12, batch=2, dtype=torch.float32):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        u = torch.randn(batch, length, self.in_proj.in_features, generator=generator).to(dtype).requires_grad_()
        heads, p, _, n = self.shape
        state = torch.randn(batch, heads, p, n, generator=generator).requires_grad_()
        return (u, state) if self.given else (u,)


# --- near misses: (form, the tag of the refusal)


def _einsums_with(change):
    def form(x, dt, A, B, C, D, state, size):
        return einsums(*change(x, dt, A, B, C), D, state, size)

    return form


def fed_without_its_step(x, dt, A, B, C, D, state, size):
    """Decays of a gate, but what the state takes in is x: gated linear attention, RetNet's kin."""
    b, t, h, p = x.shape
    sums = torch.cumsum(A * dt, 1)
    decay = torch.exp(sums[:, :, None] - sums[:, None]) * torch.ones(t, t).tril()[None, :, :, None]
    scores = torch.einsum("blhn,bshn->blsh", to_heads(C, h), to_heads(B, h)) * decay
    return torch.einsum("blsh,bshp->blhp", scores, x) + D[:, None] * x, x


def band(x, dt, A, B, C, D, state, size):
    """Nothing further away than two positions is seen."""
    t, h = x.shape[1:3]
    sums = torch.cumsum(A * dt, 1)
    mask = torch.ones(t, t).tril() - torch.ones(t, t).tril(-3)
    decay = torch.exp(sums[:, :, None] - sums[:, None]) * mask[None, :, :, None]
    scores = torch.einsum("blhn,bshn->blsh", to_heads(C, h), to_heads(B, h)) * decay * dt[:, None]
    return torch.einsum("blsh,bshp->blhp", scores, x) + D[:, None] * x, x


def rate_of_each_channel(x, dt, A, B, C, D, state, size):
    """Mamba-1's rates: one for each channel of a head, so no one matrix of scores."""
    t, h, p = x.shape[1:]
    rates = A[:, None] * torch.linspace(1, 2, p)
    sums = torch.cumsum(dt[..., None] * rates, 1)
    mask = torch.ones(t, t).tril()[None, :, :, None, None]
    decay = torch.exp(sums[:, :, None] - sums[:, None]) * mask * dt[:, None, :, :, None]
    scores = torch.einsum("blhn,bshn->blsh", to_heads(C, h), to_heads(B, h))
    return torch.einsum("blsh,blshp,bshp->blhp", scores, decay, x) + D[:, None] * x, x


NEAR_SCANS = {
    "diagonal_left_out": (partial(einsums, sums_of=partial(segment_sums, diagonal=-1)), "differs"),
    "not_causal": (partial(einsums, sums_of=partial(segment_sums, upper=0.0)), "differs"),
    "decay_a_position_late": (
        partial(einsums, cumsum=lambda a: torch.cumsum(a, -1) - a), "differs"),
    "step_taken_twice": (_einsums_with(lambda x, dt, A, B, C: (x * dt[..., None], dt, A, B, C)), "differs"),
    "half_the_rate_within_chunks": (
        partial(einsums, sums_of=lambda a: segment_sums(a * 0.5)), "differs"),
    "clamped_exponent": (
        partial(einsums, sums_of=lambda a: segment_sums(a).clamp(max=-0.1)), "differs"),
    "state_of_an_earlier_chunk": (partial(written_chunk_by_chunk, late=1), "differs"),
    "chunks_in_another_order": (
        partial(chunks_cut_off, cut=lambda z, size: z.split(size, 1), turn=lambda pieces: pieces[::-1]), "differs"),
    "band": (band, "differs"),
    "fed_without_its_step": (fed_without_its_step, "no-step"),
    "rate_of_each_channel": (rate_of_each_channel, "rate"),
}  # fmt: skip
