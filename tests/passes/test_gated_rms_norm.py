"""Gated RMSNorm: found in its spellings, gate first or last, in groups or not, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.near_misses import EPS, inverse_rms
from tests.frames import check, check_graph, render

from .conditions import conditions, op_of, sampled, shown
from .contract import assert_dynamic, assert_fires, assert_refused

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


def unit(h):
    return h * inverse_rms(h)


def unit_by_hand(h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)


def hf_mamba2(m, y, z):
    return m.out(m.weight * unit_by_hand(gated(y.float(), z.float())).to(y.dtype))


def hf_zamba2(m, y, z):
    h = gated(y.float(), z.float())
    groups = unit_by_hand(h.view(*h.shape[:-1], GROUPS, SIZE))
    return m.out(m.weight * groups.view(*y.shape[:-1], LANES).to(y.dtype))


def hf_falcon_h1(m, y, z):
    h = m.weight.view(GROUPS, SIZE) * unit_by_hand(y.float().view(*y.shape[:-1], GROUPS, SIZE))
    return m.out((h.view(*y.shape[:-1], LANES) * F.silu(z.to(torch.float32))).to(y.dtype))


def hf_qwen3_next(m, y, z):
    rows, gates = y.reshape(-1, SIZE), z.reshape(-1, SIZE)
    h = m.weight[:SIZE] * unit_by_hand(rows.float()).to(rows.dtype)
    h = (h * F.silu(gates.to(torch.float32))).to(rows.dtype)
    return m.out(h.reshape(y.shape))


HF = {"mamba2": hf_mamba2, "zamba2": hf_zamba2, "falcon_h1": hf_falcon_h1, "qwen3_next": hf_qwen3_next}


def test_graph():
    frames = assert_fires(NAME, *build(hf_zamba2), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 5, 27] = linear(x, proj_weight, proj_bias)
split_with_sizes: (f32[2, 5, 12], f32[2, 5, 12], f32[2, 5, 3]) = split_with_sizes(linear, [12, 12, 3], -1)
getitem: f32[2, 5, 12] = split_with_sizes[0]
getitem_1: f32[2, 5, 12] = split_with_sizes[1]
gated_rms_norm: (f32[2, 5, 12], f32[2, 5, 3]) = megacpp.gated_rms_norm(getitem_1, getitem, weight, 0.05, 4, False, float32)
getitem_2: f32[2, 5, 12] = gated_rms_norm[0]
linear_1: f32[2, 5, 10] = linear(getitem_2, out_weight, out_bias)
return [linear_1]""")


def norm_module_in_groups(m, y, z):
    h = gated(y, z).unflatten(-1, (GROUPS, SIZE))
    return F.rms_norm(h, (SIZE,), None, EPS).flatten(-2) * m.weight


def divided_by_the_root(m, y, z):
    h = gated(y, z)
    return h / torch.sqrt((h * h).sum(-1, keepdim=True) / LANES + EPS) * m.weight


def gate_in_heads(m, y, z):
    """The gate is seen in groups where the value is."""
    h = unit(y.unflatten(-1, (GROUPS, SIZE))) * m.weight[:SIZE] * F.silu(z.unflatten(-1, (GROUPS, SIZE)))
    return h.flatten(-2)


def one_row_for_all_tokens(m, y, z):
    return (unit(gated(y.reshape(-1, LANES), z.reshape(-1, LANES))) * m.weight).reshape(y.shape)


def sigmoid_of_heads(m, y, z):
    """As Kimi Delta Attention: each head normed, one weight for all heads, all of it in float32."""
    h, g = (t.unflatten(-1, (GROUPS, SIZE)) for t in (y, z))
    h = unit_by_hand(h.float()) * m.weight[:SIZE].float()
    return m.out((h * torch.sigmoid(g.float())).to(y.dtype).flatten(-2))


def sigmoid_behind_groups(m, y, z):
    """The norm is rounded, its weight a row's, and the gate is in the model's dtype."""
    h = unit_by_hand(y.view(*y.shape[:-1], GROUPS, SIZE).float()).to(y.dtype)
    return m.out(torch.sigmoid(z) * (m.weight * h.view(y.shape)))


def sigmoid_before(m, y, z):
    return m.out(m.weight * unit_by_hand(y.float() * torch.sigmoid(z.float())).to(y.dtype))


def one_plus_weight(m, y, z):
    h = unit_by_hand(y.float()) * (1.0 + m.weight.float())
    return m.out(h.to(y.dtype) * (z * torch.sigmoid(z.float()).to(z.dtype)))


