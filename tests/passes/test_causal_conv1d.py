"""Causal convolution and SiLU: found however padded, cut and transposed, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check_graph, render

from .conditions import conditions, op_of, sampled
from .contract import assert_dynamic, assert_fires, assert_refused

NAME = "causal_conv1d"
DIM, CHANNELS, TAPS, SEQ = 10, 6, 4, 7


class Mixer(nn.Module):
    """A projection and a convolution; `body(module, x)` is the spelling under test."""

    def __init__(self, body, taps=TAPS, bias=True, padding=None, **conv):
        super().__init__()
        self.body = body
        self.proj = nn.Linear(DIM, CHANNELS + 5)
        padding = taps - 1 if padding is None else padding
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, taps, **{"groups": CHANNELS, "padding": padding, "bias": bias, **conv})

    def forward(self, x):
        return self.body(self, x)

    def mixed(self, x):
        """[b, t, c], some lanes of the projection."""
        return self.proj(x)[..., 3 : 3 + CHANNELS]

    def channels_first(self, x):
        return self.mixed(x).transpose(1, 2)

    def cut(self, x):
        """The convolution, [b, c, t]."""
        return self.conv(self.channels_first(x))[..., : x.shape[1]]

    def unpadded(self, h):
        return F.conv1d(h, self.conv.weight, self.conv.bias, groups=CHANNELS)


def build(body, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    return Mixer(body, **kwargs).to(dtype), hidden(SEQ, dtype)


def hidden(seq, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq)
    return (torch.randn(2, seq, DIM, generator=generator).to(dtype).requires_grad_(),)


def hf_mamba2(m, x):
    return F.silu(m.cut(x)).transpose(1, 2) * 2


def test_graph():
    """No transposition is left between projection and convolution, nor behind it."""
    frames = assert_fires(NAME, *build(hf_mamba2), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 7, 11] = linear(x, proj_weight, proj_bias)
slice: f32[2, 7, 6] = slice.Tensor(linear, 2, 3, 9)
squeeze: f32[6, 4] = squeeze.dim(conv_weight, 1)
causal_conv1d: f32[2, 7, 6] = megacpp.causal_conv1d(slice, squeeze, conv_bias, silu, float32)
mul: f32[2, 7, 6] = mul.Tensor(causal_conv1d, 2)
return [mul]""")


def silu_spelled_out(m, x):
    h = m.cut(x)
    return (h * torch.sigmoid(h)).transpose(1, 2)


def functional_with_squeezed_weight(m, x):
    w, h = m.conv.weight.squeeze(1), m.channels_first(x).contiguous()
    h = F.conv1d(h, w.unsqueeze(1), m.conv.bias, padding=TAPS - 1, groups=CHANNELS)
    return F.silu(h[..., : x.shape[1]]).transpose(1, 2).contiguous()


def padded_on_the_left(m, x, **how):
    return F.silu(m.unpadded(F.pad(m.channels_first(x), (TAPS - 1, 0), **how))).transpose(1, 2)


def zeros_before(m, x):
    h = m.channels_first(x)
    return F.silu(m.unpadded(torch.cat([h.new_zeros(2, CHANNELS, TAPS - 1), h], -1))).transpose(1, 2)


def padded_twice_and_cut_in_the_middle(m, x):
    return m.conv(F.pad(m.channels_first(x), (2, 1)))[..., 2 : 2 + x.shape[1]].transpose(1, 2)


def value_before_silu_is_used_too(m, x):
    h = m.cut(x)
    return F.silu(h).transpose(1, 2), h * 2


def gates_before_and_behind(m, x):
    """LFM2's: all in [b, c, t]."""
    h = m.proj(x).transpose(-1, -2)
    out = m.conv(h[:, :CHANNELS] * h[:, 5:])[..., : x.shape[1]]
    return (h[:, 2 : 2 + CHANNELS] * out).transpose(1, 2)


def readers_in_both_orders(m, x):
    h = F.silu(m.cut(x))
    return h.transpose(1, 2) * 3, h.sum(1), h.reshape(2, -1)


def masked_before_and_behind(m, x):
    mask = (x[..., :1] > -1).to(x.dtype)
    h = m.conv((m.mixed(x) * mask).transpose(1, 2))[..., : x.shape[1]]
    return F.silu(h).transpose(1, 2) * mask


WITH_SILU = {
    "hf_mamba2": hf_mamba2, "silu_spelled_out": silu_spelled_out, "padded_on_the_left": padded_on_the_left,
    "functional_with_squeezed_weight": functional_with_squeezed_weight, "zeros_before": zeros_before,
    "readers_in_both_orders": readers_in_both_orders, "masked_before_and_behind": masked_before_and_behind,
    "silu_behind_the_transposition": lambda m, x: F.silu(m.cut(x).transpose(1, 2)),
    "cut_behind_the_transposition": lambda m, x: F.silu(
        m.conv(m.mixed(x).permute(0, 2, 1)).permute(0, 2, 1)[:, : x.shape[1]]
    ),
    "cut_from_the_end": lambda m, x: F.silu(m.conv(m.mixed(x).mT)[:, :, : -(TAPS - 1)]).mT,
    "silu_before_the_cut": lambda m, x: F.silu(m.conv(m.channels_first(x)))[..., : x.shape[1]].transpose(1, 2),
    "padded_before_the_transposition": lambda m, x: F.silu(
        m.unpadded(F.pad(m.mixed(x), (0, 0, TAPS - 1, 0)).transpose(1, 2))
    ).transpose(1, 2),
}
WITHOUT_SILU = {
    "padded_twice_and_cut_in_the_middle": padded_twice_and_cut_in_the_middle,
    "value_before_silu_is_used_too": value_before_silu_is_used_too,
    "gates_before_and_behind": gates_before_and_behind,
    "no_activation": lambda m, x: m.cut(x).transpose(1, 2),
    "other_activation": lambda m, x: F.gelu(m.cut(x)).transpose(1, 2),
}
FORMS = WITH_SILU | WITHOUT_SILU


