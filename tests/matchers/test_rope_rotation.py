"""`find_heads`: the layout of a rotation is read off, whichever way it is written; what is no rotation is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.rope.frozen_tables import frozen_tables
from megacpp_compile.matchers.rope.heads import find_heads
from megacpp_compile.matchers.rope.origins import from_projection
from tests.corpus.spellings import ROPES, rotate_half, tables
from tests.matchers.graphs import trace
from tests.seeds import Draws

BATCH, HEADS, TIME, DIM, NOPE = 2, 3, 5, 8, 4
draw = Draws(__name__)
X, W = draw(BATCH, HEADS, TIME, DIM), draw(DIM, DIM)


def heads_of(f, *args, weights=(1,)):
    graph = trace(f, *args)
    return graph, find_heads(graph.graph, frozenset(graph.inputs[i] for i in weights))


def the_head(f, *args, **how):
    """(graph, the one rotation in it), beside which nothing nearly is one."""
    graph, heads = heads_of(f, *args, **how)
    (head,) = heads.found
    assert not heads.near
    return graph, head


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROPES)
def test_the_layout_is_read_off(name):
    """A whole head of a projection, in every spelling of the corpus."""
    spelling = ROPES[name]
    turning = tables(spelling.table, TIME, DIM)
    graph, head = the_head(lambda x, w, *t: spelling.rotate(F.linear(x, w), t), X, W, *turning)
    turn = head.rotation
    assert head.kind == "full" and turn.nope is None and (turn.rope.start, turn.rope.width) == (0, DIM)
    assert turn.interleaved_in == (spelling.pairs == "neighbours")
    assert turn.interleaved_out == (spelling.output == "neighbours")
    assert turn.cos.factor == turn.sin.factor == 1 and turn.cos.width == turn.sin.width
    assert from_projection(turn.rope) and head.root in (graph.output, graph.output.args[0])  # perhaps behind a cast


FULL = tables("full", TIME, DIM)
ROPE = tables("full", TIME, DIM - NOPE)


def turned(x, cos, sin):
    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize(("make", "projected"), [
    (lambda x, w: F.linear(x, w).unbind(2)[0].unsqueeze(2), True), (lambda x, w: F.linear(x, w).split(1, 2)[1], True),
    (lambda x, w: F.linear(x, w).mT.unflatten(3, (1, TIME)).squeeze(3).mT, True),
    (lambda x, w: F.linear(x, w).topk(DIM)[0], False), (lambda x, w: F.linear(x, w).sort()[0].split(1, 2)[1], False),
], ids=["unbound", "split", "folded", "chosen", "split of what is sorted"])  # fmt: skip
def test_what_comes_from_a_projection(make, projected):
    """One of an op's several results is a projection's where the op only takes a projection apart."""
    entries = torch.randn(2, HEADS, 1, DIM).unbind(0)
    _, head = the_head(lambda x, w, *t: turned(make(x, w), *t), X, W, *entries)
    assert from_projection(head.rotation.rope) == projected


@pytest.mark.parametrize("rope_first", [False, True])
def test_a_head_turns_in_part(rope_first):
    def f(x, w, cos, sin):
        x = F.linear(x, w)
        if rope_first:
            rope, nope = x.split((DIM - NOPE, NOPE), -1)
            return torch.cat((turned(rope, cos, sin), nope), -1)
        nope, rope = x.split((NOPE, DIM - NOPE), -1)
        return torch.cat((nope, turned(rope, cos, sin)), -1)

    _, head = the_head(f, X, W, *ROPE)
    turn = head.rotation
    assert head.kind == "partial" and turn.rope_first == rope_first
    assert turn.nope.width == NOPE and turn.rope.width == DIM - NOPE and turn.nope.source == turn.rope.source


def test_one_row_of_keys_is_shared_by_the_heads():
    _, head = the_head(lambda x, w, row, *t: torch.cat(
        (F.linear(x, w), turned(F.linear(row, w[:4, :4]), *t).expand(-1, HEADS, -1, -1)), -1
    ), X, W, torch.randn(BATCH, 1, TIME, 4), *ROPE)  # fmt: skip
    assert head.kind == "shared" and head.rotation.nope.width == DIM and head.rotation.rope.width == 4


@pytest.mark.parametrize("rounded", [False, True], ids=["a narrow row", "products that are rounded"])
def test_the_precision_that_counts_is_that_of_the_lanes_own_tensor(rounded):
    """As under autocast, where a bias that is added by hand makes the channels beside the row wider."""

    def f(x, w, row, cos, sin):
        row, narrow = row[:, None], torch.bfloat16 if rounded else torch.float32
        row = (row * cos).to(narrow) + (rotate_half(row) * sin).to(narrow)
        return torch.cat((F.linear(x, w), row.expand(-1, HEADS, -1, -1)), -1)

    row = torch.randn(BATCH, TIME, 4, dtype=torch.float32 if rounded else torch.bfloat16)
    _, heads = heads_of(f, X, W, row.requires_grad_(), *ROPE, weights=(1, 2))
    assert [h.kind for h in heads.found] == ([] if rounded else ["shared"])
    assert [n.tag for n in heads.near] == (["precision"] if rounded else [])


@pytest.mark.parametrize("parts", ["some of the frequencies are zeros", "angles for two axes are written into zeros"])
def test_zeros_in_a_table(parts):
    """Tables are made of them; what the layers compute is written into other zeros."""

    def f(x, w, angles):
        if "some" in parts:
            angles = torch.cat((angles, torch.zeros(TIME, DIM // 4)), -1)
        else:
            both = torch.zeros(TIME, DIM // 2)
            both[:, ::2], both[:, 1::2] = angles, angles * 2
            angles = both
        x, made = F.linear(x, w), torch.zeros_like(x)
        cos, sin = angles.cos(), angles.sin()
        made[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        made[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
        return made

    _, head = the_head(f, X, W, torch.rand(TIME, DIM // 4))
    assert head.kind == "full" and head.rotation.cos.width == DIM // 2


def test_a_table_in_the_dtype_of_what_it_turns():
    """`type_as` reads no values of the second tensor."""

    wide = (t.double() for t in FULL)
    _, head = the_head(lambda x, w, *t: turned(y := F.linear(x, w), *(one.type_as(y) for one in t)), X, W, *wide)
    assert head.kind == "full"


def test_zeros_that_are_multiplied_are_no_table():
    _, heads = heads_of(lambda x, w: (y := F.linear(x, w)) * torch.zeros(DIM) + rotate_half(y), X, W)
    assert not heads.found and not heads.near


def test_a_sum_of_few_lanes_is_what_turns():
    _, head = the_head(lambda x, w, c, s: turned(F.linear(x, w).unflatten(-1, (4, 2)).sum(-1), c, s), X, W, *ROPE)
    assert head.rotation.rope.source.node.target is torch.ops.aten.sum.dim_IntList


def test_the_opposite_turn_has_a_negative_sine():
    _, head = the_head(lambda x, w, c, s: (y := F.linear(x, w)) * c - rotate_half(y) * s, X, W, *FULL)
    assert (head.rotation.cos.factor, head.rotation.sin.factor) == (1, -1)


def of_halves(joined):
    """`joined` of the halves of what turns and of the tables' first."""
    return lambda x, w, c, s: joined(*F.linear(x, w).chunk(2, -1), c[:, :4], s[:, :4])


