"""For every reason why a value that multiplies lanes by tables is no RoPE: a function that has it.

Each takes (x, cos, sin): the lanes that would rotate, as (B, H, S, D), and tables of half their width, (S, D / 2).
"""

from __future__ import annotations

import torch

from tests.corpus.near_misses import (
    cosine_only,
    neighbours_turned_with_the_wrong_partner,
    reflection,
    tables_swapped_in_the_second_half,
    turn,
)


def second_half_never_written(x, cos, sin):
    h = x.shape[-1] // 2
    out = x.new_zeros(x.shape)
    out[..., :h] = x[..., :h] * cos - x[..., h:] * sin
    return out


def odd_number_of_lanes(x, cos, sin):
    cos, sin = (torch.cat((t, t), dim=-1)[..., :-1] for t in (cos, sin))
    x = x[..., :-1]
    return x * cos + x.roll(1, -1) * sin


def halves_of_two_tensors(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    b = b.tanh()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def a_lane_in_both_halves(x, cos, sin):
    h = x.shape[-1] // 2
    a, b = x[..., :h], x[..., h - 1 : -1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def in_bfloat16(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    first, second = ((u.bfloat16() + v.bfloat16()).to(x.dtype) for u, v in ((a * cos, -b * sin), (b * cos, a * sin)))
    return torch.cat((first, second), dim=-1)


def without_gradients(x, cos, sin):
    with torch.no_grad():
        return turn(x, cos, sin)


# refusal tag -> function
NOT_ROTATIONS = {
    "unwritten-lanes": second_half_never_written,
    "not-pairwise": cosine_only,
    "odd-width": odd_number_of_lanes,
    "two-sources": halves_of_two_tensors,
    "lanes-lost": a_lane_in_both_halves,
    "pairing": neighbours_turned_with_the_wrong_partner,
    "mixed-tables": tables_swapped_in_the_second_half,
    "one-table": lambda x, cos, sin: turn(x, cos, cos),
    "signs": reflection,
    "table-order": lambda x, cos, sin: turn(x, cos[:, :1], sin[:, :1]),  # one lane for all
    "precision": in_bfloat16,
    "region": without_gradients,
    "table-length": lambda x, cos, sin: turn(x, cos[2:3], sin[2:3]),  # one position for all
}
