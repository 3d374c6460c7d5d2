"""`find_heads`: the layout of a rotation is read off, whichever way it is written; what is no rotation is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.rope.heads import find_heads, from_projection
from tests.corpus.spellings import ROPES, rotate_half, tables
from tests.matchers.graphs import trace
from tests.seeds import Draws

BATCH, HEADS, TIME, DIM, NOPE = 2, 3, 5, 8, 4
draw = Draws(__name__)
X, W = draw(BATCH, HEADS, TIME, DIM), draw(DIM, DIM)


def heads_of(f, *args, weights=(1,)):
    graph = trace(f, *args)
    return graph, find_heads(graph.graph, frozenset(graph.inputs[i] for i in weights))


@pytest.mark.parametrize("name", ROPES)
def test_the_layout_is_read_off(name):
    """A whole head of a projection, in every spelling of the corpus."""
    spelling = ROPES[name]
    graph, heads = heads_of(lambda x, w, *t: spelling.rotate(F.linear(x, w), t), X, W, *tables(spelling.table, TIME, DIM))
    assert not heads.near
    (head,) = heads.found
    turn = head.rotation
    assert head.kind == "full" and turn.nope is None and (turn.rope.start, turn.rope.width) == (0, DIM)
    assert turn.interleaved_in == (spelling.pairs == "neighbours")
    assert turn.interleaved_out == (spelling.output == "neighbours")
    assert not turn.sin.negative and turn.cos.width == turn.sin.width
    assert from_projection(turn.rope) and head.root in (graph.output, graph.output.args[0])  # perhaps behind a cast


FULL = tables("full", TIME, DIM)
ROPE = tables("full", TIME, DIM - NOPE)


def turned(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def test_a_head_turns_in_part():
    for rope_first in (False, True):

        def f(x, w, cos, sin, first=rope_first):
            x = F.linear(x, w)
            if first:
                rope, nope = x.split((DIM - NOPE, NOPE), -1)
                return torch.cat((turned(rope, cos, sin), nope), -1)
            nope, rope = x.split((NOPE, DIM - NOPE), -1)
            return torch.cat((nope, turned(rope, cos, sin)), -1)

        _, heads = heads_of(f, X, W, *ROPE)
        (head,) = heads.found
        turn = head.rotation
        assert head.kind == "partial" and turn.rope_first == rope_first
        assert turn.nope.width == NOPE and turn.rope.width == DIM - NOPE and turn.nope.source == turn.rope.source


def test_one_row_of_keys_is_shared_by_the_heads():
    def f(x, w, row, cos, sin):
        rope = turned(F.linear(row, w[:4, :4]), cos, sin).expand(-1, HEADS, -1, -1)
        return torch.cat((F.linear(x, w), rope), -1)

    _, heads = heads_of(f, X, W, torch.randn(BATCH, 1, TIME, 4), *ROPE)
    (head,) = heads.found
    assert head.kind == "shared" and head.rotation.nope.width == DIM and head.rotation.rope.width == 4


def test_the_opposite_turn_has_a_negative_sine():
    _, heads = heads_of(lambda x, w, c, s: (lambda y: y * c - rotate_half(y) * s)(F.linear(x, w)), X, W, *FULL)
    (head,) = heads.found
    assert head.rotation.sin.negative and not head.rotation.cos.negative


def test_partners_are_read_by_the_same_score_product():
    def f(x, w, cos, sin):
        q, k = turned(F.linear(x, w), cos, sin), turned(F.linear(x + 1, w), cos, sin)
        return F.scaled_dot_product_attention(q, k, x)

    _, heads = heads_of(f, X, W, *FULL)
    q, k = heads.found
    assert (q.role(), k.role()) == ("q", "k")
    assert heads.partners(q) == [k] and heads.partners(k) == [q]


NEAR = {
    "not-pairwise": lambda x, c, s: x * c + rotate_half(x),
    "signs": lambda x, c, s: x * c + torch.cat((x[..., 4:], x[..., :4]), -1) * s,
    "one-table": lambda x, c, s: x * c + rotate_half(x) * c,
    "mixed-tables": lambda x, c, s: torch.cat((x[..., :4] * c[..., :4] - x[..., 4:] * s[..., :4],
                                               x[..., 4:] * s[..., 4:] + x[..., :4] * c[..., 4:]), -1),
    "table-order": lambda x, c, s: x * c + rotate_half(x) * torch.cat((s[..., 2:], s[..., :2]), -1),
    "pairing": lambda x, c, s: x * c + torch.cat((-x[..., 4:].flip(-1), x[..., :4].flip(-1)), -1) * s,
    "rotated-middle": lambda x, c, s: torch.cat((x[..., :2], turned(x[..., 2:6], c[:, :4], s[:, :4]), x[..., 6:]), -1),
    "nope-lanes": lambda x, c, s: torch.cat((2.0 * x[..., :4], turned(x[..., 4:], c[:, :4], s[:, :4])), -1),
    "escapes": lambda x, c, s: (lambda a: (a + rotate_half(x) * s, a.sum()))(x * c),
    "precision": lambda x, c, s: turned(x.bfloat16(), c.bfloat16(), s.bfloat16()).float(),
    "two-sources": lambda x, c, s: x * c + rotate_half(x.sin()) * s,
}  # fmt: skip


@pytest.mark.parametrize("tag", NEAR)
def test_near_misses(tag):
    graph, heads = heads_of(lambda x, w, c, s: NEAR[tag](F.linear(x, w), c, s), X, W, *FULL)
    assert not [h for h in heads.found if h.root in graph.outputs]
    assert tag in {n.tag for n in heads.near}, heads.near


def test_without_a_table_there_is_nothing_to_report():
    _, heads = heads_of(lambda x, w: F.linear(x, w) + rotate_half(F.linear(x, w)), X, W)
    assert not heads.found and not heads.near


def test_a_product_of_two_activations_is_no_rotation():
    _, heads = heads_of(lambda x, w, c, s: turned(F.linear(x, w), c * w[0], s * w[0]), X, W, *FULL)
    assert not heads.found
