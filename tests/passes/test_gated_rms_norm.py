"""Gated RMSNorm: found in its spellings, gate first or last, in groups or not, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.near_misses import EPS, inverse_rms
from tests.frames import check, render

from .contract import (
    assert_autocast,
    assert_autocast_inside,
    assert_disabled,
    assert_dynamic,
    assert_fires,
    assert_refused_in_a_graph,
)

NAME = "gated_rms_norm"
DIM, LANES, GROUPS, SEQ = 10, 12, 3, 5
SIZE = LANES // GROUPS


class Mixer(nn.Module):
    """One projection for the value and its gate; `body(module, y, z)` is the spelling under test."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.proj, self.out = nn.Linear(DIM, 2 * LANES + 3), nn.Linear(LANES, DIM)
        self.weight = nn.Parameter(1 + torch.randn(LANES) / 4)
        self.shift = nn.Parameter(torch.randn(LANES) / 4)
        self.eps = nn.Parameter(torch.tensor(EPS))

    def forward(self, x):
        z, y, _ = self.proj(x).split([LANES, LANES, 3], -1)
        return self.body(self, y, z)


def build(body, dtype=torch.float32):
    torch.manual_seed(0)
    return Mixer(body).to(dtype), hidden(SEQ, dtype)


def hidden(seq, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq)
    return (torch.randn(2, seq, DIM, generator=generator).to(dtype).requires_grad_(),)


def gated(y, z):
    return y * F.silu(z)


def hf_mamba2(m, y, z):
    h = gated(y.float(), z.float())
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return m.out(m.weight * h.to(y.dtype))


def hf_zamba2(m, y, z):
    h = gated(y.float(), z.float())
    groups = h.view(*h.shape[:-1], GROUPS, SIZE)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + EPS)
    return m.out(m.weight * groups.view(*y.shape[:-1], LANES).to(y.dtype))


def hf_falcon_h1(m, y, z):
    h = y.float().view(*y.shape[:-1], GROUPS, SIZE)
    h = m.weight.view(GROUPS, SIZE) * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))
    return m.out((h.view(*y.shape[:-1], LANES) * F.silu(z.to(torch.float32))).to(y.dtype))


def hf_qwen3_next(m, y, z):
    rows, gates = y.reshape(-1, SIZE), z.reshape(-1, SIZE)
    h = rows.float()
    h = m.weight[:SIZE] * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(rows.dtype)
    h = (h * F.silu(gates.to(torch.float32))).to(rows.dtype)
    return m.out(h.reshape(y.shape))


# --- fires


