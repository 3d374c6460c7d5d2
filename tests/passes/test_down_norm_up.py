"""Down-projection, RMSNorm, up-projection: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus import jitter_gains
from tests.corpus.near_misses import DIM, EPS, HEADS, RANK, ROPE, SEQ, Bottleneck, bottleneck, inverse_rms
from tests.frames import check_graph, render, run

from . import latents
from .conditions import conditions, near_miss, sampled
from .contract import assert_autocast, assert_fires, assert_refused

NAME = "down_norm_up"


class Latent(Bottleneck):
    """The bottleneck's parameters, and down-projections that make more than the latent."""

    def __init__(self, body):
        super().__init__(body)
        self.wide_down = nn.Linear(DIM, RANK + ROPE, bias=False)
        self.widest_down = nn.Linear(DIM, ROPE + RANK + ROPE, bias=False)
        self.biased_down = nn.Linear(DIM, RANK)
        self.biased_up = nn.Linear(RANK, HEADS)
        self.eps = nn.Parameter(torch.tensor(EPS))

    def norm(self, h):
        return unit(h) * self.gain

    def whole_norm(self, h):
        return F.rms_norm(h, (RANK,), self.gain, EPS)

    def latent_and_rest(self, x):
        return self.wide_down(x).split([RANK, ROPE], dim=-1)


def unit(h):
    return h * inverse_rms(h)


def build(body, dtype=torch.float32):
    torch.manual_seed(0)
    return jitter_gains(Latent(body)).to(dtype), hidden(SEQ, dtype)


def hidden(seq, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq)
    return (torch.randn(2, seq, DIM, generator=generator).to(dtype).requires_grad_(),)


def latent_and_rest(m, x):
    """MLA's keys: the latent is normed, the rope key behind it is not."""
    latent, rest = m.latent_and_rest(x)
    return m.up(m.norm(latent)), rest


