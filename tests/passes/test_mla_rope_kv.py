"""MLA's keys, one rotated row behind every head: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

from functools import partial

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.gallery import GALLERY
from tests.corpus.near_misses import (
    HEADS,
    NEAR_MISSES,
    NOPE,
    ROPE,
    attention_with,
    by_head,
    joined,
    latent_attention,
    turn,
)
from tests.corpus.spellings import PlainMLA
from tests.frames import check, largest_error, render, run, train

from .contract import (
    assert_autocast,
    assert_autocast_inside,
    assert_disabled,
    assert_dynamic,
    assert_fires,
    assert_refused_in_a_graph,
)
from .latents import ALONE, build
from .not_rotations import NOT_ROTATIONS

NAME = "mla_rope_kv"


# --- fires


def keys_and_values(m, x, cos, sin):
    k_nope, k_pe, v = m.keys(x)
    return joined(k_nope, turn(k_pe, cos, sin)), v


def test_graph():
    module, args = build(keys_and_values)
    frames = check(module, args, ALONE[NAME])
    assert frames.fired == {NAME: 1}
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
linear: f32[2, 5, 34] = linear(x, kv_a_weight)
split_with_sizes: (f32[2, 5, 26], f32[2, 5, 8]) = split_with_sizes(linear, [26, 8], -1)
getitem: f32[2, 5, 26] = split_with_sizes[0]
rms_norm: f32[2, 5, 26] = rms_norm(getitem, [26], kv_norm_weight, 1e-06)
linear_1: f32[2, 5, 84] = linear(rms_norm, kv_b_weight)
view: f32[2, 5, 3, 28] = view(linear_1, [2, 5, 3, -1])
permute: f32[2, 3, 5, 28] = permute(view, [0, 2, 1, 3])
unsqueeze: f32[2, 1, 5, 34] = unsqueeze(linear, 1)
slice: f32[2, 1, 5, 8] = slice.Tensor(unsqueeze, -1, 26, 34, 1)
unsqueeze_1: f32[1, 5, 4] = unsqueeze(cos, 0)
unsqueeze_2: f32[1, 1, 5, 4] = unsqueeze(unsqueeze_1, 1)
unsqueeze_3: f32[1, 5, 4] = unsqueeze(sin, 0)
unsqueeze_4: f32[1, 1, 5, 4] = unsqueeze(unsqueeze_3, 1)
mla_rope_kv: (f32[2, 3, 5, 24], f32[2, 3, 5, 12]) = megacpp.mla_rope_kv(permute, slice, unsqueeze_2, unsqueeze_4, 16, False, False, False, float32)
getitem_1: f32[2, 3, 5, 24] = mla_rope_kv[0]
getitem_2: f32[2, 3, 5, 12] = mla_rope_kv[1]
return [getitem_1, getitem_2]""",
    )


def rope_first(m, x, cos, sin):
    def backwards(nope, pe):
        return torch.cat((pe.expand(*nope.shape[:-1], -1), nope), dim=-1)

    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(m, x, rope, rope, backwards, backwards)


def rotated_without_autocast(m, x, cos, sin):
    """The rotations stand in regions of their own, between views outside of them."""

    def rope(pe):
        with torch.autocast("cpu", enabled=False):
            return turn(pe, cos, sin)

    return attention_with(m, x, rope, rope)


def values_transposed_apart(m, x, cos, sin):
    """V is read in the projection's order and in the heads'."""
    k_nope, k_pe, v = m.keys(x)
    return joined(k_nope, turn(k_pe, cos, sin)), v, v.transpose(1, 2).flatten(2)


def values_read_without_gradients(m, x, cos, sin):
    """V's reader stands in another region before the rope key is there: the op makes the keys alone."""
    k_nope, k_pe, v = m.keys(x)
    with torch.no_grad():
        side = v.square().sum()
    return joined(k_nope, turn(k_pe, cos, sin * 2)), v, side


def nope_lanes_read_again(m, x, cos, sin):
    k_nope, k_pe, v = m.keys(x)
    return joined(k_nope, turn(k_pe, cos, sin)), v, k_nope.mean()


def whole_kv_read_again(m, x, cos, sin):
    latent, _ = m.kv_a(x).split([m.kv_norm.weight.shape[0], 8], dim=-1)
    kv = m.heads(m.kv_b(m.kv_norm(latent)))
    k_pe = m.keys(x)[1]
    return joined(kv[..., :NOPE], turn(k_pe, cos, sin)), kv[..., NOPE:], kv.square().mean()


