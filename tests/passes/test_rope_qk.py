"""RoPE of ordinary attention, queries and keys at once: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch

from tests.corpus.near_misses import NEAR_MISSES, SEQ, Heads, rotated_heads, turn
from tests.corpus.spellings import PlainGQA, sdpa, tables
from tests.frames import Function, check, largest_error, passed, render, run, train

from .contract import (
    assert_autocast,
    assert_autocast_inside,
    assert_disabled,
    assert_dynamic,
    assert_fires,
    assert_refused,
    assert_refused_in_a_graph,
)
from .not_rotations import NOT_ROTATIONS

NAME = "rope_qk"


def build(body, dtype=torch.float32, kind=Heads):
    """`body(q, k, cos, sin)` within an attention block, and its arguments."""
    torch.manual_seed(0)
    module = kind(body).to(dtype)
    x = torch.randn(2, SEQ, 40).to(dtype).requires_grad_()
    return module, (x, *tables("half", SEQ, Heads.width, dtype))


# --- fires


def test_graph():
    frames = assert_fires(NAME, *build(rotated_heads))
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
linear: f32[2, 5, 56] = linear(x, q_weight)
view: f32[2, 5, 4, 14] = view(linear, [2, 5, 4, 14])
linear_1: f32[2, 5, 28] = linear(x, k_weight)
view_1: f32[2, 5, 2, 14] = view(linear_1, [2, 5, 2, 14])
unsqueeze: f32[1, 5, 7] = unsqueeze(cos, 0)
unsqueeze_1: f32[1, 5, 1, 7] = unsqueeze(unsqueeze, 2)
unsqueeze_2: f32[1, 5, 7] = unsqueeze(sin, 0)
unsqueeze_3: f32[1, 5, 1, 7] = unsqueeze(unsqueeze_2, 2)
rope_qk: (f32[2, 5, 4, 14], f32[2, 5, 2, 14]) = megacpp.rope_qk(view, view_1, unsqueeze_1, unsqueeze_3, 0, False, False, False, False, float32)
getitem: f32[2, 5, 4, 14] = rope_qk[0]
permute: f32[2, 4, 5, 14] = permute(getitem, [0, 2, 1, 3])
getitem_1: f32[2, 5, 2, 14] = rope_qk[1]
permute_1: f32[2, 2, 5, 14] = permute(getitem_1, [0, 2, 1, 3])
linear_2: f32[2, 5, 28] = linear(x, v_weight)
view_2: f32[2, 5, 2, 14] = view(linear_2, [2, 5, 2, 14])
transpose: f32[2, 2, 5, 14] = transpose.int(view_2, 1, 2)
scaled_dot_product_attention: f32[2, 4, 5, 14] = scaled_dot_product_attention(permute, permute_1, transpose, None, 0.0, True, enable_gqa=True)
transpose_1: f32[2, 5, 4, 14] = transpose.int(scaled_dot_product_attention, 1, 2)
clone: f32[2, 5, 4, 14] = clone(transpose_1, memory_format=contiguous_format)
view_3: f32[2, 5, 56] = view(clone, [2, 5, 56])
linear_3: f32[2, 5, 40] = linear(view_3, o_weight)
return [linear_3]""",
    )


def leading_lanes(q, k, cos, sin):
    def partly(t):
        return torch.cat((turn(t[..., :6], cos[:, :3], sin[:, :3]), t[..., 6:]), dim=-1)

    return partly(q), partly(k)


def trailing_lanes(q, k, cos, sin):
    def partly(t):
        return torch.cat((t[..., :8], turn(t[..., 8:], cos[:, :3], sin[:, :3])), dim=-1)

    return partly(q), partly(k)


def neighbours(q, k, cos, sin):
    def rope(t):
        a, b = t[..., ::2], t[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)

    return rope(q), rope(k)


def backwards(q, k, cos, sin):
    return turn(q, cos, -sin), turn(k, cos, -sin)


def scaled_queries(q, k, cos, sin):
    return turn(q, cos, sin) * 0.3, turn(k, cos, sin)


def normed_behind(q, k, cos, sin):
    """As Hunyuan's, whose norms follow the rotation, and one of torch's own."""
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    q = q.new_full((Heads.width,), 1.5) * (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-5))
    return q, torch.nn.functional.rms_norm(k, (Heads.width,))


