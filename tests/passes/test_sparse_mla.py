"""DeepSeek Sparse Attention written as a mask: found in every spelling, rewritten to attention over listed latents, and
refused for every reason there is."""

from __future__ import annotations

import re

import expecttest
import pytest
import torch
import torch.nn.functional as F

from benchmarks import models
from benchmarks.subjects import dsa
from megacpp_compile.config.options import Config
from megacpp_compile.passes import sparse_mla
from tests.corpus import sparse_attention as spelled
from tests.corpus.decodes import expanded, joined
from tests.corpus.sparse_attention import HEADS, SPELLINGS, TOKENS, TOPK, Sparse, arguments, build, lower, packed, rows
from tests.frames import check_graph, render

from .conditions import conditions, op_of, sampled, shown
from .contract import assert_dynamic, assert_fires, assert_half_precision

NAME = "sparse_mla"


def attended(q, k, v, mask):
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def scattered(listed, latent, dim=-1, at=None):
    """Whether a row is listed, [b, t, rows], or named by `at` along `dim`."""
    return torch.zeros(rows(listed, latent), dtype=torch.bool).scatter(dim, listed if at is None else at, True)


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch):
    """Sequences of a few rows go by their counts alone."""
    monkeypatch.setattr(sparse_mla, "LEAST_ROWS", 0)


@sampled(9, "body", SPELLINGS, ids=shown)
def test_is_the_same_attention_in_float64(body):
    """Outputs and the gradient of every weight."""
    frames = check_graph(*build(body, torch.float64), tolerance=1e-12)
    assert frames.counts[NAME] == 1, frames.misses
    assert not frames.again()
    shapes = [tuple(n.meta["val"].shape) for n in frames.graph.graph.nodes if torch.is_tensor(n.meta.get("val"))]
    assert not [s for s in shapes if s.count(TOKENS) > 1 and HEADS in s], "scores of all rows are made"