FORMS = [
    latent_attention, keys_and_values, rope_first, rotated_without_autocast, values_transposed_apart,
    values_read_without_gradients, nope_lanes_read_again, whole_kv_read_again,
]  # fmt: skip


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


def test_float32_tables_promote_bfloat16_keys_exactly():
    module, args = GALLERY["concat_promoted_to_float32"].build()
    want = train(module, module, args)
    frames = run(module, args, ALONE[NAME])
    assert frames.fired == {NAME: 1}
    error, _ = largest_error({"k": frames.results["output 0"]}, {"k": want["output 0"]})
    assert error == 0.0
    # Gradients: plain code rounds each product's to bfloat16 before it adds them, the op rounds their sum.
    assert largest_error(frames.results, want)[0] <= 4e-2


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_number_of_heads(heads):
    block = PlainMLA(heads=heads)
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
    block = PlainMLA(q_lora=None, table_source="buffer")
    assert_autocast_inside(NAME, block, block.example_inputs())


@pytest.mark.parametrize("tag", NOT_ROTATIONS)
def test_refuses_what_is_no_rotation(tag):
    def body(m, x, cos, sin):
        wrong = partial(NOT_ROTATIONS[tag], cos=cos, sin=sin)
        return attention_with(m, x, lambda q: turn(q, cos, sin)[..., : wrong(q).shape[-1]], wrong)

    assert_refused_in_a_graph(NAME, tag, *build(body))


def product_read_elsewhere(m, x, cos, sin):
    read = []

    def rope(k):
        a, b = k.chunk(2, dim=-1)
        read.append(a * cos)
        return torch.cat((read[0] - b * sin, b * cos + a * sin), dim=-1)

    return attention_with(m, x, partial(turn, cos=cos, sin=sin), rope), read[0]


def test_refuses_a_product_that_escapes():
    assert_refused_in_a_graph(NAME, "escapes", *build(product_read_elsewhere))


def half_of_the_rope_key(m, x, cos, sin):
    def partly(k):
        moving, still = k.chunk(2, dim=-1)
        return torch.cat((turn(moving, cos[:, ::2], sin[:, ::2]), still), dim=-1)

    return attention_with(m, x, partial(turn, cos=cos, sin=sin), partly)


def test_refuses_a_rope_key_that_rotates_in_part():
    assert_refused_in_a_graph(NAME, "rotated-middle", *build(half_of_the_rope_key))


def nope_key_of_one_head(m, x, cos, sin):
    rope = partial(turn, cos=cos, sin=sin)
    first_head = lambda nope, pe: joined(nope[:, :1].expand_as(nope), pe)  # noqa: E731
    return attention_with(m, x, rope, rope, k_join=first_head)


def test_refuses_one_nope_key_for_all_heads():
    # The keys of all heads are alike: nothing is shared among different heads.
    frames = check(*build(nope_key_of_one_head))
    assert not frames.counts[NAME]
    assert "broadcast" in frames.tags("rope_qk")  # and so it is no key of MLA either


class _Sent(torch.autograd.Function):
    """As what ranks gather: something else than a view or a linear, that a frame holds as one call."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad


class OneHead(nn.Module):
    """The one head of MLA that a rank of as many ranks as heads has. sent: what of the key's it has from others; made:
    what becomes of its rope key."""

    def __init__(self, sent, made=lambda k: k, dim=32, nope=16, rope=8, rank=12):
        super().__init__()
        self.sent, self.made, self.widths = sent, made, (nope, rope, rank)
        self.q, self.down = nn.Linear(dim, nope + rope, bias=False), nn.Linear(dim, rank + rope, bias=False)
        self.up, self.norm = nn.Linear(rank, 2 * nope, bias=False), nn.RMSNorm(rank, eps=1e-6)
        self.out = nn.Linear(nope, dim, bias=False)

    def forward(self, x, cos, sin):
        nope, rope, rank = self.widths
        q_nope, q_pe = self.q(x)[:, None].split([nope, rope], -1)
        down = self.down(x)
        latent, k_pe = (_Sent.apply(down) if self.sent == "down" else down).split([rank, rope], -1)
        k_pe = self.made(_Sent.apply(k_pe) if self.sent == "row" else k_pe)[:, None]
        k_nope, v = self.up(self.norm(latent))[:, None].chunk(2, -1)
        q, k = torch.cat((q_nope, turn(q_pe, cos, sin)), -1), torch.cat((k_nope, turn(k_pe, cos, sin)), -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def one_head(*sent, dtype=torch.float64):
    angles = torch.outer(torch.arange(7.0), torch.rand(4)).to(dtype)
    return OneHead(*sent).to(dtype), (torch.randn(2, 7, 32, dtype=dtype).requires_grad_(), angles.cos(), angles.sin())


@pytest.mark.parametrize("sent", ["nothing", "row", "down"])
def test_one_head_whose_row_other_ranks_send(sent):
    frames = check(*one_head(sent))
    assert (frames.counts[NAME], frames.counts["mla_rope_q"]) == (1, 1), frames.misses


def test_one_head_whose_row_is_made_of_something_else():
    """A rope key that goes through a norm is no latent attention's."""
    frames = check(*one_head("row", lambda k: F.rms_norm(k, k.shape[-1:])))
    assert not frames.counts[NAME] and "own-rope-keys" in frames.tags("mla_rope_q")


