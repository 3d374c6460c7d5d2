"""Small MLA blocks for the tests of both MLA RoPE passes."""

from __future__ import annotations

import torch
from torch import nn

from megacpp_compile.config.options import Config
from megacpp_compile.passes._driver import pass_names
from tests.corpus import jitter_gains
from tests.corpus.near_misses import BATCH, DIM, HEADS, NOPE, ROPE, SEQ, Latents, attention_with, joined, turn
from tests.corpus.spellings import PlainMLA, tables

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


def plain(**options):
    block = PlainMLA(**options)
    return block, block.example_inputs()


def lengths():
    return PlainMLA(), lambda length: PlainMLA().example_inputs(seq=length)


def rotated(q=None, k=None, **joins):
    """A body in which `q` and `k` turn queries and rope keys instead of RoPE, as (lanes, cos, sin), and `q_join` and
    `k_join` put nope lanes and turned lanes together."""

    def body(m, x, cos, sin):
        q_rope, k_rope = turn if q is None else q, turn if k is None else k
        return attention_with(m, x, lambda t: q_rope(t, cos, sin), lambda t: k_rope(t, cos, sin), **joins)

    return body


def rope_first(nope, pe):
    return torch.cat((pe.expand(*nope.shape[:-1], -1), nope), dim=-1)


def one_nope_for_all(nope, pe):
    return joined(nope[:, :1].expand_as(nope), pe)


def first_product_read(which):
    """A body whose queries or keys (`which`: q, k) multiply by cosines what something else reads, too."""

    def body(m, x, cos, sin):
        read = []

        def rope(t, cos, sin):
            a, b = t.chunk(2, dim=-1)
            read.append(a * cos)
            return torch.cat((read[0] - b * sin, b * cos + a * sin), dim=-1)

        return rotated(**{which: rope})(m, x, cos, sin), read[0]

    return body


class _Queries(nn.Module):
    def forward(self, q, cos, sin):
        nope, pe = q.split([NOPE, ROPE], dim=-1)
        return joined(nope, turn(pe, cos, sin))


def outside_the_graph():
    """A module without parameters that is given queries, and its arguments."""
    q = torch.randn(BATCH, HEADS, SEQ, NOPE + ROPE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return _Queries(), (q, *tables("half", SEQ, ROPE))
