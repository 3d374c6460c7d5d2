"""Decays between the tokens of a chunk, from the logarithms of single steps, for a gate a head or a channel.

`G` are sums over the steps of a chunk, in float64: in float32 a difference of two would lose what lies between them. No
exponent is positive, so that gates of any size neither overflow nor lose what is near.

The gradient of a step is the sum over what decays across it: all pairs i >= t > j, and what enters or leaves the chunk.
Only what is the same number on both sides is subtracted, in float64 (`wide`): of two products that were rounded apart
the difference would be their rounding, where all that is left of the sum is small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a sub-block of a chunk, for gates a channel.
BLOCK = 16
# A step that leaves nothing of a float64: -inf as a number, so that the difference of two sums is none but 0.
LEAST = -1e3


class HeadDecay:
    """Gates [b, c, h, l, 1], natural logarithms: one number a head and token.

    into: from before the chunk to each token. out: from each token to the end of the chunk. total: over the chunk,
    [b, c, h, 1, 1], for states [b, c, h, k, v].
    """

    wide = torch.float64

    def __init__(self, gates: Tensor) -> None:
        self.dtype = gates.dtype
        self.G = self._sums(gates)
        last = self.G[..., -1:, :]
        self.into, self.out = self._exp(self.G), self._exp(last - self.G)
        self.total = self._exp(last).transpose(-1, -2)

    def _sums(self, gates: Tensor) -> Tensor:
        return gates.to(self.wide).clamp(min=LEAST).cumsum(-2)

    def _exp(self, logarithm: Tensor) -> Tensor:
        return logarithm.to(self.dtype).exp()

    def _decay(self) -> Tensor:
        """[b, c, h, l, l]: from the second token to the first, 0 where the first comes before the second."""
        n = torch.arange(self.G.shape[-2], device=self.G.device)
        return self._exp(torch.where(n[:, None] >= n, self.G - self.G.transpose(-1, -2), -torch.inf))

    def scores(self, rows: Tensor, keys: Tensor) -> Tensor:
        """[..., l, l]: rows_t . keys_i times the decay from i to t, 0 for i > t. rows: [..., b, c, h, l, k]."""
        return (rows @ keys.transpose(-1, -2)) * self._decay()

    def scores_backward(self, grad: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows and, summed over the leading dimension of `rows`, of keys and of gates."""
        decayed = grad * self._decay()
        moved = (decayed * (rows @ keys.transpose(-1, -2))).tril(-1).sum(0).to(self.wide)  # of logarithms of decays
        d_gates = self._from_here_on(moved.sum(-1, keepdim=True) - moved.sum(-2).unsqueeze(-1))
        return decayed @ keys, (decayed.transpose(-1, -2) @ rows).sum(0), d_gates

    def dot(self, x: Tensor, dx: Tensor) -> Tensor:
        """What a factor's gradient gives to its logarithm: x is the product with it."""
        return (x * dx).sum(-1, keepdim=True, dtype=self.wide)

    def state_dot(self, states: Tensor, d_left: Tensor) -> Tensor:
        """[b, c, h, 1, 1 or k]: the gradient of the logarithm of `total`, which multiplies `states`."""
        return (self.total * states * d_left).sum((-1, -2), dtype=self.wide)[..., None, None]

    def gates_gradient(self, d_into: Tensor, d_out: Tensor, d_total: Tensor) -> Tensor:
        """That of the gates, for those of the logarithms of `into`, `out` and `total`."""
        return self._from_here_on(d_into) + self._before(d_out) + d_total

    @staticmethod
    def _from_here_on(d: Tensor) -> Tensor:
        return d.flip(-2).cumsum(-2).flip(-2)

    @staticmethod
    def _before(d: Tensor) -> Tensor:
        return F.pad(d[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


class ChannelDecay(HeadDecay):
    """Gates [b, c, h, l, k]: one a channel. A score is then no product of two factors with exponents that are not
    positive, unless a token lies between: rows are taken by blocks of `BLOCK`, keys before a block from its first row,
    and those of the block itself one by one."""

    def _blocks(self, t: Tensor) -> Tensor:
        return t.unflatten(-2, (-1, min(BLOCK, t.shape[-2])))

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Decays from a block's first row to its rows, [..., m, l', k], and to it from keys before, [..., m, l, k]."""
        G = self._blocks(self.G)
        first = G[..., :1, :]
        n = torch.arange(self.G.shape[-2], device=G.device)
        before = (n < self._blocks(n[:, None])[:, :1, 0])[..., None]  # [m, l, 1]
        return self._exp(G - first), self._exp(torch.where(before, first - self.G.unsqueeze(-3), -torch.inf))

    def _within(self, j: int) -> Tensor:
        """[b, c, h, m, l', k]: the decays from row j of a block to its rows, 0 for those before."""
        G = self._blocks(self.G)
        n = torch.arange(G.shape[-2], device=G.device)[:, None]
        return self._exp(torch.where(n >= j, G - G[..., j : j + 1, :], -torch.inf))

    def scores(self, rows: Tensor, keys: Tensor) -> Tensor:
        near, far = self._factors()
        blocks, of_block = self._blocks(rows), self._blocks(keys)
        before = (blocks * near) @ (keys.unsqueeze(-3) * far).transpose(-1, -2)  # [..., m, l', l]
        within = torch.stack(
            [(blocks * self._within(j) * of_block[..., j : j + 1, :]).sum(-1) for j in range(blocks.shape[-2])], -1
        )
        eye = torch.eye(blocks.shape[-3], dtype=self.dtype, device=rows.device)[:, None, :, None]
        return (before + (within.unsqueeze(-2) * eye).flatten(-2)).flatten(-3, -2)

    def scores_backward(self, grad: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        strict = self._blocks(grad.tril(-1))  # [..., m, l', l]
        d_rows, d_keys, d_gates = self._between_blocks(strict, rows, keys)
        inner = strict.unflatten(-1, (strict.shape[-3], -1)).diagonal(0, -4, -2).movedim(-1, -3)  # [..., m, l', l']
        own_rows, own_keys, own_gates = self._within_blocks(inner, rows, keys)
        same = grad.diagonal(0, -2, -1).unsqueeze(-1)  # a token and itself: no decay
        d_rows, d_keys = d_rows + own_rows + same * keys, d_keys + own_keys + (same * rows).sum(0)
        return d_rows, d_keys, d_gates + own_gates

    def _between_blocks(self, strict: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of pairs of a row and a key of an earlier block. A gate's: what the rows of its block from it on add, and
        where the key comes before it and the row in a later block, what the keys up to it do."""
        near, far = self._factors()
        blocks = self._blocks(rows)
        d_rows = (strict @ (keys.unsqueeze(-3) * far)) * near
        d_keys = ((strict.transpose(-1, -2) @ (blocks * near)) * far).sum(0)  # [..., m, l, k]
        d_gates = self._from_here_on((d_rows * blocks).sum(0).to(self.wide)).flatten(-3, -2)
        for m in range(1, blocks.shape[-3]):
            first = m * blocks.shape[-2]  # of the block's rows
            moved = d_keys[..., m : m + 1, :first, :].squeeze(-3) * keys[..., :first, :]
            d_gates = d_gates + F.pad(self._before(moved.to(self.wide)), (0, 0, 0, keys.shape[-2] - first))
        return d_rows.flatten(-3, -2), d_keys.sum(-3), d_gates

    def _within_blocks(self, inner: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of pairs in one block. inner: [..., m, l', l']."""
        blocks, of_block = self._blocks(rows), self._blocks(keys)
        d_rows, d_keys = torch.zeros_like(blocks), []
        moved, left = torch.zeros_like(of_block, dtype=self.wide), []  # what rows and keys do to logarithms of decays
        for j in range(blocks.shape[-2]):
            key = of_block[..., j : j + 1, :]
            weighted = inner[..., j : j + 1] * self._within(j)
            d_rows = d_rows + weighted * key
            d_key = (weighted * blocks).sum(0)
            d_keys.append(d_key.sum(-2))
            pairs = d_key * key
            moved = moved + pairs
            left.append(pairs.sum(-2, dtype=self.wide))
        d_gates = self._from_here_on(moved - torch.stack(left, -2))
        return d_rows.flatten(-3, -2), torch.stack(d_keys, -2).flatten(-3, -2), d_gates.flatten(-3, -2)

    def dot(self, x: Tensor, dx: Tensor) -> Tensor:
        return x.to(self.wide) * dx

    def state_dot(self, states: Tensor, d_left: Tensor) -> Tensor:
        return (self.total * states * d_left).sum(-1, dtype=self.wide).unsqueeze(-2)