def scaled_keys(m, x, cos, sin):
    """As LongCat's, whose parts are scaled each by itself."""
    rope = partial(turn, cos=cos, sin=sin)
    return attention_with(
        m, x, rope, lambda k: rope(k * m.numbers[0]), k_join=lambda nope, pe: joined(nope * m.numbers[1], pe)
    )


@pytest.mark.parametrize("dynamic", [None, True], ids=["numbers", "numbers as inputs"])
def test_fires_on_scaled_keys(dynamic):
    module, args = build(scaled_keys)
    module.numbers = [0.3, 0.5]
    assert check(module, args, dynamic=dynamic).counts[NAME] == 1


def halves(k, cos, sin):
    cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    return k * cos + torch.cat((-k[..., ROPE // 2 :], k[..., : ROPE // 2]), dim=-1) * sin


def neighbours(k, cos, sin):
    a, b = k[..., ::2], k[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def complex_numbers(k, cos, sin):
    return torch.view_as_real(torch.view_as_complex(k.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)).flatten(-2)


def expanded_first(k, cos, sin):
    return turn(k.expand(-1, HEADS, -1, -1), cos, sin)


@pytest.mark.parametrize("texts", [False, True], ids=["heads", "heads_and_texts"])
@pytest.mark.parametrize("spelling", [turn, halves, neighbours, complex_numbers, expanded_first])
def test_refuses_tables_that_differ_by_head(spelling, texts):
    """The row is no longer shared behind the rotation. Queries have a row for every head anyway."""

    def body(m, x, cos, sin):
        cos, sin = by_head(cos), by_head(sin)
        if texts:
            cos, sin = (torch.stack((t, t.flip(1))) for t in (cos, sin))
        return attention_with(m, x, partial(neighbours, cos=cos, sin=sin), partial(spelling, cos=cos, sin=sin))

    frames = check(*build(body))
    assert "table-rows" in frames.tags(NAME), frames.misses
    assert frames.fired == {"down_norm_up": 1, "mla_rope_q": 1}


@pytest.mark.parametrize("name", ["rope_key_of_every_head", "rope_key_unrotated", "absorbed_scores"])
def test_leaves_keys_alone_that_are_not_shared_or_not_rotated(name):
    (near_miss,) = (n for n in NEAR_MISSES if n.name == name)
    assert not check(*near_miss.build()).counts[NAME]


def halves_in_one_sum(row, cos, sin):
    a, b = row.chunk(2, dim=-1)
    return row * torch.cat((cos, cos), -1) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1)


@pytest.mark.parametrize("spelling", [turn, halves_in_one_sum], ids=lambda f: f.__name__)
def test_a_rotated_row_that_escapes_keeps_its_value(spelling):
    """A cache of rope keys: whether the op is made or not, the row itself is still computed."""

    def body(m, x, cos, sin):
        q_nope, q_pe = m.queries(x)
        k_nope, k_pe, v = m.keys(x)
        row = spelling(k_pe, cos, sin)
        return m.attend(joined(q_nope, spelling(q_pe, cos, sin)), joined(k_nope, row), v), row

    frames = check(*build(body))
    assert frames.counts[NAME] == 1 and not frames.tags("rope_qk"), frames.misses


def test_refuses_a_row_of_every_head_that_escapes():
    def body(m, x, cos, sin):
        rows = []

        def rope(k):
            rows.append(halves_in_one_sum(k.expand(-1, 3, -1, -1), cos, sin))
            return rows[-1]

        return attention_with(m, x, partial(turn, cos=cos, sin=sin), rope), rows[0]

    assert_refused_in_a_graph(NAME, "escapes", *build(body))