def test_graph():
    frames = assert_fires(NAME, *build(latent_and_rest), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
down_norm_up: ((f32[2, 5, 72]), f32[2, 5, 8], f32[2, 5, 1], f32[0]) = megacpp.down_norm_up(x, wide_down_weight, None, gain, [up_weight], 0.05, 0, 26)
getitem: (f32[2, 5, 72]) = down_norm_up[0]
getitem_1: f32[2, 5, 8] = down_norm_up[1]
getitem_2: f32[2, 5, 72] = getitem[0]
return [getitem_2, getitem_1]""")


def rest_first(m, x):
    rest, latent = m.wide_down(x).split([ROPE, RANK], dim=-1)
    return m.up(m.norm(latent)), rest


def rest_in_two_pieces(m, x):
    latent, first, second = m.wide_down(x).split([RANK, 3, ROPE - 3], dim=-1)
    return m.up(m.norm(latent)), first * 2, second


def rest_behind_a_view(m, x):
    h = m.wide_down(x).unsqueeze(1)
    return m.up(m.norm(h[..., :RANK])), h[..., RANK:].transpose(1, 2)


def two_up_projections(m, x):
    latent = m.norm(m.down(x))
    return m.up(latent), m.biased_up(latent)


def weights_by_heads(m, x):
    """Keys and values by the rows of one weight, as by `wkv_b.weight.view(heads, -1, rank)`; of the first, a dimension of
    size 1 is summed."""
    latent, rest = m.latent_and_rest(x)
    latent = m.norm(latent)
    by_heads = m.up.weight.view(6, 12, RANK)
    k = torch.einsum("bxsr,hdr->bhsd", latent[:, None], by_heads[:, :5])
    v = latent[:, None] @ by_heads[:, 5:].transpose(1, 2)
    return k, v, torch.einsum("hro,bsr->sbho", by_heads.transpose(1, 2), latent), rest


def norm_without_autocast(m, x):
    """The norm stands in a region of its own, which computes in float32."""
    latent, rest = m.latent_and_rest(x)
    with torch.autocast("cpu", enabled=False):
        latent = m.norm(latent.float() if latent.dtype == torch.bfloat16 else latent).to(latent.dtype)
    return m.up(latent), rest


def indexer(m, x):
    """One of two up-projections only chooses, as an indexer of sparse attention does: it has no gradient in eager."""
    latent = m.norm(m.down(x))
    return m.up(latent) + m.biased_up(latent).topk(2, -1).indices.sum(-1, keepdim=True)


def latent_that_only_chooses(m, x):
    up, rest = latent_and_rest(m, x)
    return (up > 0).float().mean(-1, keepdim=True) + rest


FORMS = {
    "bottleneck": bottleneck, "latent_and_rest": latent_and_rest, "rest_first": rest_first,
    "rest_in_two_pieces": rest_in_two_pieces, "rest_behind_a_view": rest_behind_a_view,
    "two_up_projections": two_up_projections, "indexer": indexer, "latent_that_only_chooses": latent_that_only_chooses,
    "weights_by_heads": weights_by_heads, "norm_without_autocast": norm_without_autocast,
    "latent_behind_a_view": lambda m, x: m.up(m.norm(m.down(x).view(-1, RANK))),
    "biases": lambda m, x: m.biased_up(m.norm(m.biased_down(x))),
    "no_gain": lambda m, x: m.up(unit(m.down(x))),
    "scaled_norm": lambda m, x: m.up(m.norm(m.down(x)) * 0.7),
    "weights_on_the_right": lambda m, x: torch.einsum("bsr,or->bso", m.norm(x @ m.down.weight.t()), m.up.weight),
    "whole_norm": lambda m, x: m.up(m.whole_norm(m.down(x))).relu(),
    "whole_norm_and_nothing_else": lambda m, x: m.up(m.whole_norm(m.down(x))),
    "whole_norm_scaled": lambda m, x: m.up(m.whole_norm(m.down(x)) * 0.7),
}


@sampled(5, "dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_fires(form, dtype):
    assert_fires(NAME, *build(FORMS[form], dtype))


def test_one_of_two_norms_of_one_down_projection():
    def one_escapes(m, x):
        a, b = m.latent_and_rest(x)
        scale = inverse_rms(b)
        return m.up(unit(a)), (b * scale) @ m.wide_up.weight[:, :ROPE].t(), scale

    # The one norm's rest is the other's latent: the down-projection stays in one.
    frames = check_graph(*build(one_escapes))
    assert frames.counts[NAME] == 1 and "escapes" in frames.tags(NAME)
    assert "slice" not in render(frames.graph).split("down_norm_up")[0]


def both_halves(m, x):
    """Two norms of one down-projection."""
    a, b = (unit(h) for h in m.latent_and_rest(x))
    return m.up(a), b @ m.biased_up.weight[:, :ROPE].t()


def three_latents(m, x):
    """With rests of their own."""
    first, a, b, rest = m.widest_down(x).split([3, ROPE - 3, RANK, ROPE], dim=-1)
    return m.up(unit(b)), unit(a) @ m.biased_up.weight[:, : ROPE - 3].t(), first, rest


test_conditions = conditions(
    NAME, disabled=latents.plain, autocast=lambda: build(latent_and_rest), inference=lambda: build(latent_and_rest),
    autocast_inside=lambda: build(lambda m, x: (bottleneck(m, x) @ m.wide_up.weight).float()),
    both_low_rank_pairs=lambda: (*latents.plain(), 2), both_halves=lambda: (*build(both_halves), 2),
    three_latents=lambda: (*build(three_latents), 2),
)
test_lengths = conditions(NAME, 2, length=latents.lengths, everything=latents.lengths)


def test_a_norm_without_autocast_in_a_region_with():
    assert_autocast(NAME, *build(norm_without_autocast))


def up_projection_without_autocast(m, x):
    latent = m.norm(m.down(x))
    with torch.autocast("cpu", enabled=False):
        return m.up(latent.float())


def test_a_projection_without_autocast_in_a_region_with():
    module, args = build(up_projection_without_autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frames = run(module, args)
    assert not frames.fired and frames.tags(NAME) == {"region"}


def two_roots(m, x):
    h = m.down(x)
    return m.up(unit(h) * inverse_rms(h, 0.5))


def eps_is_a_parameter(m, x):
    h = m.down(x)
    return m.up(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + m.eps) * m.gain)


def root_clamped(m, x):
    h = m.down(x)
    return m.up(h / h.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(EPS) * m.gain)


def latent_in_the_middle(m, x):
    h = m.widest_down(x)
    return m.up(m.norm(h[..., ROPE : ROPE + RANK])) + h.sum()


def down_output_split_over_positions(m, x):
    h = m.down(x)
    first, _ = h.split([2, SEQ - 2], dim=1)
    return m.up(m.norm(h)), first


def up_weight_from_the_rest(m, x):
    latent, rest = m.latent_and_rest(x)
    return F.linear(m.norm(latent), m.up.weight * rest.mean())


def rest_read_without_gradients_before_the_weight(m, x):
    latent, rest = m.latent_and_rest(x)
    latent = m.norm(latent)
    with torch.no_grad():
        side = rest.square()
    return F.linear(latent, m.up.weight * 2), side


def projected_with_the_latent_and_without_gradients(m, x):
    """As A.X-K2's queries, which an indexer reads under `no_grad`, too."""
    h = m.down(x)
    latent = m.norm(h)
    with torch.no_grad():
        chosen = m.up(latent)
    return torch.cat((latent, h), dim=-1) @ torch.cat((m.up.weight, m.up.weight), dim=1).t(), chosen


REFUSED = {
    "two_roots": ("two-norms", two_roots),
    "divided_by_a_projection": ("divided", lambda m, x: m.up(unit(m.down(x)) / (1 + m.other_down(x).square()))),
    "divided_by_a_gain": ("divided", lambda m, x: m.up(unit(m.down(x)) / m.gain)),
    "eps_is_a_parameter": ("eps-tensor", eps_is_a_parameter),
    "root_clamped": ("eps-place", root_clamped),
    "latent_in_the_middle": ("latent-place", latent_in_the_middle),
    "down_output_split_over_positions": ("escapes", down_output_split_over_positions),
    "up_weight_from_the_rest": ("feedback", up_weight_from_the_rest),
    "rest_read_before_the_weight": ("region", rest_read_without_gradients_before_the_weight),
    "layer_norm": ("layer-norm", lambda m, x: m.up(F.layer_norm(m.down(x), (RANK,), m.gain, None, EPS)).relu()),
    "two_dimensions": ("axes", lambda m, x: m.up(F.rms_norm(m.down(x), (SEQ, RANK), None, EPS)).relu()),
    "gate_as_gain": ("gain-shape", lambda m, x: m.up(unit(m.down(x)) * m.other_down(x))),
    "projected_with_the_latent": ("no-up", projected_with_the_latent_and_without_gradients),
}


@sampled(3, "case", REFUSED)
def test_refuses(case):
    tag, body = REFUSED[case]
    assert_refused(NAME, tag, *build(body))


# What the corpus has; there, only that nothing fires is asserted.
REFUSED_NEAR_MISSES = {
    "escapes": ("down_output_reused", "statistics_escape"),
    "eps-place": ("eps_outside_the_root", "eps_added_to_inverse_root"),
    "other-tensor": ("statistics_of_another_tensor",), "axes": ("norm_over_positions",),
    "divisor": ("wrong_divisor",), "no-mean": ("sum_without_division",), "no-square": ("mean_fourth_power",),
    "precision": ("statistics_in_lower_precision",), "region": ("statistics_under_no_grad",),
    "dtype": ("float32_up_projection",), "no-up": ("norm_with_bias", "activation_before_up"),
}


@sampled(3, ("tag", "name"), [(tag, name) for tag, names in REFUSED_NEAR_MISSES.items() for name in names])
def test_refuses_near_miss(tag, name):
    assert_refused(NAME, tag, *near_miss(name))


def read_by_a_trained_linear(m, x):
    h = x.sin()
    return m.up(m.norm(m.down(h))), m.biased_down(h)


@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_frozen_down_projections_keep_no_input_of_their_own(read_elsewhere):
    module, x = build(read_by_a_trained_linear if read_elsewhere else lambda m, x: m.up(m.norm(m.down(x.sin()))))
    module.down.requires_grad_(False)
    if not read_elsewhere:
        module.requires_grad_(False)
        assert_refused(NAME, "frozen", module, x)
        x = (x[0].detach(),)  # without gradients nothing is kept
    assert_fires(NAME, module, x)


def test_a_norm_behind_no_projection_is_no_near_miss():
    def residual_norm(m, x):
        return m.wide_up(F.layer_norm(x.tanh(), (DIM,))).relu() + m.wide_up(x * inverse_rms(x)).relu()

    assert not run(*build(residual_norm)).tags(NAME)
