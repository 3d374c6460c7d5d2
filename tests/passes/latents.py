"""Small MLA blocks for the tests of both MLA RoPE passes."""

from __future__ import annotations

import torch
from torch import nn

from megacpp_compile.config.options import Config
from megacpp_compile.passes._driver import pass_names
from tests.corpus import jitter_gains
from tests.corpus.near_misses import BATCH, DIM, HEADS, NOPE, ROPE, SEQ, Latents, joined, turn
from tests.corpus.spellings import tables

# pass -> a configuration in which only that pass runs
ALONE = {
    name: Config(strict=True, disable=tuple(other for other in pass_names() if other != name)) for name in pass_names()
}


def build(body, dtype=torch.float32):
    """`body(m, x, cos, sin)` with the projections of an MLA block, and its arguments."""
    torch.manual_seed(0)
    module = jitter_gains(Latents(body)).to(dtype)
    x = torch.randn(BATCH, SEQ, DIM).to(dtype).requires_grad_()
    return module, (x, *tables("half", SEQ, ROPE, dtype))


class _Queries(nn.Module):
    def forward(self, q, cos, sin):
        nope, pe = q.split([NOPE, ROPE], dim=-1)
        return joined(nope, turn(pe, cos, sin))


def outside_the_graph():
    """A module without parameters that is given queries, and its arguments."""
    q = torch.randn(BATCH, HEADS, SEQ, NOPE + ROPE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return _Queries(), (q, *tables("half", SEQ, ROPE))