def weight_plus_one(m, y, z):
    h = unit_by_hand(y.float()).to(y.dtype) * (m.weight + 1)
    return m.out((F.silu(z.float()) * h).to(y.dtype))


# form -> whether the norm comes first
VARIANTS = {
    sigmoid_of_heads: True, sigmoid_behind_groups: True, sigmoid_before: False, one_plus_weight: True,
    weight_plus_one: True,
}


@sampled(5, "dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", VARIANTS, ids=shown)
def test_variants(body, dtype):
    node = op_of(assert_fires(NAME, *build(body, dtype)), NAME)
    assert node.args[5] == VARIANTS[body] and node.args[7:] == ("sigmoid",) * ("sigmoid" in body.__name__)
    assert [n.meta["val"].dtype for n in node.args[:2]] == [dtype, dtype] and node.args[6] == dtype


FORMS = {
    "mamba2": (hf_mamba2, False), "zamba2": (hf_zamba2, False), "falcon_h1": (hf_falcon_h1, True),
    "qwen3_next": (hf_qwen3_next, True), "norm_module_in_groups": (norm_module_in_groups, False),
    "divided_by_the_root": (divided_by_the_root, False), "gate_in_heads": (gate_in_heads, True),
    "one_row_for_all_tokens": (one_row_for_all_tokens, False),
    "norm_module": (lambda m, y, z: F.rms_norm(y, (LANES,), m.weight, EPS) * F.silu(z), True),
    "norm_module_of_the_product": (lambda m, y, z: F.rms_norm(F.silu(z) * y, (LANES,), m.weight, EPS), False),
    "silu_spelled_out": (lambda m, y, z: m.weight * unit(y) * (z * torch.sigmoid(z)), True),
    "no_weight": (lambda m, y, z: unit(y) * F.silu(z), True),
    "scaled": (lambda m, y, z: 0.5 * unit(y) * (1 + m.weight) * F.silu(z) / 3, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_fires(form):
    body, norm_first = FORMS[form]
    frames = assert_fires(NAME, *build(body, torch.float32 if form in HF else torch.float64))
    assert op_of(frames, NAME).args[5] == norm_first


@sampled(3, "form", HF)
def test_fires_in_bfloat16(form):
    """Nothing is widened or copied in front of the op: it reads the projection's own lanes."""
    node = op_of(assert_fires(NAME, *build(HF[form], torch.bfloat16)), NAME)
    assert all("getitem" in operand.name for operand in node.args[:2])
    assert node.args[6] == torch.bfloat16


def test_value_in_float32_and_gate_in_bfloat16():
    """A scan's result is float32; its norm's is what the next projection takes."""

    def behind_a_scan(m, y, z):
        return m.out((m.weight.float() * unit_by_hand(gated((y.float() * 1.5).exp(), z.float()))).to(z.dtype))

    node = op_of(assert_fires(NAME, *build(behind_a_scan, torch.bfloat16)), NAME)
    assert [n.meta["val"].dtype for n in node.args[:2]] == [torch.float32, torch.bfloat16]
    assert node.args[6] == torch.bfloat16


def test_value_rounded_before_the_norm():
    """As gated DeltaNet hands it over: computed in float32, rounded, widened again for the norm."""

    def rounded(m, y, z):
        h = m.weight * unit_by_hand((y.float() * 1.5).to(y.dtype).float()).to(y.dtype)
        return (h * F.silu(z.float())).to(y.dtype)

    node = op_of(assert_fires(NAME, *build(rounded, torch.bfloat16)), NAME)
    assert node.args[0].meta["val"].dtype == torch.bfloat16


def test_used_elsewhere_too_and_several():
    assert_fires(NAME, *build(lambda m, y, z: (unit(gated(y, z)) * m.weight + y, z * 2)))

    def twice(m, y, z):
        return unit(unit(y) * m.weight * F.silu(z)) * F.silu(z + 1)

    assert_fires(NAME, *build(twice), count=2)


test_conditions = conditions(
    NAME, disabled=lambda: build(hf_mamba2), inference=lambda: build(hf_zamba2), autocast=lambda: build(hf_zamba2),
    autocast_inside=lambda: build(lambda m, y, z: hf_zamba2(m, y, z).float()),
)


@sampled(5, "everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("form", HF)
def test_dynamic_shapes(form, everything):
    assert_dynamic(NAME, build(HF[form])[0], hidden, everything=everything)


def in_whole_chunks(m, y, z):
    """As a chunked scan hands it over: the length comes back as an expression of chunks and their size."""
    t = y.shape[1]
    behind = (4 - t % 4) % 4
    h = F.pad(y, (0, 0, 0, behind)).reshape(y.shape[0], -1, 4, LANES).tanh().reshape(y.shape[0], -1, LANES)
    return hf_mamba2(m, h[:, :t] if behind > 0 else h, z)


@sampled(5, "everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("length", [8, 6], ids=["whole_chunks", "padded"])
def test_a_length_in_chunks(length, everything):
    module, _ = build(in_whole_chunks)
    args = hidden(length)
    if not everything:
        torch._dynamo.mark_dynamic(args[0], 1)
    frames = check(module, args, dynamic=True if everything else None)
    assert frames.counts[NAME] == 1, frames.misses


def gate_under_no_grad(m, y, z):
    with torch.no_grad():
        g = F.silu(z)
    return unit(y) * m.weight * g


def eps_outside(m, y, z):
    h = gated(y, z)
    return h / (h.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * m.weight


def rooted(mean, eps=lambda m: EPS):
    """The gated value by the root of what `mean` makes of it and of the value."""

    def body(m, y, z):
        h = gated(y, z)
        return h * torch.rsqrt(mean(h, y) + eps(m)) * m.weight

    return body


def beside(which):
    """The root or the gate is a result, too."""

    def body(m, y, z):
        parts = {"root": inverse_rms(y), "gate": F.silu(z)}
        return y * parts["root"] * m.weight * parts["gate"], parts[which]

    return body


def product_is_used_elsewhere(m, y, z):
    h = gated(y, z)
    return unit(h) * m.weight, h.sum()


REFUSED = {
    "layer_norm": ("layer-norm", lambda m, y, z: F.layer_norm(gated(y, z), (LANES,), m.weight, None, EPS) * 2),
    "layer_norm_then_gate": ("layer-norm", lambda m, y, z: F.layer_norm(y, (LANES,), m.weight, None, EPS) * F.silu(z)),
    "tanh_gate_first": ("gate-activation", lambda m, y, z: m.weight * unit(y * torch.tanh(z))),
    "gelu_gate": ("gate-activation", lambda m, y, z: m.weight * unit(y) * F.gelu(z)),
    "eps_outside": ("eps-place", eps_outside),
    "eps_is_a_parameter": ("eps-tensor", rooted(lambda h, y: h.pow(2).mean(-1, keepdim=True), lambda m: m.eps)),
    "norm_over_positions": ("axes", rooted(lambda h, y: h.pow(2).mean(1, keepdim=True))),
    "statistics_before_the_gate": ("other-tensor", rooted(lambda h, y: (y + 1).pow(2).mean(-1, keepdim=True))),
    "product_is_used_elsewhere": ("escapes", product_is_used_elsewhere),
    "root_is_used_elsewhere": ("escapes", beside("root")),
    "gate_is_used_elsewhere": ("escapes", beside("gate")),
    "gate_under_no_grad": ("region", gate_under_no_grad),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    tag, body = REFUSED[case]
    assert_refused(NAME, tag, *build(body))


UNIT_LENGTHS = {
    "clamped": lambda x: F.normalize(x, dim=-1),
    "over_positions": lambda x: F.normalize(x, dim=1),
    "padded": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS),
    "eps_outside": lambda x: x / (x.norm(dim=-1, keepdim=True) + EPS) * 10.0,
}


@pytest.mark.parametrize("norm", UNIT_LENGTHS)
@pytest.mark.parametrize("body", [lambda m, y, z: m.normed(gated(y, z)), lambda m, y, z: m.normed(y) * F.silu(z)])
def test_a_norm_to_unit_length_is_none_of_its_business(norm, body):
    """nGPT's, of a gated MLP."""
    module, args = build(body)
    module.normed = UNIT_LENGTHS[norm]
    frames = check_graph(module, args)
    assert not frames.misses and not frames.fired


def test_refuses_lower_precision_than_operands_and_result():
    frames = check_graph(*build(lambda m, y, z: (unit(y).bfloat16() * F.silu(z)).float() * m.weight), tolerance=4e-2)
    assert "precision" in frames.tags(NAME) and not frames.counts[NAME]


def test_a_normed_value_that_gates_itself_stays():
    """The gate is computed from what would be inside the op."""

    def self_gated(m, y, z):
        h = unit(y) * m.weight
        return h * F.silu(m.out(h) @ m.out.weight)

    assert not check_graph(*build(self_gated)).counts[NAME]


def test_gates_and_norms_apart_are_no_near_miss():
    frames = check_graph(*build(lambda m, y, z: (m.out(unit(y) * m.weight).relu(), m.out(gated(y, z)) * 2)))
    assert not frames.tags(NAME) and not frames.counts[NAME]