def test_a_turn_times_a_number_has_tables_times_it():
    f = of_halves(lambda a, b, c, s: torch.stack(((b * s + a * c) * 1.5, (b * c - a * s) / 0.5 * 0.75), -1).flatten(-2))
    _, head = the_head(f, X, W, *FULL)
    assert (head.rotation.cos.factor, head.rotation.sin.factor) == (1.5, -1.5)


def test_two_numbers_are_no_turn():
    f = of_halves(lambda a, b, c, s: torch.cat(((a * c - b * s) * 1.5, (b * c + a * s) * 0.5), -1))
    _, heads = heads_of(f, X, W, *FULL)
    assert not heads.found and [n.tag for n in heads.near] == ["signs"]


def matrices(*entries):
    return torch.stack(entries, -1).unflatten(-1, (2, 2))


def by_matrices(x, m):
    pairs = x.unflatten(-1, (-1, 1, 2))
    return (m[..., 0] * pairs[..., 0] + m[..., 1] * pairs[..., 1]).flatten(-2)


@pytest.mark.parametrize("widths", [(DIM,), (4, 4), (6, 2)], ids=str)
def test_matrices_made_of_cosines_and_sines_turn(widths):
    """FLUX: a matrix for each pair, those of several axes side by side, rounded from a wider dtype."""

    def f(x, w, *angles):
        made = [matrices(a.cos(), -a.sin(), a.sin(), a.cos()).float() for a in angles]
        return by_matrices(F.linear(x, w), torch.cat(made, -3)[:, None])

    angles = [torch.rand(BATCH, TIME, n // 2, dtype=torch.float64) for n in widths]
    _, head = the_head(f, X, W, *angles)
    turn = head.rotation
    assert turn.interleaved_in and turn.interleaved_out
    assert (turn.cos.width, turn.sin.width) == (DIM // 2, DIM // 2)
    assert {t.source.node.meta["val"].dtype for t in (turn.cos, turn.sin)} == {torch.float32}


def test_matrices_from_elsewhere_may_do_anything():
    _, heads = heads_of(lambda x, w, m: by_matrices(F.linear(x, w), m), X, W, torch.rand(TIME, DIM // 2, 2, 2))
    assert not heads.found and [n.tag for n in heads.near] == ["matrices"]


def test_matrices_that_mirror_do_not_turn():
    f = lambda x, w, a: by_matrices(F.linear(x, w), matrices(a.cos(), a.sin(), a.sin(), -a.cos()))  # noqa: E731
    _, heads = heads_of(f, X, W, torch.rand(TIME, DIM // 2))
    assert not heads.found and heads.near


def axes(x, a, b, order):
    """Cosines and sines of two axes, side by side: `order` has the second half's."""
    cos, sin = (torch.cat([g(t) for t in (a, b, *((a, b)[i] for i in order))], -1) for g in (torch.cos, torch.sin))
    return turned(x, cos, sin)


def written(x, cos, sin, times):
    first, second = x.chunk(2, -1)
    made = torch.zeros_like(x)
    made[..., :4] += first * cos
    made[..., :4] -= second * sin
    for _ in range(times):
        made[..., 4:] += second * cos
    made[..., 4:] += first * sin
    return made


NEARLY = {
    "a matrix of two angles": lambda x, a: by_matrices(x, matrices(a.cos(), -a.sin(), (2 * a).sin(), (2 * a).cos())),
    "a row of the matrix twice as long": lambda x, a: by_matrices(x, matrices(a.cos(), -a.sin(), 2 * a.sin(), 2 * a.cos())),
    "a row of the neighbour's matrix": lambda x, a: by_matrices(
        x, matrices(a.cos(), -a.sin(), a.sin().roll(1, -1), a.cos().roll(1, -1))
    ),
    "axes crossed": lambda x, a: axes(x, a[:, :2], a[:, 2:], (1, 0)),
    "one axis for both halves": lambda x, a: axes(x, a[:, :2], a[:, 2:], (0, 0)),
    "a product added twice": lambda x, a: written(x, a.cos(), a.sin(), 2),
    "added to what is not zero": lambda x, a: written(x, a.cos(), a.sin(), 1) + torch.ones_like(x),
    "times a negative number": lambda x, a: turned(x, *(g(a).repeat(1, 2) for g in (torch.cos, torch.sin))) * -1.0,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NEARLY)
def test_what_only_looks_like_one_of_these(name):
    """The counterexamples to matrices, tables of several axes, sums into zeros and numbers behind a turn."""
    graph, heads = heads_of(lambda x, w, a: NEARLY[name](F.linear(x, w), a), X, W, torch.rand(TIME, DIM // 2))
    assert not [h for h in heads.found if h.root is graph.output]


@pytest.mark.parametrize("times", [0, 1])
def test_what_is_added_to_zeros(times):
    angles = torch.rand(TIME, DIM // 2)
    graph, heads = heads_of(lambda x, w, a: written(F.linear(x, w), a.cos(), a.sin(), times), X, W, angles)
    assert [h.root for h in heads.found] == [graph.output] * times


def test_cosines_of_two_axes_side_by_side():
    angles = torch.rand(2, TIME, 2).unbind(0)
    _, head = the_head(lambda x, w, a, b: axes(F.linear(x, w), a, b, (0, 1)), X, W, *angles)
    assert (head.rotation.cos.width, head.rotation.cos.source.node.target) == (DIM // 2, torch.ops.aten.cat.default)


@pytest.mark.parametrize("times", [1, 2])
def test_masked_lanes_are_what_turns(times):
    def f(x, w, cos, sin, mask):
        x = F.linear(x, w)
        for _ in range(times):
            x = x * mask
        return turned(x, cos, sin)

    graph, head = the_head(f, X, W, *FULL, torch.ones(BATCH, 1, TIME, 1))
    assert head.root is graph.output
    assert head.rotation.rope.source.node is [n for n in graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor][times - 1]


def test_what_is_scaled_behind_its_rotation_is_no_near_miss():
    """By the logarithm of the position, as Ministral's queries are."""
    _, heads = heads_of(lambda x, w, c, s, t: (turned(F.linear(x, w), c, s) * t).unflatten(-1, (2, -1)).flatten(-2),
                        X, W, *FULL, torch.rand(TIME, 1))  # fmt: skip
    assert len(heads.found) == 1 and not heads.near


def test_partners_are_read_by_the_same_score_product():
    _, heads = heads_of(lambda x, w, *t: F.scaled_dot_product_attention(
        turned(F.linear(x, w), *t), turned(F.linear(x + 1, w), *t), x
    ), X, W, *FULL)  # fmt: skip
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
    "nope-lanes": lambda x, c, s: torch.cat((x[..., :4].flip(-1), turned(x[..., 4:], c[:, :4], s[:, :4])), -1),
    "escapes": lambda x, c, s: (lambda a: (a + rotate_half(x) * s, a.sum()))(x * c),
    "precision": lambda x, c, s: ((x * c).bfloat16() + (rotate_half(x) * s).bfloat16()).float(),
    "two-tables": lambda x, c, s: x * c * s + rotate_half(x) * s * s,
    "two-sources": lambda x, c, s: x * c + rotate_half(x.sin()) * s,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tag", NEAR)
def test_near_misses(tag):
    graph, heads = heads_of(lambda x, w, c, s: NEAR[tag](F.linear(x, w), c, s), X, W, *FULL)
    assert not [h for h in heads.found if h.root in graph.outputs]
    assert tag in {n.tag for n in heads.near}, heads.near


def test_without_a_table_there_is_nothing_to_report():
    _, heads = heads_of(lambda x, w: F.linear(x, w) + rotate_half(F.linear(x, w)), X, W)
    assert not heads.found and not heads.near


@pytest.mark.parametrize("f", [
    lambda x, w, c, bias: (F.linear(x, w) * c)[..., 2:6] + bias[:4],
    lambda x, w, c, bias: F.softplus(bias + (c * F.linear(x, w)).split(4, -1)[0].contiguous() + bias[:4]),
    lambda x, w, c, bias: F.linear(x, w) * c + x,
], ids=["part", "step", "residual"])  # fmt: skip
def test_a_scale_and_a_bias_are_no_near_miss(f):
    """As where a model's multipliers are a buffer: one product in a lane, and what else is added is of another tensor."""
    _, heads = heads_of(lambda x, w, c, bias: f(x, w, c[:1], bias), X, W, FULL[0], W[0, :4].clone(), weights=(1, 3))
    assert not heads.found and not heads.near


def test_a_product_of_two_activations_is_no_rotation():
    _, heads = heads_of(lambda x, w, c, s: turned(F.linear(x, w), c * w[0], s * w[0]), X, W, *FULL)
    assert not heads.found


def test_a_value_rounded_on_its_way_is_what_turns():
    _, head = the_head(
        lambda x, w, c, s: turned(F.rms_norm(F.linear(x, w), (DIM,)).bfloat16(), c.bfloat16(), s.bfloat16()), X, W, *FULL
    )
    assert head.rotation.rope.source.node.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [lambda x: x * 0.3, lambda x: 0.3 * x, lambda x: x / 3.0], ids=["mul", "first", "div"])
def test_a_scaled_value_is_what_turns(scale):
    graph, head = the_head(lambda x, w, c, s: turned(scale(F.linear(x, w)), c, s), X, W, *FULL)
    assert head.root is graph.output and head.rotation.rope.source.node.target in (torch.ops.aten.mul.Tensor,
                                                                                  torch.ops.aten.div.Tensor)


def test_one_key_head_turns_before_it_is_repeated():
    repeated = lambda x: x[:, :, None].expand(-1, 1, HEADS, -1, -1).reshape(X.shape)  # noqa: E731
    _, head = the_head(lambda x, w, *t: repeated(turned(F.linear(x[:, :1], w), *t)), X, W, *FULL)
    assert tuple(head.lanes.sizes) == (BATCH, 1, TIME, DIM)


def frozen(f, *args, weights=(1,), trained=()):
    graph = trace(f, *args)
    found = frozen_tables(graph.graph, *(frozenset(graph.inputs[i] for i in which) for which in (weights, trained)))
    return {graph.inputs.index(n) for n in found}


def test_frozen_parameters_that_are_read_as_tables():
    cos, sin = FULL
    f = lambda x, w, c, s: turned(F.linear(x, w), c[:TIME], s[:TIME])  # noqa: E731
    assert frozen(f, X, W, cos, sin, weights=(1, 2, 3), trained=(1,)) == {2, 3}
    assert frozen(f, X, W, cos, sin, weights=(1, 2, 3)) == {2, 3}  # the layer's weight is frozen as well
    assert not frozen(f, X, W, cos, sin, weights=(1, 2, 3), trained=(1, 2, 3))


def test_frozen_parameters_that_are_a_layers():
    gain, rows = torch.randn(DIM), torch.randn(7, DIM)
    f = lambda x, w, gain, rows, at: F.linear(F.embedding(at, rows) + x, w) * gain  # noqa: E731
    assert not frozen(f, X, W, gain, rows, torch.arange(TIME), weights=(1, 2, 3))
    angles = lambda x, w, f: turned(F.linear(x, w), *(lambda t: (t.cos(), t.sin()))(torch.outer(torch.arange(TIME), f)))  # noqa: E731
    assert frozen(angles, X, W, gain, weights=(1, 2)) == {2}
