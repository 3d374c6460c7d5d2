"""Widths of heads that `dynamic=True` makes symbols, as a number that crosses a graph break is, are fixed for RoPE to
fire; where they may not be, the report says so, and a frame without such heads keeps every symbol."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.spellings import PlainMLA
from tests.frames import Function, check, run

DIM, WIDTH, KV_HEADS = 32, 8, 2
pytestmark = pytest.mark.end_to_end  # seconds each: symbols in all dimensions, behind graph breaks


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Resumed(nn.Module):
    """GQA whose shapes and tables are made before a graph break, and which is given its width as a number."""

    def __init__(self, heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(DIM, n * WIDTH) for n in (heads, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(heads * WIDTH, DIM)
        self.repeats, self.width = heads // KV_HEADS, WIDTH
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH))

    def tables(self, x):
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), -1)[None, None]
        return angles.cos(), angles.sin()

    def forward(self, x):
        shape, (cos, sin) = (*x.shape[:-1], -1, self.width), self.tables(x)
        torch._dynamo.graph_break()
        return self.attend(x, shape, cos, sin)

    def attend(self, x, shape, cos, sin):
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (h.repeat_interleave(self.repeats, 1) for h in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def rows(batch=3, length=12):
    return torch.randn(batch, length, DIM, requires_grad=True)


def resumed(module, *args, **kwargs):
    return check(module, args, dynamic=True, fullgraph=False, captured=False, **kwargs)


def test_a_width_that_crosses_a_graph_break():
    """No graph more for other batches and lengths."""
    frames = resumed(Resumed(), rows())
    assert frames.fired == {"rope_qk": 1} and not frames.misses
    for batch, length in ((2, 17), (5, 20)):
        x = rows(batch, length)
        torch.testing.assert_close(frames.compiled(x), Resumed()(x))
    assert len(frames.graphs) == 2


def test_latent_attention():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = PlainMLA()

        def forward(self, x, *tables):
            tables = [t * 1.0 for t in tables]
            torch._dynamo.graph_break()
            return self.attention(x, *tables)

    module = Split()
    static = run(module, module.attention.example_inputs(), fullgraph=False, captured=False).fired
    assert static["mla_rope_q"] == static["mla_rope_kv"] == 1
    assert resumed(module, *module.attention.example_inputs()).fired == static


class FromOutside(Resumed):
    """Tables are arguments, whose last dimensions the caller may have marked."""

    def forward(self, x, cos, sin):
        return self.attend(x, (*x.shape[:-1], -1, cos.shape[-1]), cos, sin)


def test_a_width_that_is_marked_stays_a_symbol():
    module, x = FromOutside(), rows()
    cos, sin = module.tables(x)
    for table in (cos, sin):
        torch._dynamo.mark_dynamic(table, 3)
    frames = run(module, (x, cos, sin), captured=False)
    assert not frames.fired and frames.tags("rope_qk") == {"dynamic-width"}
    assert "marked" in frames.misses[0].reason


class Rows(Resumed):
    """Queries cross the break as one row for each of as many choices as there are sequences."""

    def forward(self, x):
        q, (cos, sin) = self.q(x).unflatten(-1, (self.repeats, -1)), self.tables(x)
        shape = (*x.shape[:-1], -1, self.width)
        torch._dynamo.graph_break()
        k, v = (f(x).view(shape).transpose(1, 2) for f in (self.k, self.v))
        q = q.reshape(shape).transpose(1, 2)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (h.repeat(1, self.repeats, 1, 1) for h in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch", [2, 3])
def test_a_width_that_no_batch_changes(batch):
    """Dynamo has one symbol for two sizes that are equal: with two sequences, for their number and the choices'. The width
    is 16 s // (2 s * s // s) then, which is 8 for every s."""
    frames = resumed(Rows(), rows(batch))
    assert frames.fired == {"rope_qk": 1} and not frames.misses
    for other in (2, 4, 5):
        x = rows(other, 17)
        torch.testing.assert_close(frames.compiled(x), Rows()(x))


def test_a_width_that_is_a_batch_too():
    """As many sequences as a head has channels: one symbol is both."""
    frames = resumed(Resumed(), rows(WIDTH))
    assert not frames.fired and frames.tags("rope_qk") == {"dynamic-width"}


def test_without_a_rotation_no_width_is_fixed():
    def scaled(q, k, table):
        q, k = (h * table + h.flip(-1) for h in (q, k))
        return F.scaled_dot_product_attention(q, k, k)

    def args(width, length):
        shape = (3, 2, length, width)
        return torch.randn(shape, requires_grad=True), torch.randn(shape), torch.randn(length, width)

    frames = check(Function(scaled), args(8, 12), dynamic=True)
    for width, length in ((16, 12), (8, 17), (6, 5)):
        frames.compiled(*args(width, length))
    assert len(frames.graphs) == 1 and not frames.fired and not frames.misses


def test_a_length_that_comes_last_is_no_width():
    """A mask [batch, 1, length, keys] has the number of keys last alone, and of no head."""

    class Masked(Resumed):
        def forward(self, x, mask):
            shape, (cos, sin) = (*x.shape[:-1], -1, self.width), self.tables(x)
            torch._dynamo.graph_break()
            q = turned(self.q(x).view(shape).transpose(1, 2), cos, sin)
            k = turned(self.k(x).view(shape).transpose(1, 2).repeat_interleave(self.repeats, 1), cos, sin)
            cached = torch.cat((k, k), 2)[:, :, : mask.shape[-1]]
            return F.scaled_dot_product_attention(q, cached, cached, mask)

    def args(length, keys):
        return rows(3, length), torch.randn(3, 1, length, keys)

    frames = resumed(Masked(), *args(12, 15))
    graphs = len(frames.graphs)
    for length, keys in ((12, 13), (11, 14), (14, 21)):
        frames.compiled(*args(length, keys))
    assert len(frames.graphs) == graphs