def scaled_before(q, k, cos, sin):
    """As Falcon-H1's keys and Muse's queries."""
    return turn(q / 3.7, cos, sin), turn(0.3 * k, cos, sin)


def shifted_before(q, k, cos, sin):
    """A bias added by hand, as an adapter is."""
    return turn(q + q.new_full((Heads.width,), 0.1), cos, sin), turn(k + 2.0 * k.tanh(), cos, sin)


def in_regions_of_their_own(q, k, cos, sin):
    """As rotary-embedding-torch's, which switches autocast off around each rotation and reads views from outside."""

    def rope(t):
        with torch.autocast("cpu", enabled=False):
            return turn(t.float() if t.dtype == torch.bfloat16 else t, cos, sin).to(t.dtype)

    return rope(q), rope(k)


def multiplied_behind(q, k, cos, sin):
    """Both halves by the attention's temperature, as where YaRN's is no part of the tables."""

    def rope(t):
        a, b = t.chunk(2, dim=-1)
        return torch.cat(((a * cos - b * sin) * 1.3, (b * cos + a * sin) * 1.3), dim=-1)

    return rope(q), rope(k)


def added_into_zeros(q, k, cos, sin):
    def rope(t):
        (a, b), n = t.chunk(2, dim=-1), t.shape[-1] // 2
        out = torch.zeros_like(t)
        out[..., :n] += a * cos
        out[..., :n] -= b * sin
        out[..., n:] += b * cos
        out[..., n:] += a * sin
        return out

    return rope(q), rope(k)


def by_matrices(q, k, cos, sin):
    """As FLUX's: a matrix for each pair."""
    m = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))

    def rope(t):
        t = t.unflatten(-1, (-1, 1, 2))
        return (m[..., 0] * t[..., 0] + m[..., 1] * t[..., 1]).flatten(-2)

    return rope(q), rope(k)


def by_rows_of_matrices(q, k, cos, sin):
    """As Granite's in foundation-model-stack."""
    m = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
    return tuple(m.mul(t.unflatten(-1, (-1, 2)).unsqueeze(-2)).sum(-1).flatten(-2) for t in (q, k))


def tables_of_rows_and_columns(q, k, cos, sin):
    cos, sin = (torch.cat((t[:, :3], t[:1, 3:].expand_as(t[:, 3:])), dim=-1) for t in (cos, sin))
    cos, sin = (torch.cat((t[:, :3], t[:, 3:], t[:, :3], t[:, 3:]), dim=-1) for t in (cos, sin))
    return tuple(t * cos + torch.cat((-t[..., 7:], t[..., :7]), dim=-1) * sin for t in (q, k))