def test_graph():
    frames = assert_fires(NAME, *build(hf_zamba2))
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
linear: f32[2, 5, 27] = linear(x, proj_weight, proj_bias)
split_with_sizes: (f32[2, 5, 12], f32[2, 5, 12], f32[2, 5, 3]) = split_with_sizes(linear, [12, 12, 3], -1)
getitem: f32[2, 5, 12] = split_with_sizes[0]
getitem_1: f32[2, 5, 12] = split_with_sizes[1]
gated_rms_norm: (f32[2, 5, 12], f32[2, 5, 3]) = megacpp.gated_rms_norm(getitem_1, getitem, weight, 0.05, 4, False, float32)
getitem_2: f32[2, 5, 12] = gated_rms_norm[0]
linear_1: f32[2, 5, 10] = linear(getitem_2, out_weight, out_bias)
return [linear_1]""",
    )


def norm_module(m, y, z):
    return F.rms_norm(y, (LANES,), m.weight, EPS) * F.silu(z)


def norm_module_of_the_product(m, y, z):
    return F.rms_norm(F.silu(z) * y, (LANES,), m.weight, EPS)


def norm_module_in_groups(m, y, z):
    h = gated(y, z).unflatten(-1, (GROUPS, SIZE))
    return F.rms_norm(h, (SIZE,), None, EPS).flatten(-2) * m.weight


def divided_by_the_root(m, y, z):
    h = gated(y, z)
    return h / torch.sqrt((h * h).sum(-1, keepdim=True) / LANES + EPS) * m.weight


def silu_spelled_out(m, y, z):
    return m.weight * (y * inverse_rms(y)) * (z * torch.sigmoid(z))


def no_weight(m, y, z):
    return y * inverse_rms(y) * F.silu(z)


def scaled(m, y, z):
    return 0.5 * (y * inverse_rms(y)) * (1 + m.weight) * F.silu(z) / 3


def gate_in_heads(m, y, z):
    """The gate is seen in groups where the value is."""
    h = y.unflatten(-1, (GROUPS, SIZE))
    h = h * inverse_rms(h) * m.weight[:SIZE] * F.silu(z.unflatten(-1, (GROUPS, SIZE)))
    return h.flatten(-2)


def one_row_for_all_tokens(m, y, z):
    h = gated(y.reshape(-1, LANES), z.reshape(-1, LANES))
    return (h * inverse_rms(h) * m.weight).reshape(y.shape)


def sigmoid_of_heads(m, y, z):
    """As Kimi Delta Attention: each head normed, one weight for all heads, all of it in float32."""
    h, g = (t.unflatten(-1, (GROUPS, SIZE)) for t in (y, z))
    h = h.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * m.weight[:SIZE].float()
    return m.out((h * torch.sigmoid(g.float())).to(y.dtype).flatten(-2))


def sigmoid_behind_groups(m, y, z):
    """The norm is rounded, its weight a row's, and the gate is in the model's dtype."""
    h = y.view(*y.shape[:-1], GROUPS, SIZE).float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(y.dtype)
    return m.out(torch.sigmoid(z) * (m.weight * h.view(y.shape)))


def sigmoid_before(m, y, z):
    h = y.float() * torch.sigmoid(z.float())
    return m.out(m.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(y.dtype))


def one_plus_weight(m, y, z):
    h = y.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + m.weight.float())
    return m.out(h.to(y.dtype) * (z * torch.sigmoid(z.float()).to(z.dtype)))


def weight_plus_one(m, y, z):
    h = y.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(y.dtype) * (m.weight + 1)
    return m.out((F.silu(z.float()) * h).to(y.dtype))


VARIANTS = {
    sigmoid_of_heads: True, sigmoid_behind_groups: True, sigmoid_before: False, one_plus_weight: True,
    weight_plus_one: True,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", VARIANTS, ids=lambda f: f.__name__)
def test_variants(body, dtype):
    frames = assert_fires(NAME, *build(body, dtype))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.gated_rms_norm.default)
    assert node.args[5] == VARIANTS[body] and node.args[7:] == ("sigmoid",) * ("sigmoid" in body.__name__)
    assert [n.meta["val"].dtype for n in node.args[:2]] == [dtype, dtype] and node.args[6] == dtype


def value_and_gate_are_used_elsewhere(m, y, z):
    h = gated(y, z)
    return h * inverse_rms(h) * m.weight + y, z * 2



FORMS = {
    hf_mamba2: False, hf_zamba2: False, hf_falcon_h1: True, hf_qwen3_next: True, norm_module: True,
    norm_module_of_the_product: False, norm_module_in_groups: False, divided_by_the_root: False,
    silu_spelled_out: True, no_weight: True, scaled: True, gate_in_heads: True, one_row_for_all_tokens: False,
}  # fmt: skip


@pytest.mark.parametrize("body", FORMS, ids=lambda f: f.__name__)
def test_fires(body):
    frames = assert_fires(NAME, *build(body, torch.float32 if "hf" in body.__name__ else torch.float64))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.gated_rms_norm.default)
    assert node.args[5] == FORMS[body]


@pytest.mark.parametrize("body", [hf_mamba2, hf_zamba2, hf_falcon_h1, hf_qwen3_next], ids=lambda f: f.__name__)
def test_fires_in_bfloat16(body):
    """Nothing is widened or copied in front of the op: it reads the projection's own lanes."""
    frames = assert_fires(NAME, *build(body, torch.bfloat16))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.gated_rms_norm.default)
    assert all("getitem" in operand.name for operand in node.args[:2])
    assert node.args[6] == torch.bfloat16


def test_value_in_float32_and_gate_in_bfloat16():
    """A scan's result is float32; its norm's is what the next projection takes."""

    def behind_a_scan(m, y, z):
        h = gated((y.float() * 1.5).exp(), z.float())
        h = m.weight.float() * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))
        return m.out(h.to(z.dtype))

    frames = assert_fires(NAME, *build(behind_a_scan, torch.bfloat16))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.gated_rms_norm.default)
    assert [n.meta["val"].dtype for n in node.args[:2]] == [torch.float32, torch.bfloat16]
    assert node.args[6] == torch.bfloat16


def test_value_rounded_before_the_norm():
    """As gated DeltaNet hands it over: computed in float32, rounded, widened again for the norm."""

    def rounded(m, y, z):
        h = (y.float() * 1.5).to(y.dtype).float()
        h = m.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(y.dtype)
        return (h * F.silu(z.float())).to(y.dtype)

    frames = assert_fires(NAME, *build(rounded, torch.bfloat16))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.gated_rms_norm.default)
    assert node.args[0].meta["val"].dtype == torch.bfloat16


def test_used_elsewhere_too_and_several():
    assert_fires(NAME, *build(value_and_gate_are_used_elsewhere))

    def twice(m, y, z):
        h = y * inverse_rms(y) * m.weight * F.silu(z)
        return h * inverse_rms(h) * F.silu(z + 1)

    assert_fires(NAME, *build(twice), count=2)


def test_without_gradients():
    module, (x,) = build(hf_zamba2)
    module.requires_grad_(False)
    assert check(module, (x.detach(),)).counts[NAME] == 1


