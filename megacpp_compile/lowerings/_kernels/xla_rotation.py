"""The rotation of RoPE as XLA wants it: two multiply-adds over whole rows, and one reversal of an axis of length two.

A row of `r` rotated channels is seen as pairs, [r/2, 2] where they lie beside each other and [2, r/2] where they are
halves. Then `rotated = x * cos + swapped(x) * (-sin, sin)`, where `swapped` exchanges the members of every pair: a
`reverse`, which fuses into the multiply-add that reads it. No strided slice, no concatenation of parts of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _pairs(x: Tensor, interleaved: bool) -> Tensor:
    """[..., r] -> [..., 2, r/2]."""
    half = x.shape[-1] // 2
    return x.unflatten(-1, (half, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, half))


def _row(pairs: Tensor, interleaved: bool) -> Tensor:
    """Inverse of `_pairs`."""
    return (pairs.transpose(-1, -2) if interleaved else pairs).flatten(-2)


def rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved_in: bool,
    interleaved_out: bool,
    inverse: bool,
    dtype: torch.dtype,
) -> Tensor:
    """As `rotation.rotate`, with the same arguments."""
    r = x.shape[-1]
    compute = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.promote_types(cos.dtype, sin.dtype))
    # A table of one angle a pair is the same for both of its members.
    cos, sin = (
        _pairs(t.to(compute), interleaved_out) if t.shape[-1] == r else t.to(compute).unsqueeze(-2) for t in (cos, sin)
    )
    sign = torch.arange(-1, 2, 2, device=x.device, dtype=compute)[:, None]  # of a pair's first member, and its second
    sin = sin * sign
    before, after = (interleaved_out, interleaved_in) if inverse else (interleaved_in, interleaved_out)
    pairs = _pairs(x.to(compute), before)
    if inverse:
        # The transpose: each member's sine goes with the gradient of the other.
        return _row((pairs * cos + (pairs * sin).flip(-2)).to(dtype), after)
    return _row((pairs * cos + pairs.flip(-2) * sin).to(dtype), after)
