"""The rope slice of MLA's queries: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

from functools import partial

import expecttest
import pytest
import torch
from torch import nn

from megacpp_compile.config.options import Config
from tests.corpus.gallery import GALLERY
from tests.corpus.near_misses import (
    DIM,
    HEADS,
    NEAR_MISSES,
    NOPE,
    ROPE,
    SEQ,
    attention_with,
    joined,
    latent_attention,
    turn,
)
from tests.corpus.spellings import PlainMLA, tables
from tests.frames import check, largest_error, render, run, train

from .contract import (
    assert_autocast,
    assert_autocast_inside,
    assert_disabled,
    assert_dynamic,
    assert_fires,
    assert_refused,
    assert_refused_in_a_graph,
)
from .latents import ALONE, build, outside_the_graph
from .not_rotations import NOT_ROTATIONS

NAME = "mla_rope_q"


# --- fires


def queries_alone(m, x, cos, sin):
    """Where a frame ends before the score product, the shape of the concat decides."""
    q_nope, q_pe = m.queries(x)
    return joined(q_nope, turn(q_pe, cos, sin))


def test_graph():
    frames = assert_fires(NAME, *build(queries_alone))
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
linear: f32[2, 5, 72] = linear(x, q_weight)
view: f32[2, 5, 3, 24] = view(linear, [2, 5, 3, -1])
permute: f32[2, 3, 5, 24] = permute(view, [0, 2, 1, 3])
unsqueeze: f32[1, 5, 4] = unsqueeze(cos, 0)
unsqueeze_1: f32[1, 1, 5, 4] = unsqueeze(unsqueeze, 1)
unsqueeze_2: f32[1, 5, 4] = unsqueeze(sin, 0)
unsqueeze_3: f32[1, 1, 5, 4] = unsqueeze(unsqueeze_2, 1)
mla_rope_q: f32[2, 3, 5, 24] = megacpp.mla_rope_q(permute, unsqueeze_1, unsqueeze_3, 16, False, False, False, False, float32)
return [mla_rope_q]""",
    )


def rope_first(m, x, cos, sin):
    def backwards(nope, pe):
        return torch.cat((pe.expand(*nope.shape[:-1], -1), nope), dim=-1)

    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, rope, backwards, backwards)


def inverse_turn(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=-sin)
    return attention_with(m, x, rope, rope)


