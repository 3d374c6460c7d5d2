"""MLA's keys, one rotated row behind every head: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.near_misses import HEADS, NOPE, ROPE, by_head, joined, latent_attention, turn
from tests.frames import check, check_graph, render

from .conditions import conditions, sampled, shown
from .contract import assert_fires, assert_refused
from .latents import ALONE, build, lengths, one_nope_for_all, plain, rope_first, rotated

NAME = "mla_rope_kv"


def keys_and_values(m, x, cos, sin):
    k_nope, k_pe, v = m.keys(x)
    return joined(k_nope, turn(k_pe, cos, sin)), v


def test_graph():
    frames = check(*build(keys_and_values), ALONE[NAME])
    assert frames.fired == {NAME: 1}
    expecttest.assert_expected_inline(render(frames.graph), """\
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
return [getitem_1, getitem_2]""")


def rotated_without_autocast(t, cos, sin):
    """The rotations stand in regions of their own, between views outside of them."""
    with torch.autocast("cpu", enabled=False):
        return turn(t, cos, sin)


def values_transposed_apart(m, x, cos, sin):
    """V is read in the projection's order and in the heads'."""
    k, v = keys_and_values(m, x, cos, sin)
    return k, v, v.transpose(1, 2).flatten(2)


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


FORMS = {
    "latent_attention": latent_attention, "keys_and_values": keys_and_values,
    "rope_first": rotated(q_join=rope_first, k_join=rope_first),
    "rotated_without_autocast": rotated(rotated_without_autocast, rotated_without_autocast),
    "values_transposed_apart": values_transposed_apart, "whole_kv_read_again": whole_kv_read_again,
    "values_read_without_gradients": values_read_without_gradients, "nope_lanes_read_again": nope_lanes_read_again,
}


@sampled(5, "dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_fires(form, dtype):
    assert_fires(NAME, *build(FORMS[form], dtype))


@sampled(3, "heads", [1, 2, 4])
def test_number_of_heads(heads):
    assert_fires(NAME, *plain(heads=heads))


test_conditions = conditions(
    NAME, disabled=plain, length=lengths, everything=lengths,
    autocast=lambda: plain(rope_spelling="complex_view_flatten", table_source="buffer"),
    autocast_inside=lambda: plain(q_lora=None, table_source="buffer"),
)  # fmt: skip


def half_of_the_rope_key(k, cos, sin):
    moving, still = k.chunk(2, dim=-1)
    return torch.cat((turn(moving, cos[:, ::2], sin[:, ::2]), still), dim=-1)


def test_refuses_a_rope_key_that_rotates_in_part():
    assert_refused(NAME, "rotated-middle", *build(rotated(k=half_of_the_rope_key)))


def test_refuses_one_nope_key_for_all_heads():
    # The keys of all heads are alike: nothing is shared among different heads.
    frames = check_graph(*build(rotated(k_join=one_nope_for_all)))
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
    frames = check_graph(*one_head(sent))
    assert (frames.counts[NAME], frames.counts["mla_rope_q"]) == (1, 1), frames.misses


def test_one_head_whose_row_is_made_of_something_else():
    """A rope key that goes through a norm is no latent attention's."""
    frames = check_graph(*one_head("row", lambda k: F.rms_norm(k, k.shape[-1:])))
    assert not frames.counts[NAME] and "own-rope-keys" in frames.tags("mla_rope_q")


def halves(k, cos, sin):
    cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    return k * cos + torch.cat((-k[..., ROPE // 2 :], k[..., : ROPE // 2]), dim=-1) * sin


def neighbours(k, cos, sin):
    a, b = k[..., ::2], k[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def complex_numbers(k, cos, sin):
    return torch.view_as_real(torch.view_as_complex(k.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)).flatten(-2)


@sampled(5, "texts", [False, True], ids=["heads", "heads_and_texts"])
@pytest.mark.parametrize("spelling", [turn, halves, neighbours, complex_numbers, None], ids=shown)
def test_refuses_tables_that_differ_by_head(spelling, texts):
    """The row is no longer shared behind the rotation. Queries have a row for every head anyway."""

    def body(m, x, *tables):
        tables = [by_head(t) for t in tables]
        tables = [torch.stack((t, t.flip(1))) for t in tables] if texts else tables
        expanded_first = lambda k, *tables: turn(k.expand(-1, HEADS, -1, -1), *tables)  # noqa: E731
        return rotated(neighbours, spelling or expanded_first)(m, x, *tables)

    frames = check_graph(*build(body))
    assert "table-rows" in frames.tags(NAME), frames.misses
    assert frames.fired == {"down_norm_up": 1, "mla_rope_q": 1}


def halves_in_one_sum(row, cos, sin):
    a, b = row.chunk(2, dim=-1)
    return row * torch.cat((cos, cos), -1) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1)


@sampled(3, "spelling", [turn, halves_in_one_sum], ids=lambda f: f.__name__)
def test_a_rotated_row_that_escapes_keeps_its_value(spelling):
    """A cache of rope keys: whether the op is made or not, the row itself is still computed."""

    def body(m, x, cos, sin):
        q_nope, q_pe = m.queries(x)
        k_nope, k_pe, v = m.keys(x)
        row = spelling(k_pe, cos, sin)
        return m.attend(joined(q_nope, spelling(q_pe, cos, sin)), joined(k_nope, row), v), row

    frames = check_graph(*build(body))
    assert frames.counts[NAME] == 1 and not frames.tags("rope_qk"), frames.misses


def test_refuses_a_row_of_every_head_that_escapes():
    def body(m, x, *tables):
        rows = []

        def rope(k, cos, sin):
            rows.append(halves_in_one_sum(k.expand(-1, 3, -1, -1), cos, sin))
            return rows[-1]

        return rotated(k=rope)(m, x, *tables), rows[0]

    assert_refused(NAME, "escapes", *build(body))