def test_graph():
    frames = assert_fires(NAME, *build(spelled.sdpa_by_bool), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
linear: f32[2, 40, 36] = linear(x, q_weight)
view: f32[2, 40, 3, 12] = view(linear, [2, 40, 3, 12])
transpose: f32[2, 3, 40, 12] = transpose.int(view, 1, 2)
linear_1: f32[2, 40, 20] = linear(x, down_weight)
split_with_sizes: (f32[2, 40, 16], f32[2, 40, 4]) = split_with_sizes(linear_1, [16, 4], -1)
getitem: f32[2, 40, 16] = split_with_sizes[0]
ones: b8[40, 40] = ones([40, 40], dtype=bool, device=cpu, pin_memory=False)
tril: b8[40, 40] = tril(ones)
bitwise_not: b8[40, 40] = bitwise_not(tril)
masked_fill: f32[2, 40, 40] = masked_fill.Scalar(index_scores, bitwise_not, -inf)
topk: (f32[2, 40, 4], i64[2, 40, 4]) = topk(masked_fill, 4)
getitem_1: i64[2, 40, 4] = topk[1]
rms_norm: f32[2, 40, 16] = rms_norm(getitem, [16], norm_weight)
slice: f32[2, 40, 4] = slice.Tensor(linear_1, 2, 16, 20)
cat: f32[2, 40, 20] = cat([rms_norm, slice], -1)
unsqueeze: f32[2, 40, 1, 20] = unsqueeze(cat, 2)
permute: f32[2, 40, 3, 12] = permute(transpose, [0, 2, 1, 3])
slice_1: f32[2, 40, 3, 8] = slice.Tensor(permute, -1, 0, 8)
view_1: f32[3, 14, 16] = view(up_weight, [3, 14, 16])
slice_2: f32[3, 8, 16] = slice.Tensor(view_1, 1, 0, 8)
einsum: f32[2, 40, 3, 16] = einsum(bthn,hnr->bthr, [slice_1, slice_2])
slice_3: f32[2, 40, 3, 4] = slice.Tensor(permute, -1, 8, 12)
cat_1: f32[2, 40, 3, 20] = cat([einsum, slice_3], -1)
expand: i64[2, 40, 4] = expand(getitem_1, [2, 40, 4])
to_copy: int32[2, 40, 4] = _to_copy(expand, dtype=int32)
unsqueeze_1: int32[2, 40, 1, 4] = unsqueeze(to_copy, 2)
sparse_mla: (f32[2, 40, 3, 16], f32[2, 40, 3]) = megacpp.sparse_mla(cat_1, unsqueeze, unsqueeze_1, None, 0.28867513459481287, 16, True, 0)
getitem_2: f32[2, 40, 3, 16] = sparse_mla[0]
view_2: f32[3, 14, 16] = view(up_weight, [3, 14, 16])
slice_4: f32[3, 6, 16] = slice.Tensor(view_2, 1, 8, 14)
einsum_1: f32[2, 40, 3, 6] = einsum(bthr,hvr->bthv, [getitem_2, slice_4])
permute_1: f32[2, 3, 40, 6] = permute(einsum_1, [0, 2, 1, 3])
contiguous: f32[2, 3, 40, 6] = contiguous(permute_1)
transpose_1: f32[2, 40, 3, 6] = transpose.int(contiguous, 1, 2)
clone: f32[2, 40, 3, 6] = clone(transpose_1, memory_format=contiguous_format)
view_3: f32[2, 40, 18] = view(clone, [2, 40, 18])
linear_2: f32[2, 40, 40] = linear(view_3, out_weight)
return [linear_2]""")


def test_conditions_that_are_data_are_read_at_the_listed_rows():
    """[b, t, k] of them; no causal mask is the op's where the code has none."""
    node = op_of(assert_fires(NAME, *build(packed)), NAME)
    assert node.args[6] is False
    gathered = [n for n in node.graph.nodes if n.target is torch.ops.aten.gather.default]
    assert [tuple(n.meta["val"].shape) for n in gathered] == [(2, TOKENS, TOPK)] * 2


def strictly_causal(m, q, latent, rope, listed):
    """A query does not see its own row: the first, which sees none, is left out."""
    seen = scattered(listed, latent) & lower(latent).roll(-1, -1)
    seen = seen & (torch.arange(TOKENS) < torch.arange(TOKENS)[:, None])
    return attended(q, *expanded(m, latent, rope), seen[:, None])[:, TOPK + 1 :]


def test_rows_up_to_the_one_before():
    module, (x, scores) = build(strictly_causal)
    assert op_of(assert_fires(NAME, module, (x, scores - 18 * torch.eye(TOKENS))), NAME).args[6:8] == (True, -1)


@pytest.mark.parametrize("body", [spelled.as_transformers, spelled.written_at_places], ids=shown)
def test_in_half_precision(body):
    frames = assert_half_precision(NAME, Sparse(body, torch.bfloat16), arguments(dtype=torch.bfloat16, batch=8))
    assert {n.meta["val"].dtype for n in op_of(frames, NAME).args[:2]} == {torch.bfloat16}


# under autocast rows and queries are in the dtype of eager's products
test_conditions = conditions(
    NAME, disabled=lambda: (*build(spelled.sdpa_by_bool), "down_norm_up"),
    autocast=lambda: build(spelled.as_transformers), inference=lambda: build(spelled.as_transformers),
)


@pytest.mark.parametrize(("body", "everything"), [(spelled.by_products, True), (packed, False)])
def test_one_graph_serves_all_lengths(body, everything):
    """Decided by the first length, and right for all; also where the scale is an input, too."""

    def make(length):
        x, scores = arguments(9 * length)  # not the width's 40
        if not everything:
            torch._dynamo.mark_dynamic(scores, 2)
        return x, scores

    assert_dynamic(NAME, Sparse(body), make, everything=everything)


def test_the_benchmark_s_model():
    """With low-rank queries and rotations before, which other passes take elsewhere."""
    size = dsa.QUICK[0]
    widths = (size.dim, size.heads, size.q_lora, size.kv_lora, size.nope, size.rope, size.v)
    module = models.SparseMLA(size.topk, *widths)
    frames = assert_fires(NAME, module, tuple(t.detach().float() for t in dsa.inputs(size, torch.device("cpu"))))
    assert not frames.misses, "rotations that meet latents are no near miss"


def test_a_list_made_without_gradients():
    class Chosen(Sparse):
        def forward(self, x, scores):
            q, (latent, rope) = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2), self.down(x).split([16, 4], -1)
            with torch.no_grad():
                listed = scores.masked_fill(~lower(x), float("-inf")).topk(TOPK, sorted=False).indices
            return self.out(self.body(self, q, self.norm(latent), rope, listed))

    assert_fires(NAME, Chosen(spelled.sdpa_by_bool), arguments())


def test_verified_against_the_plain_code():
    assert check_graph(*build(spelled.as_transformers), Config(strict=True, verify="each")).counts[NAME] == 1


def test_short_sequences():
    """All rows take fewer multiply-adds; the reason says from how many on the list does."""
    module, _ = build(spelled.sdpa_by_bool)
    (miss,) = missed(spelled.sdpa_by_bool, 6)
    assert miss.tag == "dense-cheaper" and "multiply-adds over listed latents" in miss.reason
    least = int(re.search(r"from (\d+) rows", miss.reason)[1])
    assert 6 < least < TOKENS
    assert [check_graph(module, arguments(n)).counts[NAME] for n in (least - 1, least)] == [0, 1]