@sampled(5, "form", FORMS)
def test_fires(form):
    frames = assert_fires(NAME, *build(FORMS[form], torch.float64))
    assert op_of(frames, NAME).args[3] == ("silu" if form in WITH_SILU else "")


def test_bfloat16_weights_and_float32_between():
    def computed_wider(m, x):
        h = m.channels_first(x).float()
        h = F.conv1d(h, m.conv.weight.float(), m.conv.bias.float(), padding=TAPS - 1, groups=CHANNELS)
        return F.silu(h[..., : x.shape[1]]).to(x.dtype).transpose(1, 2)

    node = op_of(assert_fires(NAME, *build(computed_wider, torch.bfloat16)), NAME)
    assert node.args[0].meta["val"].dtype == node.args[4] == torch.bfloat16


def transposed_projection(m, x):
    """Channels first in memory, time adjacent: the op follows, and nothing is copied."""
    h = torch.einsum("oi,bti->bot", m.proj.weight[:CHANNELS], x).contiguous()
    return F.silu(m.conv(h)[..., : x.shape[1]]) * 2


def twice(m, x):
    h = m.mixed(x)
    for _ in range(2):
        h = F.silu(m.conv(h.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
    return h


test_conditions = conditions(
    NAME, disabled=lambda: build(hf_mamba2), inference=lambda: build(hf_mamba2), autocast=lambda: build(hf_mamba2),
    autocast_inside=lambda: build(lambda m, x: hf_mamba2(m, x).float()),
    transposed_projection=lambda: build(transposed_projection), several_in_a_row=lambda: (*build(twice), 2),
    no_bias=lambda: build(hf_mamba2, bias=False), two_taps=lambda: build(hf_mamba2, taps=2),
    three_taps_without_bias=lambda: build(hf_mamba2, taps=3, bias=False),
    one_step=lambda: (build(hf_mamba2)[0], hidden(1)), two_steps=lambda: (build(hf_mamba2)[0], hidden(2)),
)


@sampled(5, "everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("form", ["hf_mamba2", "cut_from_the_end", "padded_on_the_left"])
def test_dynamic_shapes(form, everything):
    assert_dynamic(NAME, build(FORMS[form])[0], hidden, everything=everything)


def cut_like_hf(m, x):
    return F.silu(m.cut(x)).transpose(1, 2)


def padded_output_is_used_too(m, x):
    h = m.conv(m.channels_first(x))
    return F.silu(h[..., : x.shape[1]]).transpose(1, 2), h[..., x.shape[1] :].sum()


def state_before(m, x):
    h = m.channels_first(x)
    return F.silu(m.unpadded(torch.cat([h[..., :3].detach(), h], -1))).transpose(1, 2)


def cut_under_no_grad(m, x):
    h = m.conv(m.channels_first(x))
    with torch.no_grad():
        side = h[..., : x.shape[1]]
    return side + m.channels_first(x)


REFUSED = {
    "sees_the_next_step": (
        "not-causal", lambda m, x: F.silu(m.conv(m.channels_first(x))[..., 1 : 1 + x.shape[1]]).transpose(1, 2), {},
    ),
    "all_of_the_padded_output": ("not-causal", lambda m, x: F.silu(m.conv(m.channels_first(x))).transpose(1, 2), {}),
    "one_step_of_delay": ("not-causal", cut_like_hf, {"padding": TAPS}),
    "padded_too_little": ("not-causal", cut_like_hf, {"padding": 1}),
    "state_before": ("not-causal", state_before, {}),
    "padded_with_ones": ("not-causal", lambda m, x: padded_on_the_left(m, x, value=1.0), {}),
    "padded_with_itself": ("not-causal", lambda m, x: padded_on_the_left(m, x, mode="replicate"), {}),
    "padded_output_is_used_too": ("escapes", padded_output_is_used_too, {}),
    "two_groups": ("groups", cut_like_hf, {"groups": 2}),
    "one_group": ("groups", cut_like_hf, {"groups": 1}),
    "stride": ("stride", cut_like_hf, {"stride": 2}),
    "dilation": ("dilation", cut_like_hf, {"dilation": 2}),
    "cut_under_no_grad": ("region", cut_under_no_grad, {}),
}


@sampled(3, "case", REFUSED)
def test_refuses(case):
    tag, body, options = REFUSED[case]
    assert_refused(NAME, tag, *build(body, **options))


def test_refuses_lower_precision_than_operand_and_result():
    module, args = build(lambda m, x: F.silu(m.cut(x).bfloat16().float()).transpose(1, 2))
    frames = check_graph(module, args, tolerance=4e-2)
    assert "precision" in frames.tags(NAME) and not frames.counts[NAME]


def test_an_ordinary_convolution_is_no_near_miss():
    strided = build(lambda m, x: F.gelu(m.conv(m.channels_first(x))).transpose(1, 2) * 2, groups=1, stride=2, padding=1)
    frames = check_graph(*strided)
    assert not frames.tags(NAME) and not frames.counts[NAME]