# --- the contract


def test_disabled():
    assert_disabled(NAME, *build(hf_mamba2))


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("body", [hf_mamba2, hf_zamba2, hf_falcon_h1, hf_qwen3_next], ids=lambda f: f.__name__)
def test_dynamic_shapes(body, everything):
    module, _ = build(body)
    assert_dynamic(NAME, module, hidden, everything=everything)


def in_whole_chunks(m, y, z):
    """As a chunked scan hands it over: the length comes back as an expression of chunks and their size."""
    t = y.shape[1]
    behind = (4 - t % 4) % 4
    h = F.pad(y, (0, 0, 0, behind)).reshape(y.shape[0], -1, 4, LANES).tanh().reshape(y.shape[0], -1, LANES)
    return hf_mamba2(m, h[:, :t] if behind > 0 else h, z)


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("length", [8, 6], ids=["whole_chunks", "padded"])
def test_a_length_in_chunks(length, everything):
    module, _ = build(in_whole_chunks)
    args = hidden(length)
    if not everything:
        torch._dynamo.mark_dynamic(args[0], 1)
    frames = check(module, args, dynamic=True if everything else None)
    assert frames.counts[NAME] == 1, frames.misses


def test_autocast_around_the_call():
    assert_autocast(NAME, *build(hf_zamba2))


def test_autocast_inside_the_frame():
    assert_autocast_inside(NAME, *build(lambda m, y, z: hf_zamba2(m, y, z).float()))


# --- stays out


def layer_norm_of_the_product(m, y, z):
    return F.layer_norm(gated(y, z), (LANES,), m.weight, None, EPS) * 2


def layer_norm_then_gate(m, y, z):
    return F.layer_norm(y, (LANES,), m.weight, None, EPS) * F.silu(z)


def tanh_gate_first(m, y, z):
    h = y * torch.tanh(z)
    return m.weight * (h * inverse_rms(h))


def gelu_gate(m, y, z):
    return m.weight * (y * inverse_rms(y)) * F.gelu(z)


def eps_outside(m, y, z):
    h = gated(y, z)
    return h / (h.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * m.weight


def eps_is_a_parameter(m, y, z):
    h = gated(y, z)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + m.eps) * m.weight


def norm_over_positions(m, y, z):
    h = gated(y, z)
    return h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + EPS) * m.weight


def statistics_before_the_gate(m, y, z):
    return gated(y, z) * torch.rsqrt((y + 1).pow(2).mean(-1, keepdim=True) + EPS) * m.weight


def product_is_used_elsewhere(m, y, z):
    h = gated(y, z)
    return h * inverse_rms(h) * m.weight, h.sum()


def root_is_used_elsewhere(m, y, z):
    r = inverse_rms(y)
    return y * r * m.weight * F.silu(z), r


def gate_is_used_elsewhere(m, y, z):
    g = F.silu(z)
    return y * inverse_rms(y) * m.weight * g, g


def gate_under_no_grad(m, y, z):
    with torch.no_grad():
        g = F.silu(z)
    return y * inverse_rms(y) * m.weight * g


def rounded_in_between(m, y, z):
    return ((y * inverse_rms(y)).bfloat16() * F.silu(z)).float() * m.weight


REFUSED = [
    ("layer-norm", layer_norm_of_the_product),
    ("layer-norm", layer_norm_then_gate),
    ("gate-activation", tanh_gate_first),
    ("gate-activation", gelu_gate),
    ("eps-place", eps_outside),
    ("eps-tensor", eps_is_a_parameter),
    ("axes", norm_over_positions),
    ("other-tensor", statistics_before_the_gate),
    ("escapes", product_is_used_elsewhere),
    ("escapes", root_is_used_elsewhere),
    ("escapes", gate_is_used_elsewhere),
    ("region", gate_under_no_grad),
]


@pytest.mark.parametrize(("tag", "body"), REFUSED, ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_refuses(tag, body):
    assert_refused_in_a_graph(NAME, tag, *build(body))


def test_refuses_lower_precision_than_operands_and_result():
    frames = check(*build(rounded_in_between), tolerance=4e-2)
    assert "precision" in frames.tags(NAME) and not frames.counts[NAME]


def test_a_normed_value_that_gates_itself_stays():
    """The gate is computed from what would be inside the op."""

    def self_gated(m, y, z):
        h = y * inverse_rms(y) * m.weight
        return h * F.silu(m.out(h) @ m.out.weight)

    frames = check(*build(self_gated))
    assert not frames.counts[NAME]


def test_gates_and_norms_apart_are_no_near_miss():
    def apart(m, y, z):
        h = y * inverse_rms(y) * m.weight
        return m.out(h).relu(), m.out(gated(y, z)) * 2

    frames = check(*build(apart))
    assert not frames.tags(NAME) and not frames.counts[NAME]
