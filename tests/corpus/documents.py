"""Documents packed into one row of tokens: how authors make each token's position of the documents' offsets.

`POSITIONS` maps a name to `positions(cu_seqlens, tokens)`, `OTHERS` to what looks alike and is another thing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .near_misses import DIM, HEADS, ROPE, Heads, Latents, latent_attention, turn


def _tokens(cu: Tensor, tokens: int) -> Tensor:
    return torch.arange(tokens, device=cu.device)


def numbers_repeated(cu, tokens):
    lengths = torch.diff(cu)
    numbers = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths, output_size=tokens)
    return _tokens(cu, tokens) - cu[numbers]


def searched_in_ends(cu, tokens):
    t = torch.arange(tokens, dtype=cu.dtype)
    return (t - cu.gather(0, torch.searchsorted(cu[1:], t, side="right"))).long()


def flags_added_up(cu, tokens):
    flags = torch.zeros(tokens + 1, dtype=torch.int64).index_add(0, cu[1:].long(), torch.ones_like(cu[1:]).long())
    return _tokens(cu, tokens) - cu[flags[:tokens].cumsum(0)]


def flags_put(cu, tokens):
    flags = torch.zeros(tokens, dtype=torch.int64)
    at = cu[1:-1].long()
    flags = flags.index_put((at,), torch.ones_like(at), accumulate=True)
    return _tokens(cu, tokens) - cu[flags.cumsum(0)]


def lengths_summed(cu, tokens):
    """The offsets are made in the graph, of the documents' lengths."""
    made, t = F.pad((cu[1:] - cu[:-1]).cumsum(0), (1, 0)), _tokens(cu, tokens)
    return t - made[torch.searchsorted(made, t, right=True) - 1]


def lengths_summed_and_repeated(cu, tokens):
    lengths = (cu[1:] - cu[:-1]).clone()
    starts = lengths.cumsum(0) - lengths
    return _tokens(cu, tokens) - starts.repeat_interleave(lengths, output_size=tokens)


def of_tokens(positions):
    """`positions(offsets, the tokens' numbers)`."""
    return lambda cu, tokens: positions(cu, _tokens(cu, tokens))


POSITIONS = {
    f.__name__: f for f in (
        numbers_repeated, searched_in_ends, flags_added_up, flags_put, lengths_summed, lengths_summed_and_repeated)
} | {
    "starts_repeated": lambda cu, n: _tokens(cu, n) - torch.repeat_interleave(cu[:-1], cu.diff(), output_size=n),
    "starts_repeated_by_differences": (
        lambda cu, n: torch.arange(0, n) - cu[:-1].repeat_interleave(cu[1:] - cu[:-1], output_size=n)),
    "searched": of_tokens(lambda cu, t: t - cu[torch.searchsorted(cu.to(torch.int64), t, right=True) - 1]),
    "bucketized": of_tokens(lambda cu, t: t - torch.index_select(cu, 0, torch.bucketize(t, cu[1:], right=True)).long()),
    "compared": of_tokens(lambda cu, t: (t - cu[:-1][(t[:, None] >= cu[None, :-1]).sum(-1) - 1]).clamp(min=0)),
}  # fmt: skip


def flags_set_once(cu, tokens):
    """Documents without tokens are not counted."""
    flags = torch.zeros(tokens + 1, dtype=torch.int64)
    flags[cu[1:-1].long()] = 1
    return (_tokens(cu, tokens) - cu[flags[:tokens].cumsum(0)]) % 9


def tokens_from_one(cu, tokens):
    t = torch.arange(1, tokens + 1)
    return t - cu[torch.searchsorted(cu.long(), t - 1, right=True) - 1]


OTHERS = {
    "flags_set_once": flags_set_once,
    # a document's first token belongs to the one before
    "searched_from_the_left": of_tokens(
        lambda cu, t: t - cu[(torch.searchsorted(cu.long(), t, right=False) - 1).clamp(min=0)]),
    "starts_of_the_next": of_tokens(
        lambda cu, t: cu[torch.searchsorted(cu.long(), t, right=True).clamp(max=cu.shape[0] - 1)] - t),
    # the starts of documents, repeated by lengths that are not theirs
    "other_lengths": lambda cu, n: (
        _tokens(cu, n) - cu[:-1].repeat_interleave(cu.diff().flip(0), output_size=n).clamp(max=0)),
    "tokens_from_one": tokens_from_one,
    "offsets_of_another_row": of_tokens(
        lambda cu, t: t - (cu * 1)[torch.searchsorted(cu.long(), t, right=True) - 1]),
}  # fmt: skip


class PackedHeads(nn.Module):
    """Grouped-query attention whose tables are gathered by `positions(cu_seqlens, tokens)`; `rope` as `rotated_heads`."""

    def __init__(self, positions, rope=None, gathered=lambda cache, at: cache[at]):
        super().__init__()
        self.positions, self.gathered = positions, gathered
        self.attention = Heads(rope or (lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))))

    def forward(self, x, cu, cos, sin):
        at = self.positions(cu, x.shape[1])
        return self.attention(x, self.gathered(cos, at), self.gathered(sin, at))


class PackedLatents(Latents):
    """The same of multi-latent attention."""

    def __init__(self, positions):
        super().__init__(latent_attention)
        self.positions = positions

    def heads(self, t):
        return t.view(1, t.shape[1], HEADS, -1).transpose(1, 2)

    def forward(self, x, cu, cos, sin):
        at = self.positions(cu, x.shape[1])
        return super().forward(x, cos[at], sin[at])


def packed_args(kind=Heads, cu=(0, 4, 4, 9, 12), integer=torch.int64, dtype=torch.float32, rows=16):
    """(x, cu_seqlens, cos, sin) for one of the two models."""
    width = Heads.width // 2 if kind is Heads else ROPE // 2
    x = torch.randn(1, cu[-1], DIM).to(dtype).requires_grad_()
    angle = torch.outer(torch.arange(rows).float(), 1 / 10 ** (torch.arange(width) / width))
    return x, torch.tensor(cu, dtype=integer), angle.cos().to(dtype), angle.sin().to(dtype)