FORMS = [
    rotated_heads, leading_lanes, trailing_lanes, neighbours, backwards, scaled_queries, scaled_before, shifted_before,
    normed_behind, in_regions_of_their_own, multiplied_behind, added_into_zeros, by_matrices, by_rows_of_matrices,
    tables_of_rows_and_columns,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("body", FORMS, ids=lambda f: f.__name__)
def test_fires(body, dtype):
    assert_fires(NAME, *build(body, dtype))


def behind_a_cache(q, k, cos, sin):
    """Decoding, or a prompt in chunks: the keys join those that came before."""
    past = torch.ones_like(k[:, :, :3])
    return turn(q, cos, sin), torch.cat((past, turn(k, cos, sin)), dim=2)


def beside_pooled_keys(q, k, cos, sin):
    """As DeepSeek-V4's: keys of whole windows, with positions of their own, stand beside those of the tokens."""
    pooled = k[:, :, :4].unflatten(2, (2, 2)).mean(3)
    return turn(q, cos, sin), torch.cat((turn(pooled, cos[:4:2], sin[:4:2]), turn(k, cos, sin)), dim=2)


class OfKeys(Heads):
    """Attention to as many rows as there are keys, whose values they are."""

    def forward(self, x, cos, sin):
        q, k = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k))
        q, k = self.body(q, k, cos, sin)
        weights = (q @ k.repeat_interleave(2, 1).mT).softmax(-1)
        return self.o((weights @ k.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("body", [behind_a_cache, beside_pooled_keys], ids=lambda f: f.__name__)
def test_keys_among_others(body):
    frames = assert_fires(NAME, *build(body, kind=OfKeys))
    assert not frames.misses


class Rounded(Heads):
    """Heads behind norms that compute in float32 and round, as Gemma's do."""

    def __init__(self, body):
        super().__init__(lambda q, k, cos, sin: body(self.norm(q), self.norm(k), cos, sin))

    def norm(self, t):
        wide = t.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(t)


@pytest.mark.parametrize("body", [rotated_heads, trailing_lanes], ids=lambda f: f.__name__)
def test_fires_in_bfloat16_behind_a_norm_that_rounds(body):
    """What turns is the rounded value; as near to float32's results as eager's bfloat16 is."""
    module, args = build(body, torch.bfloat16, Rounded)
    wide, _ = build(body, torch.float32, Rounded)
    wide.load_state_dict(module.state_dict())
    exact = train(wide, wide, (args[0].detach().float().requires_grad_(), *(t.float() for t in args[1:])))
    want, frames = train(module, module, args), run(module, args)
    assert frames.counts[NAME] == 1, frames.misses
    ours, eagers = (
        largest_error({n: t.float() for n, t in results.items()}, exact)[0] for results in (frames.results, want)
    )
    assert ours <= 2 * eagers, f"{ours:.1e} from float32, eager is {eagers:.1e} from it"


@pytest.mark.parametrize("repeat", ["expand", "interleave", "gqa"])
def test_one_key_head(repeat):
    """Multi-query attention: the one key head is rotated before it is repeated."""

    class Multi(Heads):
        kv_heads = 1

        def forward(self, x, cos, sin):
            q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
            q, k = self.body(q, k, cos, sin)
            if repeat == "expand":
                many = (len(x), 1, self.heads, *k.shape[2:])
                k, v = (t[:, :, None].expand(many).reshape(len(x), self.heads, *k.shape[2:]) for t in (k, v))
            elif repeat == "interleave":
                k, v = (t.repeat_interleave(self.heads, 1) for t in (k, v))
            return self.o(sdpa(q, k, v).transpose(1, 2).flatten(2))

    assert_fires(NAME, *build(rotated_heads, kind=Multi))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_one_key_head_without_a_dimension_for_it(layout):
    """Multi-query attention whose key head every query head meets in an einsum (PaLM)."""

    class Lone(Heads):
        kv_heads = 1

        def forward(self, x, cos, sin):
            q, k, v = self.q(x).unflatten(-1, (-1, self.width)), self.k(x), self.v(x)
            if layout == "bhsd":
                q, k = turn(q.transpose(1, 2), cos, sin), turn(k, cos, sin)
            else:
                q, k = turn(q, cos[:, None], sin[:, None]).transpose(1, 2), turn(k, cos, sin)
            weights = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
            return self.o(torch.einsum("bhij,bjd->bihd", weights, v).flatten(2))

    assert_fires(NAME, *build(None, kind=Lone))


@pytest.mark.parametrize(
    "rows", [slice(-3, None), slice(None, None, 2), torch.tensor([0, 2, 3])], ids=["window", "stride", "list"]
)
def test_some_of_the_keys_are_read(rows):
    class Some(Heads):
        def forward(self, x, cos, sin):
            q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
            q, k = self.body(q, k, cos, sin)
            k, v = (t[:, :, rows].repeat_interleave(2, 1) for t in (k, v))
            return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    frames = assert_fires(NAME, *build(rotated_heads, kind=Some))
    assert not frames.misses


def windows(k):
    """Each block of two tokens with the block before it, padded in front (local attention)."""
    padded = torch.nn.functional.pad(k.unflatten(2, (-1, 2)), (0, 0, 0, 0, 1, 0))
    return padded.unfold(2, 2, 1).movedim(-1, 3).flatten(3, 4)


def gathered(k):
    """Two blocks of each block's own choice (native sparse attention)."""
    blocks = k.unflatten(2, (-1, 2))
    n = blocks.shape[2]
    chosen = torch.stack((torch.arange(n), torch.zeros(n, dtype=torch.long)), -1).flatten()
    chosen = chosen[:, None, None].expand(*k.shape[:2], -1, *blocks.shape[3:])
    return blocks.gather(2, chosen).unflatten(2, (-1, 2)).flatten(3, 4)


@pytest.mark.parametrize("rows", [windows, gathered], ids=lambda f: f.__name__)
def test_keys_in_blocks(rows):
    class Blocks(AsManyKeys):
        def forward(self, x, cos, sin):
            x, cos, sin = x[:, :4], cos[:4], sin[:4]
            q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
            q, k = self.body(q, k, cos, sin)
            scores = torch.einsum("bhnqd,bhnkd->bhnqk", q.unflatten(2, (-1, 2)), rows(k)).softmax(-1)
            return self.o(torch.einsum("bhnqk,bhnkd->bhnqd", scores, rows(v)).flatten(2, 3).transpose(1, 2).flatten(2))

    frames = assert_fires(NAME, *build(rotated_heads, kind=Blocks))
    assert not frames.misses


def test_tables_in_parameters_that_nothing_trains():
    class Kept(Heads):
        def __init__(self, body):
            super().__init__(body)
            for name, t in zip(("cos", "sin"), tables("half", SEQ + 2, Heads.width), strict=True):
                setattr(self, name, torch.nn.Parameter(t, requires_grad=False))

        def forward(self, x, *_):
            return super().forward(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])

    module, args = build(rotated_heads, kind=Kept)
    assert_fires(NAME, module, args[:1])
    assert_fires(NAME, module.requires_grad_(False), args[:1])
    module.requires_grad_(True)
    assert_refused(NAME, "trained-tables", module, args[:1])
    with torch.no_grad():
        assert_fires(NAME, module, args[:1])


class Mixed(Heads):
    """Angles of two coordinates by frequencies that each head has of its own: RoPE-Mixed (arXiv:2403.13298)."""

    kv_heads = Heads.heads

    def __init__(self, body):
        super().__init__(body)
        self.frequencies = torch.nn.Parameter(torch.randn(2, self.heads * self.width // 2))

    def forward(self, x, *_):
        at = torch.stack((torch.arange(x.shape[1]) // 2, torch.arange(x.shape[1]) % 2), -1).float()
        angles = (at @ self.frequencies).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        return super().forward(x, angles.cos(), angles.sin())


def test_trained_frequencies_are_named():
    module, args = build(rotated_heads, kind=Mixed)
    assert_refused(NAME, "trained-tables", module, args[:1])
    with torch.no_grad():
        assert_fires(NAME, module, args[:1])
    module.frequencies.requires_grad_(False)
    assert_fires(NAME, module, args[:1])


def test_angles_of_the_text_are_no_tables():
    """Of a projection, whose weight goes into all that follows, or its angles alone."""

    class Angles(Heads):
        def __init__(self, body):
            super().__init__(body)
            self.angle = torch.nn.Linear(40, self.width // 2, bias=False)

        def forward(self, x, *_):
            angles = self.angle(x).cumsum(1)[:, None]
            return super().forward(x, angles.cos(), angles.sin())

    frames = run(*build(rotated_heads, kind=Angles))
    assert not frames.fired and "trained-tables" not in frames.tags(NAME)


def test_a_part_of_a_head_for_each_coordinate_has_one_reason():
    """Each turned by itself, in halves of its own: Gemma 4's vision tower. The parts are no heads."""

    def by_coordinate(t, cos, sin):
        parts = zip(t.split((6, 8), -1), (cos[:, :3], cos[:, 3:]), (sin[:, :3], sin[:, 3:]), strict=True)
        return torch.cat([turn(*part) for part in parts], -1)

    module, args = build(lambda q, k, cos, sin: (by_coordinate(q, cos, sin), by_coordinate(k, cos, sin)))
    frames = run(module, args)
    assert not frames.fired and [m.tag for m in frames.misses] == ["pairing", "pairing"], frames.misses


def test_keys_of_other_positions_are_no_near_miss():
    def pooled_keys(q, k, cos, sin):
        return turn(q, cos, sin), turn(k[:, :, :4].unflatten(2, (2, 2)).mean(3), cos[:4:2], sin[:4:2])

    frames = run(*build(pooled_keys, kind=OfKeys))
    assert not frames.fired and not frames.misses


def test_an_output_that_is_turned_back_is_no_near_miss():
    """As DeepSeek-V4's, whose values are its rotated keys; groups of heads have an output projection each."""

    class TurnedBack(Heads):
        def forward(self, x, cos, sin):
            q, k = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k))
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            out = turn(sdpa(q, k, k), cos, -sin).transpose(1, 2).reshape(-1, 2, 2 * self.width)
            weights = self.o.weight.view(2, -1, 2 * self.width).transpose(1, 2)
            return torch.bmm(out.transpose(0, 1), weights).transpose(0, 1).reshape(*x.shape[:2], -1)

    frames = assert_fires(NAME, *build(None, kind=TurnedBack))
    assert not frames.misses


def test_two_layers():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = PlainGQA(), PlainGQA()

        def forward(self, x, *tables):
            return self.second(self.first(x, *tables), *tables)

    module = Two()
    assert_fires(NAME, module, module.first.example_inputs(), count=2)


@pytest.mark.parametrize("qk_norm", ["no_upcast", "functional_rms_norm", None])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_normed_queries_and_keys(layout, qk_norm):
    """The norm's output is a tensor of its own, whose memory need not be in the order of its dimensions."""
    block = PlainGQA(layout=layout, qk_norm=qk_norm)
    assert_fires(NAME, block, block.example_inputs())


class AsManyKeys(Heads):
    """As many key heads as query heads."""

    kv_heads = Heads.heads


def tables_of_every_head(cos, sin):
    return (torch.stack([t.roll(h, 0) for h in range(Heads.heads)]) for t in (cos, sin))


def test_tables_of_every_head():
    def body(q, k, cos, sin):
        return rotated_heads(q, k, *tables_of_every_head(cos, sin))

    assert_fires(NAME, *build(body, kind=AsManyKeys))


# --- stays out


def test_disabled():
    block = PlainGQA()
    assert_disabled(NAME, block, block.example_inputs())


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
def test_dynamic_shapes(everything):
    block = PlainGQA()
    assert_dynamic(NAME, block, lambda length: block.example_inputs(seq=length), everything=everything)


def test_autocast_around_the_call():
    block = PlainGQA(rope_spelling="complex_view_flatten", table_source="buffer")
    assert_autocast(NAME, block, block.example_inputs())


def test_autocast_inside_the_frame():
    block = PlainGQA(table_source="buffer")
    assert_autocast_inside(NAME, block, block.example_inputs())


def test_a_region_without_autocast_in_one_with():
    assert_autocast(NAME, *build(in_regions_of_their_own))


def test_tables_that_each_layer_makes_anew():
    """Equal tables are one, and the first: the op of the first layer waits for nothing of the second."""

    class Frequencies(Heads):
        def forward(self, x, *_):
            angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), 0.3 ** torch.arange(self.width // 2))
            with torch.autocast("cpu", enabled=False):
                cos, sin = angles.cos(), angles.sin()
            return super().forward(x, cos, sin)

    layers = torch.nn.Sequential(*(build(in_regions_of_their_own, kind=Frequencies)[0] for _ in range(2)))
    frames = assert_fires(NAME, layers, build(None)[1][:1], count=2)
    lines = render(frames.graph).splitlines()
    first, _ = (i for i, line in enumerate(lines) if "megacpp.rope_qk" in line)
    assert sum(" = linear(" in line for line in lines[:first]) == 2, "the queries and keys of the first layer"


class Scores(Heads):
    """Only the score product, which does not mind how many lanes there are."""

    def forward(self, x, cos, sin):
        q, k = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k))
        q, k = self.body(q, k, cos, sin)
        return q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)


@pytest.mark.parametrize("tag", NOT_ROTATIONS)
def test_refuses_what_is_no_rotation(tag):
    def body(q, k, cos, sin):
        return NOT_ROTATIONS[tag](q, cos, sin), NOT_ROTATIONS[tag](k, cos, sin)

    assert_refused_in_a_graph(NAME, tag, *build(body, kind=Scores))


def rotated_in_the_middle(q, k, cos, sin):
    def partly(t):
        return torch.cat((t[..., :4], turn(t[..., 4:10], cos[:, :3], sin[:, :3]), t[..., 10:]), dim=-1)

    return partly(q), partly(k)


def product_read_elsewhere(q, k, cos, sin):
    a, b = q.chunk(2, dim=-1)
    product = a * cos
    turned = torch.cat((product - b * sin, b * cos + a * sin), dim=-1)
    return turned + product.sum(), turn(k, cos, sin)


def keys_of_one_head_repeated_first(q, k, cos, sin):
    k = k[:, :1].expand(-1, 2, -1, -1)
    return turn(q, cos, sin), turn(k, cos, sin)


def queries_read_in_another_region_first(q, k, cos, sin):
    q = turn(q, cos, sin)
    with torch.no_grad():
        scale = q.abs().amax()
    return q, turn(k / scale, cos, sin)


def read_by_no_scores(q, k, cos, sin):
    return turn(q, cos, sin).tanh(), k


def scaled_by_position(q, k, cos, sin):
    """xPos: what queries are multiplied by, keys are divided by."""
    scale = 0.9 ** torch.arange(len(cos), dtype=q.dtype)[:, None]
    cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    half = lambda t: torch.cat((-t[..., 7:], t[..., :7]), dim=-1)  # noqa: E731
    return q * cos * scale + half(q) * sin * scale, k * cos / scale + half(k) * sin / scale


def tables_for_each_sequence(q, k, cos, sin):
    """Equal numbers, but nothing says so."""
    return turn(q, *(t.expand(len(q), 1, -1, -1).contiguous() for t in (cos, sin))), turn(k, cos, sin)


def matrices_of_a_buffer(q, k, cos, sin):
    m = torch.cat((cos, -sin, sin, cos), dim=-1)[:, : 4 * 7].clamp(-1, 1).unflatten(-1, (7, 2, 2))
    return tuple(m.mul(t.unflatten(-1, (-1, 2)).unsqueeze(-2)).sum(-1).flatten(-2) for t in (q, k))


REFUSED = [
    ("two-tables", scaled_by_position),
    ("tables", tables_for_each_sequence),
    ("matrices", matrices_of_a_buffer),
    ("no-scores", read_by_no_scores),
    ("escapes", product_read_elsewhere),
    ("broadcast", keys_of_one_head_repeated_first),
    ("region", queries_read_in_another_region_first),
]


@pytest.mark.parametrize(("tag", "body"), REFUSED, ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_refuses(tag, body):
    assert_refused_in_a_graph(NAME, tag, *build(body))


def test_leaves_lanes_alone_that_rotate_in_the_middle():
    # A value with unrotated lanes is taken for MLA's, so it is that pass that says why.
    frames = check(*build(rotated_in_the_middle))
    assert not frames.fired
    assert "rotated-middle" in frames.tags(NAME)


REFUSED_NEAR_MISSES = [
    ("tables", "tables_differ_between_query_and_key"),
    ("tables", "sines_differ_between_query_and_key"),
    ("layout", "pairings_differ_between_query_and_key"),
    ("signs", "query_halves_change_places"),
]


@pytest.mark.parametrize(("tag", "name"), REFUSED_NEAR_MISSES)
def test_refuses_near_miss(tag, name):
    (near_miss,) = (n for n in NEAR_MISSES if n.name == name)
    assert_refused_in_a_graph(NAME, tag, *near_miss.build())


def keys_scaled(q, k, cos, sin):
    a, b = k.chunk(2, dim=-1)
    return turn(q, cos, sin), torch.cat(((a * cos - b * sin) * 1.25, (b * cos + a * sin) * 1.25), dim=-1)


def queries_scaled(q, k, cos, sin):
    """In place, in front of a view of whole heads: torchtune's Gemma-2."""
    q = turn(q, cos, sin)
    q.mul_(0.3)
    return q.unflatten(-1, (2, -1)).flatten(-2), turn(k, cos, sin)


def both_scaled(q, k, cos, sin):
    (q, k), (_, b) = (keys_scaled(*pair, cos, sin) for pair in ((k, q), (q, k)))
    return k, 0.4 * b.unflatten(-1, (-1, 2)).flatten(-2)


def keys_scaled_and_turned_back(q, k, cos, sin):
    return turn(q, cos, sin), keys_scaled(q, k, cos, -sin)[1]


def keys_with_one_scaled_table(q, k, cos, sin):
    a, b = k.chunk(2, dim=-1)
    return turn(q, cos, sin), torch.cat((a * cos * 1.25 - b * sin, b * cos * 1.25 + a * sin), dim=-1)


def keys_turned_back(q, k, cos, sin):
    return turn(q, cos, sin), turn(k, cos, -sin)


def keys_with_axes_in_another_order(q, k, cos, sin):
    rolled = [torch.cat((t[:, 3:], t[:, :3]), -1) for t in (cos, sin)]
    return turn(q, cos, sin), turn(k, *rolled)


def keys_a_position_ahead(q, k, cos, sin):
    ahead = [torch.cat((t[1:], t[:1])) for t in (cos, sin)]
    return turn(q, cos, sin), turn(k, *ahead)


def different_widths(q, k, cos, sin):
    def partly(t, n):
        return torch.cat((turn(t[..., :n], cos[:, : n // 2], sin[:, : n // 2]), t[..., n:]), dim=-1)

    return partly(q, 6), partly(k, 8)


def test_refuses_different_numbers_of_rotated_lanes():
    frames = check(*build(different_widths))
    assert not frames.counts[NAME]
    assert frames.tags(NAME) & {"layout", "tables"}


class OneTableRowEach(torch.nn.Module):
    """Queries as (B, H, S, D), keys as (S, B, H, D): one table, met in different dimensions."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(40, 4 * Heads.width, bias=False) for _ in range(2))

    def forward(self, x, cos, sin):
        q, k = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k))
        q = turn(q, cos, sin)
        k = turn(k.permute(2, 0, 1, 3), cos[:, None, None], sin[:, None, None]).permute(1, 2, 0, 3)
        return sdpa(q, k, k)


def test_queries_and_keys_in_different_orders():
    torch.manual_seed(0)
    x = torch.randn(2, SEQ, 40).requires_grad_()
    check(OneTableRowEach(), (x, *tables("half", SEQ, Heads.width)))


def test_nothing_of_mla():
    block = PlainGQA()
    assert run(block, block.example_inputs()).fired == {NAME: 1}


def test_refuses_one_key_turned_for_every_head():
    def body(q, k, cos, sin):
        return rotated_heads(q, k[:, :1], *tables_of_every_head(cos, sin))

    assert_refused_in_a_graph(NAME, "broadcast", *build(body, kind=AsManyKeys))


KEYS_TURNED_OTHERWISE = {
    keys_scaled_and_turned_back: "tables",
    keys_with_one_scaled_table: "signs",
    keys_turned_back: "tables",
    keys_with_axes_in_another_order: "table-order",
    keys_a_position_ahead: "tables",
}


@pytest.mark.parametrize("body", KEYS_TURNED_OTHERWISE, ids=lambda f: f.__name__)
def test_refuses_keys_turned_otherwise(body):
    assert_refused_in_a_graph(NAME, KEYS_TURNED_OTHERWISE[body], *build(body, kind=AsManyKeys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("body", [keys_scaled, queries_scaled, both_scaled], ids=lambda f: f.__name__)
def test_what_is_scaled_alone(body, dtype):
    assert_fires(NAME, *build(body, dtype, kind=AsManyKeys))


def test_keys_with_a_dimension_of_one():
    """A view behind the rotation, as torchtune has it in front of what repeats keys, is no part of it."""

    def body(q, k, cos, sin):
        k = turn(k, cos, sin)
        return turn(q, cos, sin), k.view(*k.shape[:2], 1, *k.shape[2:]).expand(-1, -1, 1, -1, -1).reshape(k.shape)

    assert_fires(NAME, *build(body, kind=AsManyKeys))


class OneRow(Heads):
    """Queries of heads, and a key row that all of them share, turned by one complex table that each reads in another
    shape: the scores of absorbed latent attention."""

    def forward(self, x, cos, sin):
        q, k = self.q(x).unflatten(-1, (-1, self.width)), self.k(x)[..., : self.width]
        table = torch.complex(cos, sin)
        q, k = self.body(q, table[:, None]), self.body(k, table[None])
        scores = torch.einsum("bthr,bsr->bhts", q, k).softmax(-1)
        return torch.einsum("bhts,bsr->bthr", scores, k).flatten(-2)


def complex_turn(t, table):
    return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * table).flatten(-2)


def test_a_complex_table_in_two_shapes():
    frames = assert_fires(NAME, *build(complex_turn, kind=OneRow))
    assert frames.counts[NAME] == 1


def test_refuses_complex_tables_of_other_entries():
    def body(t, table):
        return complex_turn(t, table if t.dim() == 4 else table.roll(1, -1))

    assert_refused_in_a_graph(NAME, "tables", *build(body, kind=OneRow))


# --- where the results lie


class Loose(Heads):
    """Rotated queries and keys leave the frame as `body` hands them out."""

    def forward(self, x, cos, sin):
        q, k = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k))
        return self.body(q, k, cos, sin)


def scores(q, k):
    return q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)


def only_read_by_a_product(q, k, cos, sin):
    return (scores(turn(q, cos, sin), turn(k, cos, sin)),)


def both_handed_out(q, k, cos, sin):
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    return scores(q, k), q, k


def queries_handed_out(q, k, cos, sin):
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    return scores(q, k), q


def keys_handed_out(q, k, cos, sin):
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    return scores(q, k), k


def handed_out_scaled(q, k, cos, sin):
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    return scores(q, k), q * 2, k + 1


def handed_out_as_views(q, k, cos, sin):
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    return scores(q, k), q.transpose(1, 2), k.transpose(-1, -2)[:, 1:]


def in_the_projections_order(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    q, k = turn(q.transpose(1, 2), cos, sin), turn(k.transpose(1, 2), cos, sin)
    return scores(q.transpose(1, 2), k.transpose(1, 2)), q, k


SHOWN = [both_handed_out, queries_handed_out, keys_handed_out, handed_out_scaled, handed_out_as_views]
LOOSE = [only_read_by_a_product, *SHOWN, in_the_projections_order]


@pytest.mark.parametrize("body", LOOSE, ids=lambda f: f.__name__)
def test_results_that_leave_the_frame_have_eagers_strides(body):
    module, args = build(body, kind=Loose)
    frames = assert_fires(NAME, module, args)
    with torch.no_grad():
        got, want = frames.compiled(*args), module(*args)
    assert [t.stride() for t in got] == [t.stride() for t in want]


def _op(frames):
    (node,) = (n for n in frames.graph.graph.nodes if "rope_qk" in str(n.target))
    return node


@pytest.mark.parametrize("kind", [Heads, Loose])
def test_results_that_only_products_read_lie_as_the_projection_does(kind):
    """(B, S, H, D), which is the linear's own memory: nothing is permuted before the op."""
    frames = assert_fires(NAME, *build(rotated_heads if kind is Heads else only_read_by_a_product, kind=kind))
    node = _op(frames)
    assert [tuple(t.shape) for t in node.meta["val"]] == [(2, SEQ, 4, 14), (2, SEQ, 2, 14)]
    for operand in node.args[:2]:
        assert "view" in str(operand.target) or "reshape" in str(operand.target)
        assert operand.meta["val"].is_contiguous() and operand.args[0].target is torch.ops.aten.linear.default


@pytest.mark.parametrize("body", SHOWN, ids=lambda f: f.__name__)
def test_results_whose_strides_show_lie_as_the_plain_ones_did(body):
    frames = assert_fires(NAME, *build(body, kind=Loose))
    assert tuple(_op(frames).meta["val"][1].shape) == (2, 2, SEQ, 14)


@pytest.mark.parametrize("tokens", [SEQ, 1])
@pytest.mark.parametrize("body", [rotated_heads, neighbours, scaled_before], ids=lambda f: f.__name__)
def test_heads_that_are_inputs_are_told_from_tables(body, tokens):
    """A frame behind a graph break takes heads as inputs, and without gradients these are like tables."""
    q, k, v = torch.randn(3, 1, 4, tokens, Heads.width)
    cos, sin = tables("half", tokens, Heads.width)

    def attend(q, k, v, cos, sin):
        return torch.nn.functional.scaled_dot_product_attention(*body(q, k, cos, sin), v)

    with torch.no_grad():
        assert passed(Function(attend), (q, k, v, cos, sin)).counts[NAME] == 1
        whole = [t.expand(1, 4, tokens, -1) for t in (cos, sin)]
        assert not passed(Function(attend), (q, k, v, *whole)).sites, "either may be the table"
