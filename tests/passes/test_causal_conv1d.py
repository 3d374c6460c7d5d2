"""Causal convolution and SiLU: found however padded, cut and transposed, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check, render

from .contract import (
    assert_autocast,
    assert_autocast_inside,
    assert_disabled,
    assert_dynamic,
    assert_fires,
    assert_refused_in_a_graph,
)

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


def build(body, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    return Mixer(body, **kwargs).to(dtype), hidden(SEQ, dtype)


def hidden(seq, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq)
    return (torch.randn(2, seq, DIM, generator=generator).to(dtype).requires_grad_(),)


def hf_mamba2(m, x):
    return F.silu(m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2) * 2


# --- fires


def test_graph():
    """No transposition is left between projection and convolution, nor behind it."""
    frames = assert_fires(NAME, *build(hf_mamba2))
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
linear: f32[2, 7, 11] = linear(x, proj_weight, proj_bias)
slice: f32[2, 7, 6] = slice.Tensor(linear, 2, 3, 9)
squeeze: f32[6, 4] = squeeze.dim(conv_weight, 1)
causal_conv1d: f32[2, 7, 6] = megacpp.causal_conv1d(slice, squeeze, conv_bias, silu, float32)
mul: f32[2, 7, 6] = mul.Tensor(causal_conv1d, 2)
return [mul]""",
    )


def silu_behind_the_transposition(m, x):
    return F.silu(m.conv(m.mixed(x).transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))


def cut_behind_the_transposition(m, x):
    return F.silu(m.conv(m.mixed(x).permute(0, 2, 1)).permute(0, 2, 1)[:, : x.shape[1]])


def cut_from_the_end(m, x):
    return F.silu(m.conv(m.mixed(x).mT)[:, :, : -(TAPS - 1)]).mT


def silu_before_the_cut(m, x):
    return F.silu(m.conv(m.mixed(x).transpose(1, 2)))[..., : x.shape[1]].transpose(1, 2)


def silu_spelled_out(m, x):
    h = m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]]
    return (h * torch.sigmoid(h)).transpose(1, 2)


def functional_with_squeezed_weight(m, x):
    w = m.conv.weight.squeeze(1)
    h = F.conv1d(m.mixed(x).transpose(1, 2).contiguous(), w.unsqueeze(1), m.conv.bias, padding=TAPS - 1, groups=CHANNELS)
    return F.silu(h[..., : x.shape[1]]).transpose(1, 2).contiguous()


def padded_on_the_left(m, x):
    h = F.pad(m.mixed(x).transpose(1, 2), (TAPS - 1, 0))
    return F.silu(F.conv1d(h, m.conv.weight, m.conv.bias, groups=CHANNELS)).transpose(1, 2)


def padded_before_the_transposition(m, x):
    h = F.pad(m.mixed(x), (0, 0, TAPS - 1, 0)).transpose(1, 2)
    return F.silu(F.conv1d(h, m.conv.weight, m.conv.bias, groups=CHANNELS)).transpose(1, 2)


def zeros_before(m, x):
    h = m.mixed(x).transpose(1, 2)
    h = torch.cat([h.new_zeros(2, CHANNELS, TAPS - 1), h], -1)
    return F.silu(F.conv1d(h, m.conv.weight, m.conv.bias, groups=CHANNELS)).transpose(1, 2)


def padded_twice_and_cut_in_the_middle(m, x):
    h = m.conv(F.pad(m.mixed(x).transpose(1, 2), (2, 1)))
    return h[..., 2 : 2 + x.shape[1]].transpose(1, 2)


def no_activation(m, x):
    return m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def other_activation(m, x):
    return F.gelu(m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


def value_before_silu_is_used_too(m, x):
    h = m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]]
    return F.silu(h).transpose(1, 2), h * 2


def gates_before_and_behind(m, x):
    """LFM2's: all in [b, c, t]."""
    h = m.proj(x).transpose(-1, -2)
    out = m.conv(h[:, :CHANNELS] * h[:, 5:])[..., : x.shape[1]]
    return (h[:, 2 : 2 + CHANNELS] * out).transpose(1, 2)


def readers_in_both_orders(m, x):
    h = F.silu(m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]])
    return h.transpose(1, 2) * 3, h.sum(1), h.reshape(2, -1)


def masked_before_and_behind(m, x):
    mask = (x[..., :1] > -1).to(x.dtype)
    h = F.silu(m.conv((m.mixed(x) * mask).transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
    return h * mask


FORMS = [
    hf_mamba2, silu_behind_the_transposition, cut_behind_the_transposition, cut_from_the_end, silu_before_the_cut,
    silu_spelled_out, functional_with_squeezed_weight, padded_on_the_left, padded_before_the_transposition,
    zeros_before, padded_twice_and_cut_in_the_middle, no_activation, other_activation, value_before_silu_is_used_too,
    gates_before_and_behind, readers_in_both_orders, masked_before_and_behind,
]  # fmt: skip


@pytest.mark.parametrize("body", FORMS, ids=lambda f: f.__name__)
def test_fires(body):
    frames = assert_fires(NAME, *build(body, torch.float64))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.causal_conv1d.default)
    outside = (padded_twice_and_cut_in_the_middle, no_activation, other_activation, value_before_silu_is_used_too,
               gates_before_and_behind)  # fmt: skip
    assert node.args[3] == ("" if body in outside else "silu")


@pytest.mark.parametrize("options", [{"bias": False}, {"taps": 2}, {"taps": 3, "bias": False}], ids=str)
def test_fires_with_other_convolutions(options):
    assert_fires(NAME, *build(hf_mamba2, **options))


def test_channels_first_in_memory():
    """Time adjacent: the op follows, and nothing is copied."""

    def transposed_projection(m, x):
        h = torch.einsum("oi,bti->bot", m.proj.weight[:CHANNELS], x).contiguous()
        return F.silu(m.conv(h)[..., : x.shape[1]]) * 2

    assert_fires(NAME, *build(transposed_projection))


def test_bfloat16_weights_and_float32_between():
    def computed_wider(m, x):
        h = m.mixed(x).transpose(1, 2).float()
        h = F.conv1d(h, m.conv.weight.float(), m.conv.bias.float(), padding=TAPS - 1, groups=CHANNELS)
        return F.silu(h[..., : x.shape[1]]).to(x.dtype).transpose(1, 2)

    frames = assert_fires(NAME, *build(computed_wider, torch.bfloat16))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.causal_conv1d.default)
    assert node.args[0].meta["val"].dtype == node.args[4] == torch.bfloat16


