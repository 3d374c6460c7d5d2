"""A decoding step whose up-projections have biases and low-rank paths beside them, which are absorbed, too."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.decode.absorbed import LowRank, choose_form
from tests.corpus import decodes
from tests.corpus.decodes import CACHED, HEADS, LATENT, NOPE, ROPE, VALUE, arguments, build, expanded, one_projection
from tests.frames import check, check_graph, render, train

from .conditions import assert_serves, sampled
from .contract import assert_fires, assert_half_precision, assert_refused
from .test_mla_decode import attended, cache_of_keys

NAME, RANK = "mla_decode", 2


class Adapted(nn.Module):
    """A linear with a path of low rank beside it, behind dropout, as adapters are written."""

    def __init__(self, base, rank=RANK, scale=1.5, narrow_scale=1.0):
        super().__init__()
        self.base, self.scale, self.narrow_scale, self.dropout = base, scale, narrow_scale, nn.Dropout(0.1)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(self.dropout(x)) * self.narrow_scale) * self.scale


def biased(linear):
    return nn.Linear(linear.in_features, linear.out_features)


def twice(linear):
    """Two paths, one of rank 1 and first in the sum."""
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Adapted(biased(linear), narrow_scale=0.5), Adapted(linear, 1)

        def forward(self, x):
            return self.second.b(self.second.a(x)) + self.first(x)

    return Twice()


CHANGES = {"bias": biased, "lora": Adapted, "both": lambda linear: Adapted(biased(linear)), "twice": twice}


def changed(change, body, tokens=1, dtype=torch.float32, names=("up", "up_k", "up_v")):
    module, args = build(body, tokens, dtype)
    for name in names:
        setattr(module, name, CHANGES[change](getattr(module, name)).to(dtype))
    return module.eval().requires_grad_(False), args


@sampled(9, ("body", "tokens"), [(one_projection, 1), (decodes.two_projections, 3), (decodes.one_buffer, 2)])
@pytest.mark.parametrize("change", CHANGES)
def test_is_the_same_attention_in_float64(change, body, tokens):
    frames = check_graph(*changed(change, body, tokens, torch.float64), tolerance=1e-12)
    assert frames.counts[NAME] == 1, frames.misses


@sampled(3, "name", ["up_k", "up_v"])
def test_of_keys_or_of_values_alone(name):
    assert_fires(NAME, *changed("both", decodes.two_projections, names=(name,)))


def test_in_half_precision():
    module, _ = changed("both", one_projection, dtype=torch.bfloat16)
    assert_half_precision(NAME, module, arguments(1, torch.bfloat16, batch=32))


def test_paths_are_counted():
    frames = assert_fires(NAME, *changed("lora", one_projection))
    (site,) = frames.analyses[0].outcome.sites
    low_rank = LowRank(2, 2, 2)
    assert site.note == str(choose_form(1, CACHED + 1, HEADS, NOPE, ROPE, VALUE, LATENT, low_rank=low_rank))


def test_graph():
    """No weight is summed: queries and results go through the narrow paths."""
    frames = assert_fires(NAME, *changed("lora", decodes.length_of_each), dynamo=True)
    ours = render(frames.graph).split("cat_3:")[1].splitlines()[1:]
    expecttest.assert_expected_inline("\n".join(ours), """\