def slice_rotated_in_place(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    q = m.heads(m.q(x)).clone()
    q[..., NOPE:] = rope(q[..., NOPE:])
    k_nope, k_pe, v = m.keys(x)
    return m.attend(q, joined(k_nope, rope(k_pe)), v)


def queries_read_twice(m, x, cos, sin):
    """Before and after the rotation: an op that works in place must not spoil the first."""
    q = m.heads(m.q(x))
    k_nope, k_pe, v = m.keys(x)
    turned = joined(q[..., :NOPE], turn(q[..., NOPE:], cos, sin))
    return m.attend(turned, joined(k_nope, turn(k_pe, cos, sin)), v), q.square().sum(), turned.sum()


FORMS = [latent_attention, queries_alone, rope_first, inverse_turn, slice_rotated_in_place, queries_read_twice]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("body", FORMS, ids=lambda f: f.__name__)
def test_fires(body, dtype):
    assert_fires(NAME, *build(body, dtype))


def test_alone_and_in_float64():
    for dtype in (torch.float32, torch.float64):
        block = PlainMLA(norm="no_upcast", rope_spelling="rotate_half_by_slices").to(dtype)
        frames = check(block, block.example_inputs(dtype=dtype), ALONE[NAME])
        assert frames.fired == {NAME: 1}


def test_counts_every_layer():
    frames = check(*GALLERY["tied_language_model"].build())
    assert frames.counts[NAME] == 2


def test_float32_tables_promote_bfloat16_queries_exactly():
    module, args = GALLERY["concat_promoted_to_float32"].build()
    want = train(module, module, args)
    frames = run(module, args, ALONE[NAME])
    assert frames.fired == {NAME: 1}
    error, _ = largest_error({"q": frames.results["output 0"]}, {"q": want["output 0"]})
    assert error == 0.0
    # Gradients: plain code rounds each product's to bfloat16 before it adds them, the op rounds their sum.
    assert largest_error(frames.results, want)[0] <= 4e-2


def test_one_head():
    block = PlainMLA(heads=1)
    assert_fires(NAME, block, block.example_inputs())


# --- stays out


def test_disabled():
    block = PlainMLA()
    assert_disabled(NAME, block, block.example_inputs())


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
def test_dynamic_shapes(everything):
    block = PlainMLA()
    assert_dynamic(NAME, block, lambda length: block.example_inputs(seq=length), everything=everything)


def test_autocast_around_the_call():
    block = PlainMLA(rope_spelling="complex_view_flatten", table_source="buffer")
    assert_autocast(NAME, block, block.example_inputs())


def test_autocast_inside_the_frame():
    block = PlainMLA(table_source="buffer")
    assert_autocast_inside(NAME, block, block.example_inputs())


@pytest.mark.parametrize("tag", NOT_ROTATIONS)
def test_refuses_what_is_no_rotation(tag):
    def body(m, x, cos, sin):
        wrong = partial(NOT_ROTATIONS[tag], cos=cos, sin=sin)
        return attention_with(m, x, wrong, lambda k: turn(k, cos, sin)[..., : wrong(k).shape[-1]])

    assert_refused_in_a_graph(NAME, tag, *build(body))


def product_read_elsewhere(m, x, cos, sin):
    read = []

    def rope(q):
        a, b = q.chunk(2, dim=-1)
        read.append(a * cos)
        return torch.cat((read[0] - b * sin, b * cos + a * sin), dim=-1)

    return attention_with(m, x, rope, partial(turn, cos=cos, sin=sin)), read[0]


def nope_lanes_of_one_head(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    first_head = lambda nope, pe: torch.cat((nope[:, :1].expand_as(nope), pe), dim=-1)  # noqa: E731
    return attention_with(m, x, rope, rope, q_join=first_head)


def absorbed_nope(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, rope, q_join=lambda nope, pe: joined(nope.tanh(), pe))


class TwoQueryLinears(nn.Module):
    """Nope and rope queries from two linears, against keys of which every head has its own."""

    def __init__(self):
        super().__init__()
        self.q_nope, self.q_pe = (nn.Linear(DIM, HEADS * n, bias=False) for n in (NOPE, ROPE))
        self.k = nn.Linear(DIM, HEADS * (NOPE + ROPE), bias=False)

    def forward(self, x, cos, sin):
        q_nope, q_pe, k = (p(x).view(2, SEQ, HEADS, -1).transpose(1, 2) for p in (self.q_nope, self.q_pe, self.k))
        q = joined(q_nope, turn(q_pe, cos, sin))
        k = joined(k[..., :NOPE], turn(k[..., NOPE:], cos, sin))
        return q @ k.transpose(-1, -2)


def test_refuses_queries_of_other_keys():
    torch.manual_seed(0)
    x = torch.randn(2, SEQ, DIM).requires_grad_()
    assert_refused(NAME, "no-mla-keys", TwoQueryLinears(), (x, *tables("half", SEQ, ROPE)))


REFUSED = [
    ("escapes", product_read_elsewhere),
    ("broadcast", nope_lanes_of_one_head),
    ("absorbed", absorbed_nope),
]


@pytest.mark.parametrize(("tag", "body"), REFUSED, ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_refuses(tag, body):
    assert_refused_in_a_graph(NAME, tag, *build(body))


def scaled_queries(m, x, cos, sin):
    """As LongCat's, whose parts are scaled each by itself."""
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(
        m, x, lambda q: rope(q * m.numbers[0]), rope, q_join=lambda nope, pe: joined(nope * m.numbers[1], pe)
    )


@pytest.mark.parametrize("dynamic", [None, True], ids=["numbers", "numbers as inputs"])
def test_fires_on_scaled_queries(dynamic):
    module, args = build(scaled_queries)
    module.numbers = [0.3, 0.5]
    assert check(module, args, dynamic=dynamic).counts[NAME] == 1


REFUSED_NEAR_MISSES = [
    ("nope-lanes", "nope_lanes_reversed"),
    ("rope-place", "slices_overlap"),
    ("rotated-middle", "half_of_the_rope_slice"),
    ("signs", "rotated_halves_change_places"),
]


@pytest.mark.parametrize(("tag", "name"), REFUSED_NEAR_MISSES)
def test_refuses_near_miss(tag, name):
    (near_miss,) = (n for n in NEAR_MISSES if n.name == name)
    assert_refused_in_a_graph(NAME, tag, *near_miss.build())


def test_refuses_rope_keys_of_every_head():
    (near_miss,) = (n for n in NEAR_MISSES if n.name == "rope_key_of_every_head")
    frames = check(*near_miss.build())
    # Said of the keys; whether the queries meet other MLA keys is theirs to say.
    assert "own-rope-keys" in frames.tags(NAME)
    assert not frames.counts["mla_rope_kv"]


def test_split_and_concat_outside_the_graph():
    """Queries that come in as an argument have no projection in sight."""
    frames = check(*outside_the_graph(), Config(strict=True))
    assert frames.counts[NAME] == 1


def test_no_queries_of_mla_inside_the_graph():
    """One row of trailing rotated lanes that is joined with others over time, and so read by no product as it is."""

    def one_row_beside_others(m, x, cos, sin):
        q_nope, q_pe = m.queries(x)
        row = joined(q_nope, turn(q_pe, cos, sin))[:, :1]
        return torch.cat([row, row.mean(2, keepdim=True)], dim=2).softmax(2)

    assert not check(*build(one_row_beside_others)).counts[NAME]
