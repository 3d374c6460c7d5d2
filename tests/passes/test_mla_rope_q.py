"""The rope slice of MLA's queries: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn

from megacpp_compile.config.options import Config
from tests.corpus.near_misses import DIM, HEADS, NOPE, ROPE, SEQ, joined, latent_attention, turn
from tests.corpus.spellings import tables
from tests.frames import check_graph, render

from .conditions import conditions, sampled
from .contract import assert_fires, assert_refused
from .latents import build, lengths, one_nope_for_all, outside_the_graph, plain, rope_first, rotated

NAME = "mla_rope_q"


def queries_alone(m, x, cos, sin):
    """Where a frame ends before the score product, the shape of the concat decides."""
    q_nope, q_pe = m.queries(x)
    return joined(q_nope, turn(q_pe, cos, sin))


def test_graph():
    frames = assert_fires(NAME, *build(queries_alone), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 5, 72] = linear(x, q_weight)
view: f32[2, 5, 3, 24] = view(linear, [2, 5, 3, -1])
permute: f32[2, 3, 5, 24] = permute(view, [0, 2, 1, 3])
unsqueeze: f32[1, 5, 4] = unsqueeze(cos, 0)
unsqueeze_1: f32[1, 1, 5, 4] = unsqueeze(unsqueeze, 1)
unsqueeze_2: f32[1, 5, 4] = unsqueeze(sin, 0)
unsqueeze_3: f32[1, 1, 5, 4] = unsqueeze(unsqueeze_2, 1)
mla_rope_q: f32[2, 3, 5, 24] = megacpp.mla_rope_q(permute, unsqueeze_1, unsqueeze_3, 16, False, False, False, False, float32)
return [mla_rope_q]""")


def slice_rotated_in_place(m, x, cos, sin):
    q = m.heads(m.q(x)).clone()
    q[..., NOPE:] = turn(q[..., NOPE:], cos, sin)
    k_nope, k_pe, v = m.keys(x)
    return m.attend(q, joined(k_nope, turn(k_pe, cos, sin)), v)


def queries_read_twice(m, x, cos, sin):
    """Before and after the rotation: an op that works in place must not spoil the first."""
    q = m.heads(m.q(x))
    k_nope, k_pe, v = m.keys(x)
    turned = joined(q[..., :NOPE], turn(q[..., NOPE:], cos, sin))
    return m.attend(turned, joined(k_nope, turn(k_pe, cos, sin)), v), q.square().sum(), turned.sum()


FORMS = {
    "latent_attention": latent_attention, "queries_alone": queries_alone,
    "slice_rotated_in_place": slice_rotated_in_place, "queries_read_twice": queries_read_twice,
    "rope_first": rotated(q_join=rope_first, k_join=rope_first),
    "inverse_turn": lambda m, x, cos, sin: latent_attention(m, x, cos, -sin),
}


@sampled(3, "dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_fires(form, dtype):
    assert_fires(NAME, *build(FORMS[form], dtype))


def test_one_head():
    assert_fires(NAME, *plain(heads=1))


test_conditions = conditions(
    NAME, disabled=plain, length=lengths, everything=lengths,
    autocast=lambda: plain(rope_spelling="complex_view_flatten", table_source="buffer"),
    autocast_inside=lambda: plain(table_source="buffer"),
)  # fmt: skip


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


REFUSED = {"broadcast": one_nope_for_all, "absorbed": lambda nope, pe: joined(nope.tanh(), pe)}


@pytest.mark.parametrize("tag", REFUSED)
def test_refuses(tag):
    assert_refused(NAME, tag, *build(rotated(q_join=REFUSED[tag])))


def test_split_and_concat_outside_the_graph():
    """Queries that come in as an argument have no projection in sight."""
    frames = check_graph(*outside_the_graph(), Config(strict=True))
    assert frames.counts[NAME] == 1


def test_no_queries_of_mla_inside_the_graph():
    """One row of trailing rotated lanes that is joined with others over time, and so read by no product as it is."""

    def one_row_beside_others(m, x, cos, sin):
        q_nope, q_pe = m.queries(x)
        row = joined(q_nope, turn(q_pe, cos, sin))[:, :1]
        return torch.cat([row, row.mean(2, keepdim=True)], dim=2).softmax(2)

    assert not check_graph(*build(one_row_beside_others)).counts[NAME]
