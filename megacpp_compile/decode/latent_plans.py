"""Whether a model's attention is latent attention, told by the values of one small forward.

What counts is what attention computes, not what anything is called: the heads' keys and values are, element by element,
what one projection makes of a narrower input (the latent), and the rest of every head's key is one row that all share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class LatentPlan:
    """How one attention module decodes from latents.

    Attributes:
        up: the projection of a latent to all heads' keys and values; its weight is read at each step.
        heads, nope_dim, rope_dim, v_dim, latent_dim: its sizes.
        latent: what `up` was given last, [..., latent_dim]: the new tokens' latents.
        pending: the cache's layer that this forward goes to, None where it has none.
    """

    up: nn.Linear
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    latent_dim: int
    latent: Tensor | None = None
    pending: Any = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return self.heads, self.nope_dim, self.rope_dim, self.v_dim, self.latent_dim

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module has no plan: hooks are not copied with it."""
        return None


@dataclass
class Seen:
    """What one attention module computed: its operands, and what each linear inside took and gave."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    linears: dict[nn.Linear, tuple[Tensor, Tensor]]
    options: dict[str, Any]


def plan_of(seen: Seen) -> LatentPlan | str:
    """How to decode from latents, or why not."""
    query, key, value = seen.query, seen.key, seen.value
    batch, heads, tokens, channels = key.shape
    v_dim = value.shape[-1]
    if odd := sorted(name for name, option in seen.options.items() if option is not None):
        return f"its attention takes {', '.join(odd)}"
    if query.shape[1] != heads or value.shape[1] != heads:
        return f"it has {query.shape[1]} heads of queries and {heads} of keys"
    why = "no projection in it makes keys and values of all heads from one latent"
    for linear, (taken, given) in seen.linears.items():
        nope = linear.out_features // heads - v_dim
        of_all_heads = batch * tokens * heads * (nope + v_dim)
        if linear.out_features % heads or not 0 < nope < channels or given.numel() != of_all_heads:
            continue
        by_head = given.reshape(batch, tokens, heads, nope + v_dim).transpose(1, 2)
        if not torch.equal(by_head[..., :nope], key[..., :nope]) or not torch.equal(by_head[..., nope:], value):
            continue
        if not torch.equal(key[..., nope:], key[:, :1, :, nope:].expand(-1, heads, -1, -1)):
            why = "each head has a rotated key row of its own"
        elif linear.bias is not None:
            why = "the projection of the latent has a bias"
        elif linear.weight.dtype != taken.dtype:
            why = f"the projection's weight is {linear.weight.dtype}, the latent {taken.dtype}"
        else:
            return LatentPlan(linear, heads, nope, channels - nope, v_dim, linear.in_features)
    return why