permute: f32[2, 1, 3, 12] = permute(cat_2, [0, 2, 1, 3])
slice: f32[2, 1, 3, 8] = slice.Tensor(permute, -1, 0, 8)
view_1: f32[3, 14, 16] = view(up_base_weight, [3, 14, 16])
slice_1: f32[3, 8, 16] = slice.Tensor(view_1, 1, 0, 8)
einsum: f32[2, 1, 3, 16] = einsum(bthn,hnr->bthr, [slice, slice_1])
view_2: f32[3, 14, 2] = view(up_b_weight, [3, 14, 2])
slice_2: f32[3, 8, 2] = slice.Tensor(view_2, 1, 0, 8)
einsum_1: f32[2, 1, 3, 2] = einsum(bthn,hnr->bthr, [slice, slice_2])
einsum_2: f32[2, 1, 3, 16] = einsum(bthp,pr->bthr, [einsum_1, up_a_weight])
mul_5: f32[2, 1, 3, 16] = mul.Tensor(einsum_2, 1.5)
add_1: f32[2, 1, 3, 16] = add.Tensor(einsum, mul_5)
slice_3: f32[2, 1, 3, 4] = slice.Tensor(permute, -1, 8, 12)
cat_4: f32[2, 1, 3, 20] = cat([add_1, slice_3], -1)
full: i64[1] = full([1], 0, dtype=int64, device=cpu)
view_3: i64[2] = view(cat, [-1])
add_2: i64[2] = add.Tensor(full, view_3, alpha=1)
expand: i64[2] = expand(add_2, [2])
mla_decode: (f32[2, 1, 3, 16], f32[2, 1, 3]) = megacpp.mla_decode(cat_4, cat_3, expand, None, None, 0.28867513459481287, 16)
getitem_4: f32[2, 1, 3, 16] = mla_decode[0]
view_4: f32[3, 14, 16] = view(up_base_weight, [3, 14, 16])
slice_4: f32[3, 6, 16] = slice.Tensor(view_4, 1, 8, 14)
einsum_3: f32[2, 1, 3, 6] = einsum(bthr,hvr->bthv, [getitem_4, slice_4])
einsum_4: f32[2, 1, 3, 2] = einsum(bthr,pr->bthp, [getitem_4, up_a_weight])
view_5: f32[3, 14, 2] = view(up_b_weight, [3, 14, 2])
slice_5: f32[3, 6, 2] = slice.Tensor(view_5, 1, 8, 14)
einsum_5: f32[2, 1, 3, 6] = einsum(bthr,hvr->bthv, [einsum_4, slice_5])
mul_6: f32[2, 1, 3, 6] = mul.Tensor(einsum_5, 1.5)
add_3: f32[2, 1, 3, 6] = add.Tensor(einsum_3, mul_6)
permute_1: f32[2, 3, 1, 6] = permute(add_3, [0, 2, 1, 3])
contiguous: f32[2, 3, 1, 6] = contiguous(permute_1)
transpose_1: f32[2, 1, 3, 6] = transpose.int(contiguous, 1, 2)
view_6: f32[2, 1, 18] = view(transpose_1, [2, 1, 18])
linear_1: f32[2, 1, 40] = linear(view_6, out_weight)
return [linear_1]""")


def test_a_bias_of_keys_needs_nothing():
    """It adds the same to all scores of a query."""
    read = render(assert_fires(NAME, *changed("bias", decodes.two_projections, names=("up_k",))).graph)
    assert "up_k_weight" in read and "up_k_bias" not in read


def test_numbers_that_are_inputs():
    """Under dynamic=True the scale is one."""
    frames = check(*changed("lora", one_projection), dynamic=True)
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.parametrize("tokens", [1, 2])
def test_no_row_is_seen(tokens):
    """Torch's attention is 0 there, whatever the values' bias is."""
    module, args = changed("bias", one_to_a_length, tokens)
    frames = check_graph(module, args)
    assert frames.counts[NAME] == 1
    empty = (*args[:3], torch.tensor([0]))
    got, want = (train(f, module, empty)["output 0"] for f in (frames.compiled, module))
    assert torch.equal(got, torch.zeros_like(got)) and torch.equal(want, got)


def one_to_a_length(m, x, latents, ropes, position):
    """All queries see the rows in front of a position."""
    seen = (torch.arange(latents.shape[1]) < position).expand(x.shape[1], -1)
    return attended(m, x, torch.arange(x.shape[1]), *expanded(m, latents, ropes), attn_mask=seen)


def test_one_graph_serves_all_lengths():
    module, args = changed("both", decodes.one_buffer, 2)
    for cache in args[1:3]:
        torch._dynamo.mark_dynamic(cache, 1)
    frames = check(module, args)
    assert frames.counts[NAME] == 1
    assert_serves(frames, module, arguments(2, cached=50), graphs=None)


def made_of(path):
    """Keys and values of a projection beside which `path(up, latents)` stands."""

    def body(m, x, latents, ropes, position):
        made = m.up.base(latents) + m.up.b(path(m.up, latents))
        k_nope, v = made.view(*latents.shape[:2], HEADS, NOPE + VALUE).transpose(1, 2).split([NOPE, VALUE], -1)
        k = torch.cat((k_nope, ropes.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1)
        return attended(m, x, position, k, v)

    return body


def a_bias_by_row(m, x, latents, ropes, position):
    k, v = expanded(m, latents, ropes)
    return attended(m, x, position, k, v + latents[:, None, :, :VALUE])


OTHER_SUMS = {
    "of_other_latents": made_of(lambda up, latents: up.a(latents.flip(1))),
    "a_bias_by_row": a_bias_by_row,
    "an_activation_between": made_of(lambda up, latents: F.silu(up.a(latents))),
}


@sampled(3, "case", OTHER_SUMS)
def test_what_is_another_sum_stays(case):
    assert not check_graph(*changed("lora", OTHER_SUMS[case])).counts[NAME]


def test_training():
    module, args = changed("lora", one_projection)
    module.up.b.requires_grad_(True)
    assert_refused(NAME, "training", module, args)


def test_a_cache_of_keys():
    """Whose latents are gone, with an adapter as without."""
    module, (x, _, _, position) = changed("lora", cache_of_keys)
    held = (torch.randn(2, HEADS, CACHED, n) for n in (NOPE + ROPE, VALUE))
    assert_refused(NAME, "expanded-cache", module, (x, *held, position))
