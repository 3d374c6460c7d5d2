"""A decoding step of latent attention in the absorbed form: found in every spelling, rewritten, and refused for every
reason there is."""

from __future__ import annotations

import copy

import expecttest
import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.config.options import Config
from megacpp_compile.decode.absorbed import choose_form
from megacpp_compile.report.report import Report
from tests.corpus import decodes
from tests.corpus.decodes import CACHED, HEADS, LATENT, NOPE, ROPE, SPELLINGS, VALUE, Step, arguments, build, expanded
from tests.frames import check, check_graph, render, run
from tests.lowerings import relative_error

from .conditions import assert_serves, cases, conditions, op_of, sampled, shown
from .contract import assert_fires, assert_half_precision, assert_refused

NAME = "mla_decode"


def attended(m, x, positions, k, v, **how):
    return decodes.joined(F.scaled_dot_product_attention(decodes.queries(m, x, positions), k, v, **how))


def places(x, position):
    """Those of the new tokens."""
    return position + torch.arange(x.shape[1])


@sampled(9, "tokens", [1, 3])
@pytest.mark.parametrize("body", SPELLINGS, ids=shown)
def test_fires(body, tokens):
    assert_fires(NAME, *build(body, tokens))


def test_graph():
    frames = assert_fires(NAME, *build(decodes.length_of_each, 1), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
sub: i64[1] = sub.Tensor(position, 3)
cat: i64[2] = cat([position, sub])
linear: f32[2, 1, 36] = linear(x, q_weight)
view: f32[2, 1, 3, 12] = view(linear, [2, 1, 3, 12])
transpose: f32[2, 3, 1, 12] = transpose.int(view, 1, 2)
split_with_sizes: (f32[2, 3, 1, 8], f32[2, 3, 1, 4]) = split_with_sizes(transpose, [8, 4], -1)
getitem: f32[2, 3, 1, 8] = split_with_sizes[0]
getitem_1: f32[2, 3, 1, 4] = split_with_sizes[1]
unsqueeze: i64[1, 1] = unsqueeze(position, 1)
arange: i64[2] = arange(2, device=cpu, pin_memory=False)
neg: i64[2] = neg(arange)
pow: f32[2] = pow.Scalar(10.0, neg)
mul: f32[1, 2] = mul.Tensor(unsqueeze, pow)
cos: f32[1, 2] = cos(mul)
sin: f32[1, 2] = sin(mul)
split: (f32[2, 3, 1, 2], f32[2, 3, 1, 2]) = split.Tensor(getitem_1, 2, -1)
getitem_2: f32[2, 3, 1, 2] = split[0]
getitem_3: f32[2, 3, 1, 2] = split[1]
mul_1: f32[2, 3, 1, 2] = mul.Tensor(getitem_2, cos)
mul_2: f32[2, 3, 1, 2] = mul.Tensor(getitem_3, sin)
sub_1: f32[2, 3, 1, 2] = sub.Tensor(mul_1, mul_2)
mul_3: f32[2, 3, 1, 2] = mul.Tensor(getitem_3, cos)
mul_4: f32[2, 3, 1, 2] = mul.Tensor(getitem_2, sin)
add: f32[2, 3, 1, 2] = add.Tensor(mul_3, mul_4)
cat_1: f32[2, 3, 1, 4] = cat([sub_1, add], -1)
cat_2: f32[2, 3, 1, 12] = cat([getitem, cat_1], -1)
cat_3: f32[2, 37, 20] = cat([latents, ropes], -1)
permute: f32[2, 1, 3, 12] = permute(cat_2, [0, 2, 1, 3])
slice: f32[2, 1, 3, 8] = slice.Tensor(permute, -1, 0, 8)
view_1: f32[3, 14, 16] = view(up_weight, [3, 14, 16])
slice_1: f32[3, 8, 16] = slice.Tensor(view_1, 1, 0, 8)
einsum: f32[2, 1, 3, 16] = einsum(bthn,hnr->bthr, [slice, slice_1])
slice_2: f32[2, 1, 3, 4] = slice.Tensor(permute, -1, 8, 12)
cat_4: f32[2, 1, 3, 20] = cat([einsum, slice_2], -1)
full: i64[1] = full([1], 0, dtype=int64, device=cpu)
view_2: i64[2] = view(cat, [-1])
add_1: i64[2] = add.Tensor(full, view_2, alpha=1)
expand: i64[2] = expand(add_1, [2])
mla_decode: (f32[2, 1, 3, 16], f32[2, 1, 3]) = megacpp.mla_decode(cat_4, cat_3, expand, None, None, 0.28867513459481287, 16)
getitem_4: f32[2, 1, 3, 16] = mla_decode[0]
view_3: f32[3, 14, 16] = view(up_weight, [3, 14, 16])
slice_3: f32[3, 6, 16] = slice.Tensor(view_3, 1, 8, 14)
einsum_1: f32[2, 1, 3, 6] = einsum(bthr,hvr->bthv, [getitem_4, slice_3])
permute_1: f32[2, 3, 1, 6] = permute(einsum_1, [0, 2, 1, 3])
contiguous: f32[2, 3, 1, 6] = contiguous(permute_1)
transpose_1: f32[2, 1, 3, 6] = transpose.int(contiguous, 1, 2)
view_4: f32[2, 1, 18] = view(transpose_1, [2, 1, 18])
linear_1: f32[2, 1, 40] = linear(view_4, out_weight)
return [linear_1]""")


def test_graph_of_one_buffer():
    """The buffer's rows are the op's: nothing is put together."""
    node = op_of(assert_fires(NAME, *build(decodes.one_buffer, 2)), NAME)
    assert node.args[1].target is torch.ops.aten.index_copy.default


@pytest.mark.end_to_end
def test_keys_and_values_are_not_made():
    """Nothing of the rows' length has heads any more."""
    for body in SPELLINGS:
        nodes = assert_fires(NAME, *build(body, 1)).graph.graph.nodes
        shapes = [tuple(n.meta["val"].shape) for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        assert not [s for s in shapes if {CACHED, CACHED + 1} & set(s) and {HEADS, HEADS * NOPE} & set(s)], body


@sampled(9, "tokens", [1, 3])
@pytest.mark.parametrize("body", SPELLINGS, ids=shown)
def test_is_the_same_attention_in_float64(body, tokens):
    frames = check_graph(*build(body, tokens, torch.float64), tolerance=1e-12)
    assert frames.counts[NAME] == 1


@sampled(5, "tokens", [1, 3])
@pytest.mark.parametrize("name", ["one_projection", "two_projections", "by_matmul", "one_buffer"])
def test_in_half_precision(name, tokens):
    module = Step(getattr(decodes, name), torch.bfloat16)
    assert_half_precision(NAME, module, arguments(tokens, torch.bfloat16, batch=32))


@sampled(9, "tokens", [1, 2])
@pytest.mark.parametrize("body", SPELLINGS, ids=shown)
def test_one_graph_serves_all_lengths(body, tokens):
    module, args = build(body, tokens)
    for cache in args[1:3]:
        torch._dynamo.mark_dynamic(cache, 1)
    frames = check(module, args)
    assert frames.counts[NAME] == 1
    assert_serves(frames, module, *(arguments(tokens, cached=cached) for cached in (29, 50)))


def test_lengths_move_without_another_graph():
    """The position is data: one graph, and the rows that are seen follow it."""
    module, args = build(decodes.one_buffer, 2)
    moved = ((*args[:3], torch.tensor([position])) for position in (0, 7, CACHED - 2))
    assert_serves(check(module, args), module, *moved)


def test_what_was_decided_is_in_the_report():
    """By counts, as `latent_attention` decides."""
    frames = check_graph(*build(decodes.one_projection))
    (site,) = frames.analyses[0].outcome.sites
    assert site.note == str(choose_form(1, CACHED + 1, HEADS, NOPE, ROPE, VALUE, LATENT))
    report = Report()
    report.add(frames.analyses[0].frame, [site], [])
    assert site.note.split(":")[0] in str(report)
    assert Report.from_json(report.to_json()).sites[0].note == site.note


@sampled(3, "name", ["one_buffer", "two_projections", "length_of_each"])
def test_verified_against_the_plain_code(name):
    assert check_graph(*build(getattr(decodes, name), 2), Config(strict=True, verify="each")).counts[NAME] == 1


test_conditions = conditions(NAME, disabled=lambda: build(decodes.one_projection))


def test_autocast():
    module, args = build(decodes.one_projection)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frames = run(module, args)
        want = module(*args)
    assert frames.counts[NAME] == 1
    exact, got = module(*args), frames.results["output 0"]
    assert got.dtype == want.dtype
    assert relative_error(got, exact) <= 1.25 * relative_error(want, exact)


def missed(tag, module, args):
    """Why the pass does nothing."""
    (miss,) = (m for m in assert_refused(NAME, tag, module, args).misses if m.tag == tag)
    return miss.reason


def test_training():
    module, args = build(decodes.one_projection)
    assert_refused(NAME, "training", module.requires_grad_(True), args)
    with torch.no_grad():
        assert check_graph(module, args).counts[NAME] == 1


def test_a_step_of_many_tokens():
    """From some number of tokens on the expanded form takes fewer multiply-adds; the reason has both counts."""
    reason = missed("expanded-cheaper", *build(decodes.one_projection, 24))
    assert reason.startswith("expanded by counts: ") and "multiply-adds absorbed" in reason


def cache_of_keys(m, x, latents, ropes, position):
    """What transformers' DynamicCache holds of DeepSeek-V3: latents and ropes stand for keys and values of all heads."""
    k, v = expanded(m, *decodes.new_rows(m, x, positions := places(x, position)))
    return attended(m, x, positions, torch.cat((latents, k), -2), torch.cat((ropes, v), -2))


def static_cache_of_keys(m, x, latents, ropes, position):
    k, v = expanded(m, *decodes.new_rows(m, x, positions := places(x, position)))
    latents.index_copy_(2, positions, k)
    ropes.index_copy_(2, positions, v)
    return attended(m, x, positions, latents, ropes, attn_mask=torch.arange(latents.shape[2]) <= positions[:, None])


@sampled(3, "body", [cache_of_keys, static_cache_of_keys], ids=shown)
def test_a_cache_of_keys(body):
    module, (x, _, _, position) = build(body)
    held = (torch.randn(2, HEADS, CACHED, n) for n in (NOPE + ROPE, VALUE))
    static = body is static_cache_of_keys  # which is written to
    frames = assert_refused(NAME, "expanded-cache", module, (x, *held, position), dynamo=static)
    (miss,) = (m for m in frames.misses if m.tag == "expanded-cache")
    assert "megacpp_compile.use_latent_cache(model" in miss.reason


def keys_read_elsewhere(m, x, latents, ropes, position):
    k, v = expanded(m, *decodes.appended(m, x, latents, ropes, positions := places(x, position)))
    return attended(m, x, positions, k, v) * k.sum()


def weights_read_elsewhere(m, x, latents, ropes, position):
    k, v = expanded(m, *decodes.appended(m, x, latents, ropes, positions := places(x, position)))
    p = (decodes.queries(m, x, positions) @ k.mT).softmax(-1)
    return decodes.joined(p @ v) + p.sum()


def masked(seen, positions=places):
    """Attention of which `seen(rows' places, positions, latents, x)` is the mask."""

    def body(m, x, latents, ropes, position):
        at, rows = positions(x, position), torch.arange(latents.shape[1])
        return attended(m, x, at, *expanded(m, latents, ropes), attn_mask=seen(rows, at[:, None], latents, x))

    return body


def by_data(rows, at, latents, x):
    return (latents[:, None, :1, 0] + latents[:, None, :, 0] > 0)[:, None] | (x[:, None, :, :1] > 9)


# rows before a first one are hidden, too
window = masked(lambda rows, at, *_: (rows <= at) & (rows > at - 5))
mask_that_is_data = masked(by_data, lambda x, position: position)
# rows that are padding are hidden as well, by data
padded = masked(lambda rows, at, latents, _: (rows <= at) & (latents[..., 0] + 1 > 0)[:, None, None, :])
positions_that_are_data = masked(lambda rows, at, *_: rows <= at, lambda x, at: torch.cat((at, at + 2)))

REFUSED = {
    "escapes": {"keys_read_elsewhere": (keys_read_elsewhere, 1)},
    "mask": {"window": (window, 2), "positions": (positions_that_are_data, 2), "data": (mask_that_is_data, 2)},
}


@cases(REFUSED, 3)
def test_refused(tag, body):
    assert_refused(NAME, tag, *build(*body))


@sampled(5, ("body", "tokens"), [(padded, 1), (padded, 3), (window, 1), (mask_that_is_data, 1)],
                         ids=["padded-1", "padded-3", "window", "data"])
def test_rows_hidden_by_data(body, tokens):
    """What is the same for all queries is one more channel of the rows, beside the length where there is one."""
    node = op_of(assert_fires(NAME, *build(body, tokens)), NAME)
    assert node.args[1].meta["val"].shape[-1] == LATENT + ROPE + 1
    module, args = Step(body, torch.bfloat16), arguments(tokens, torch.bfloat16, batch=32)
    want = copy.deepcopy(module).double()(*(a.double() if a.is_floating_point() else a for a in args))
    eager = relative_error(module(*args), want)
    assert 0 < relative_error(run(module, args).results["output 0"], want) < 1.25 * eager


@sampled(3, "tokens", [1, 3])
def test_torch_s_causal_mask(tokens):
    """It counts rows from the first, whatever there is behind."""

    def body(m, x, latents, ropes, position):
        return attended(m, x, position, *expanded(m, latents, ropes), is_causal=True)

    assert_fires(NAME, *build(body, tokens))


def of(made):
    """Attention over what `made(m, keys, values, latents, ropes)` makes of keys and values."""

    def body(m, x, latents, ropes, position):
        return attended(m, x, position, *made(m, *expanded(m, latents, ropes), latents, ropes))

    return body


def heads_read_as_rows(m, k, v, latents, ropes):
    """A view without a transposition: other elements under the same shape."""
    b, s, _ = latents.shape
    k_nope, v = m.up(latents).view(b, HEADS, s, NOPE + VALUE).split([NOPE, VALUE], -1)
    return torch.cat((k_nope, ropes.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1), v


OTHERS = {
    # keys and values are made of different latents
    "keys_of_their_own": of(
        lambda m, k, v, latents, _: (k, m.up_v(latents.flip(1)).unflatten(-1, (HEADS, VALUE)).transpose(1, 2))
    ),
    "heads_in_another_order": of(lambda m, k, v, *_: (k.flip(1), v)),
    "heads_swapped_by_slices": of(lambda m, k, v, *_: (torch.cat((k[:, 1:], k[:, :1]), 1), v)),
    "rope_of_each_head": of(
        lambda m, k, v, _, ropes: (torch.cat((k[..., :NOPE], ropes.unsqueeze(1) * torch.ones(HEADS, 1, 1)), -1), v)
    ),
    "normed_keys": of(lambda m, k, v, *_: (torch.cat((F.rms_norm(k[..., :NOPE], (NOPE,)), k[..., NOPE:]), -1), v)),
    "heads_read_as_rows": of(heads_read_as_rows),
    "weights_read_elsewhere": weights_read_elsewhere,
    "with_dropout": lambda m, x, latents, ropes, position: attended(
        m, x, position, *expanded(m, latents, ropes), dropout_p=0.0001
    ) * 0,
}


@sampled(3, "case", OTHERS)
def test_what_is_another_attention_stays(case):
    assert not check_graph(*build(OTHERS[case])).counts[NAME]


def test_prefill_is_no_news():
    """As many queries as rows: nothing is absorbed, and nothing said."""

    def prefill(m, x, latents, ropes, position):
        positions = torch.arange(x.shape[1])
        return attended(m, x, positions, *expanded(m, *decodes.new_rows(m, x, positions)), is_causal=True)

    frames = check_graph(*build(prefill, 6))
    assert not frames.counts[NAME] and not frames.tags(NAME)


def test_other_modes():
    """Made under gradients that are recorded, attended without: trained weights are no reason then."""

    def outside(m, x, latents, ropes, position):
        k, v = expanded(m, latents, ropes)
        with torch.no_grad():
            return attended(m, x, position, k, v)

    module, args = build(outside)
    assert check_graph(module.requires_grad_(True), args).counts[NAME] == 1