def test_few_rows_are_left_alone(monkeypatch):
    """Whatever the counts say: 1024 are the least."""
    monkeypatch.setattr(sparse_mla, "LEAST_ROWS", TOKENS + 1)
    (miss,) = missed(spelled.sdpa_by_bool)
    assert miss.tag == "dense-cheaper" and f"all rows of {TOKENS}" in miss.reason
    assert f"pays from {TOKENS + 1} rows on" in miss.reason
    monkeypatch.setattr(sparse_mla, "LEAST_ROWS", TOKENS)
    assert check_graph(*build(spelled.sdpa_by_bool)).counts[NAME] == 1


def missed(body, tokens=TOKENS):
    outcome = check_graph(*build(body, tokens=tokens))
    assert not outcome.counts[NAME]
    return [miss for miss in outcome.misses if miss.pass_name == NAME]


def listed_as(mask):
    """Attention whose mask is what `mask(listed, latent)` makes."""

    def body(m, q, latent, rope, listed):
        return attended(q, *expanded(m, latent, rope), mask(listed, latent)[:, None])

    return body


def list_for_each_head(m, q, latent, rope, listed):
    k, v = expanded(m, latent, rope)
    listed = (q.detach() @ k.detach().mT).topk(TOPK).indices
    return attended(q, k, v, torch.zeros(q.shape[:3] + (TOKENS,), dtype=torch.bool).scatter(-1, listed, True))


def list_and_list(listed, latent):
    return scattered(listed, latent) & scattered(latent[:, None, :, 0].expand(rows(listed, latent)).topk(9)[1], latent)


def keys_of_their_own(m, q, latent, rope, listed):
    k, v = expanded(m, latent, rope)
    return attended(q, F.rms_norm(k, (k.shape[-1],)), v, scattered(listed, latent)[:, None])


def written(value, others, bias=0.0):
    """A mask that is `value` at the rows of the list."""
    return lambda listed, latent: torch.full(rows(listed, latent), others).scatter(-1, listed, value) + bias


REFUSED = {
    "rows_that_may_repeat": (
        lambda *args: spelled.written_at_places(*args[:4], args[4] // 2), "mask",
        "names no row twice: take the list from topk",
    ),
    "rows_of_two_lists": (
        lambda *args: spelled.one_hot(*args[:4], torch.cat((args[4][..., :2], args[4][..., 1:3]), -1)), "mask", "twice",
    ),
    "list_of_fewer_queries": (
        listed_as(lambda listed, latent: scattered(listed, latent, at=listed[:, 1:])),
        "mask", "has as many sequences and queries as the mask",
    ),
    "bias_beside_the_list": (
        listed_as(lambda listed, latent: written(0.0, float("-inf"))(listed, latent) + latent[:, None, :, 0]),
        "mask", "give it as a mask of bool",
    ),
    "list_that_is_hidden": (
        listed_as(lambda listed, latent: torch.ones(rows(listed, latent), dtype=torch.bool).scatter(-1, listed, False)),
        "mask", "0 at the rows of the",
    ),
    # what is not listed counts less, and counts
    "list_with_a_weight": (listed_as(written(0.0, -3.0)), "mask", "-3 at the others"),
    "list_for_each_head": (list_for_each_head, "mask", "each head has a list of its own"),
    "list_and_list": (listed_as(list_and_list), "mask", "more than one list"),
    "keys_of_their_own": (keys_of_their_own, "latents", "made of one latent a row"),
}


@sampled(5, "case", REFUSED)
def test_refused(case):
    body, tag, reason = REFUSED[case]
    (miss,) = missed(body)
    assert miss.tag == tag and reason in miss.reason, miss.reason


OTHERS = {
    "causal": lambda m, q, latent, rope, listed: attended(q, *expanded(m, latent, rope), lower(latent)),
    "list_of_some_queries": listed_as(
        lambda listed, latent: lower(latent).expand(rows(listed, latent)) | scattered(listed, latent, at=listed[:, 1:])
    ),
    # scattered along the queries: each row names who sees it
    "queries_of_a_row": listed_as(lambda listed, latent: scattered(listed, latent, 1, listed.mT) | lower(latent)),
    "listed_or_causal": listed_as(lambda listed, latent: scattered(listed, latent) | lower(latent)),
}


@sampled(3, "case", OTHERS)
def test_another_mask_is_no_news(case):
    assert not missed(OTHERS[case])
