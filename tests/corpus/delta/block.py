"""A mixer of the delta-rule family, without its convolution and gated norm, and every spelling of its recurrence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import chunked, linear, tokens
from .parts import (
    by_blocks,
    by_doubling,
    by_general_solve,
    by_inverse_with_info,
    by_power_series,
    by_solving_from_the_right,
    no_norm,
    over_longer_norm,
    over_norm,
    over_sqrt,
    times_rsqrt,
)

CHUNK = 4
Form = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """gate: None, "head", "channel", or "rate" (a head's, that no token changes); delta: whether the state is
    corrected; norm: of queries and keys; whole: whether lengths have to be whole chunks."""

    form: Form
    gate: str | None = "head"
    norm: Form = times_rsqrt
    delta: bool = True
    whole: bool = False


CHUNKED = {
    "rows_in_place": Spelling(chunked.padded_into_zeros),
    "solved_at_once": Spelling(chunked.einsums_solved_at_once, whole=True, norm=over_sqrt),
    "solved_at_once_sliced": Spelling(partial(chunked.einsums_solved_at_once, parted=chunked.by_slices), whole=True),
    "zeros_behind": Spelling(chunked.with_zeros_behind(chunked.einsums_solved_at_once)),
    "solved_to_an_inverse": Spelling(chunked.chunk_after_chunk, norm=over_longer_norm),
    "rows_in_a_list": Spelling(chunked.with_rows_in_a_list),
    "doubling": Spelling(chunked.chunks_split_off, norm=over_sqrt),
    "doubling_padded": Spelling(partial(chunked.padded_into_zeros, inverse=by_doubling), norm=over_norm),
    "power_series": Spelling(partial(chunked.inverse_in_halves, inverse=by_power_series), whole=True),
    "halves": Spelling(chunked.inverse_in_halves, whole=True, norm=no_norm),
    "blocks": Spelling(partial(chunked.padded_into_zeros, inverse=by_blocks), norm=no_norm),
    "general_inverse": Spelling(chunked.low_precision),
    "general_solve": Spelling(partial(chunked.inverse_in_halves, inverse=by_general_solve), whole=True),
    "inverse_with_info": Spelling(partial(chunked.chunk_after_chunk, inverse=by_inverse_with_info), norm=over_norm),
    "solved_from_the_right": Spelling(partial(chunked.padded_into_zeros, inverse=by_solving_from_the_right)),
    "whole_sequence": Spelling(chunked.whole_sequence, norm=over_longer_norm),
    "put_together": Spelling(chunked.chunks_put_together, whole=True),
    "gates_in_the_operands": Spelling(chunked.gates_in_the_operands, whole=True),
    "no_gate_row_by_row": Spelling(chunked.no_gate_row_by_row, gate=None, whole=True),
    "no_gate_inverse_first": Spelling(chunked.no_gate_inverse_first, gate=None, whole=True, norm=no_norm),
    "channel_gates": Spelling(chunked.chunk_after_chunk, gate="channel"),
    "channel_gates_split": Spelling(chunked.chunks_split_off, gate="channel", norm=over_norm),
    "channel_gates_by_columns": Spelling(chunked.channel_gates_by_columns, gate="channel", whole=True),
    "channel_gates_in_the_operands": Spelling(chunked.gates_in_the_operands, gate="channel", whole=True, norm=over_sqrt),
}
TOKENS = {
    "sums_of_products": Spelling(tokens.sums_of_products),
    "einsums": Spelling(tokens.einsums, norm=over_longer_norm),
    "einsums_channel_gates": Spelling(tokens.einsums, gate="channel"),
    "turned_by_rank_one": Spelling(tokens.turned_by_rank_one, norm=over_norm),
    "no_gate": Spelling(tokens.no_gate, gate=None),
}
LINEAR = {
    "one_triangle": Spelling(linear.decays_in_one_triangle, delta=False, norm=no_norm),
    "head_gates_in_chunks": Spelling(linear.head_gates_in_chunks, delta=False, norm=no_norm),
    "channel_gates_in_chunks": Spelling(linear.channel_gates_in_chunks, gate="channel", delta=False, norm=no_norm, whole=True),
    "channel_gates_in_the_operands": Spelling(
        linear.channel_gates_in_the_operands, gate="channel", delta=False, norm=no_norm, whole=True),
    "rate_parallel": Spelling(linear.rate_parallel, gate="rate", delta=False, norm=no_norm),
    "rate_in_blocks": Spelling(linear.rate_in_blocks, gate="rate", delta=False, norm=no_norm),
    "by_token": Spelling(linear.by_token, delta=False, norm=no_norm),
    "by_token_channel_gates": Spelling(linear.by_token, gate="channel", delta=False),
    "products_in_front": Spelling(linear.products_in_front, delta=False),
    "products_in_front_channel_gates": Spelling(linear.products_in_front, gate="channel", delta=False, norm=no_norm),
    "rate_by_token": Spelling(linear.rate_by_token, gate="rate", delta=False, norm=no_norm),
}  # fmt: skip


class PlainDelta(nn.Module):
    """given: a state carried in is an argument; state: the one at the end is returned; strength: beta in (0, it); wide:
    the recurrence is given float32 at least."""

    def __init__(self, spelling=CHUNKED["rows_in_place"], *, dim=10, groups=2, heads=4, width=3, values=5, chunk=CHUNK,
                 given=False, state=False, strength=1, wide=False):  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.chunk, self.given, self.state, self.strength = spelling, chunk, given, state, strength
        self.wide = wide
        self.shape = (groups, heads, width, values)
        self.sizes = (groups * width, groups * width, heads * values)
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.beta_proj = nn.Linear(dim, heads, bias=False) if spelling.delta else None
        gates = {None: 0, "rate": 0, "head": heads, "channel": heads * width}[spelling.gate]
        self.gate_proj = nn.Linear(dim, gates) if gates else None
        self.A_log = nn.Parameter(torch.rand(heads)) if gates else None
        if spelling.gate == "rate":
            self.register_buffer("rates", -torch.linspace(0.05, 0.7, heads))
        self.out_proj = nn.Linear(heads * values, dim, bias=False)

    def gates(self, u):
        if self.gate_proj is None:
            return self.rates.to(torch.promote_types(u.dtype, torch.float32)) if self.spelling.gate else None
        raw = self.gate_proj(u).to(torch.promote_types(u.dtype, torch.float32))
        raw = raw.reshape(*raw.shape[:-1], self.shape[1], -1) if self.spelling.gate == "channel" else raw
        rate = -self.A_log.to(raw.dtype).exp()
        return (rate[:, None] if raw.dim() == 4 else rate) * F.softplus(raw)

    def forward(self, u, state=None):
        b, t, _ = u.shape
        groups, heads, width, values = self.shape
        q, k, v = self.in_proj(u).split(self.sizes, -1)
        q, k, v = q.sin().view(b, t, groups, width), k.view(b, t, groups, width), v.view(b, t, heads, values)
        beta = None if self.beta_proj is None else self.strength * self.beta_proj(u).sigmoid()
        if self.wide:
            q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
            beta = None if beta is None else beta.to(v.dtype)
        o, final = self.spelling.form(q, k, v, self.gates(u), beta, state, self.chunk, width**-0.5, self.spelling.norm)
        o = self.out_proj(o.reshape(b, t, -1).to(u.dtype).tanh())
        return (o, final) if self.state else o

    def example_inputs(self, length=12, batch=2, dtype=torch.float32):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        u = torch.randn(batch, length, self.in_proj.in_features, generator=generator).to(dtype).requires_grad_()
        _, heads, width, values = self.shape
        state = torch.randn(batch, heads, width, values, generator=generator)
        state = state.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        return (u, state) if self.given else (u,)