def test_several_in_a_row():
    def twice(m, x):
        h = m.mixed(x)
        for _ in range(2):
            h = F.silu(m.conv(h.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        return h

    assert_fires(NAME, *build(twice), count=2)


@pytest.mark.parametrize("seq", [1, 2])
def test_fewer_steps_than_taps(seq):
    module, _ = build(hf_mamba2)
    assert_fires(NAME, module, hidden(seq))


def test_without_gradients():
    module, (x,) = build(hf_mamba2)
    module.requires_grad_(False)
    assert check(module, (x.detach(),)).counts[NAME] == 1


# --- the contract


def test_disabled():
    assert_disabled(NAME, *build(hf_mamba2))


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("body", [hf_mamba2, cut_from_the_end, padded_on_the_left], ids=lambda f: f.__name__)
def test_dynamic_shapes(body, everything):
    module, _ = build(body)
    assert_dynamic(NAME, module, hidden, everything=everything)


def test_autocast_around_the_call():
    assert_autocast(NAME, *build(hf_mamba2))


def test_autocast_inside_the_frame():
    assert_autocast_inside(NAME, *build(lambda m, x: hf_mamba2(m, x).float()))


# --- stays out


def sees_the_next_step(m, x):
    return F.silu(m.conv(m.mixed(x).transpose(1, 2))[..., 1 : 1 + x.shape[1]]).transpose(1, 2)


def all_of_the_padded_output(m, x):
    return F.silu(m.conv(m.mixed(x).transpose(1, 2))).transpose(1, 2)


def cut_like_hf(m, x):
    return F.silu(m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


def padded_output_is_used_too(m, x):
    h = m.conv(m.mixed(x).transpose(1, 2))
    return F.silu(h[..., : x.shape[1]]).transpose(1, 2), h[..., x.shape[1] :].sum()


def state_before(m, x):
    h = m.mixed(x).transpose(1, 2)
    h = torch.cat([h[..., :3].detach(), h], -1)
    return F.silu(F.conv1d(h, m.conv.weight, m.conv.bias, groups=CHANNELS)).transpose(1, 2)


def padded_with_ones(m, x):
    h = F.pad(m.mixed(x).transpose(1, 2), (TAPS - 1, 0), value=1.0)
    return F.silu(F.conv1d(h, m.conv.weight, m.conv.bias, groups=CHANNELS)).transpose(1, 2)


def padded_with_itself(m, x):
    h = F.pad(m.mixed(x).transpose(1, 2), (TAPS - 1, 0), mode="replicate")
    return F.silu(F.conv1d(h, m.conv.weight, m.conv.bias, groups=CHANNELS)).transpose(1, 2)


def cut_under_no_grad(m, x):
    h = m.conv(m.mixed(x).transpose(1, 2))
    with torch.no_grad():
        side = h[..., : x.shape[1]]
    return side + m.mixed(x).transpose(1, 2)


def computed_in_lower_precision(m, x):
    h = m.conv(m.mixed(x).transpose(1, 2))[..., : x.shape[1]]
    return F.silu(h.bfloat16().float()).transpose(1, 2)


REFUSED = [
    ("not-causal", sees_the_next_step, {}),
    ("not-causal", all_of_the_padded_output, {}),
    ("not-causal", cut_like_hf, {"padding": TAPS}),  # one step of delay
    ("not-causal", cut_like_hf, {"padding": 1}),
    ("not-causal", state_before, {}),
    ("not-causal", padded_with_ones, {}),
    ("not-causal", padded_with_itself, {}),
    ("escapes", padded_output_is_used_too, {}),
    ("groups", cut_like_hf, {"groups": 2}),
    ("groups", cut_like_hf, {"groups": 1}),
    ("stride", cut_like_hf, {"stride": 2}),
    ("dilation", cut_like_hf, {"dilation": 2}),
    ("region", cut_under_no_grad, {}),
]


@pytest.mark.parametrize(("tag", "body", "options"), REFUSED, ids=lambda p: getattr(p, "__name__", str(p)))
def test_refuses(tag, body, options):
    assert_refused_in_a_graph(NAME, tag, *build(body, **options))


def test_refuses_lower_precision_than_operand_and_result():
    module, args = build(computed_in_lower_precision)
    frames = check(module, args, tolerance=4e-2)
    assert "precision" in frames.tags(NAME) and not frames.counts[NAME]


def test_an_ordinary_convolution_is_no_near_miss():
    def strided(m, x):
        return F.gelu(m.conv(m.mixed(x).transpose(1, 2))).transpose(1, 2) * 2

    frames = check(*build(strided, groups=1, stride=2, padding=1))
    assert not frames.tags(NAME) and not frames.counts[NAME]
