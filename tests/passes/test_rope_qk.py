"""RoPE of ordinary attention, queries and keys at once: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import copy

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.near_misses import SEQ, Heads, rotated_heads, turn
from tests.corpus.spellings import PlainGQA, sdpa, tables
from tests.frames import Function, check_graph, largest_error, render, run, train

from .conditions import conditions, near_miss, op_of, sampled
from .contract import assert_autocast, assert_fires, assert_refused
from .not_rotations import NOT_ROTATIONS

NAME = "rope_qk"


def build(body, dtype=torch.float32, kind=Heads):
    """`body(q, k, cos, sin)` within an attention block, and its arguments."""
    torch.manual_seed(0)
    x = torch.randn(2, SEQ, 40).to(dtype).requires_grad_()
    return kind(body).to(dtype), (x, *tables("half", SEQ, Heads.width, dtype))


def both(rope):
    """A body that does the same to queries and keys."""
    return lambda q, k, *tables: (rope(q, *tables), rope(k, *tables))


def heads_of(t, width=Heads.width):
    return t.unflatten(-1, (-1, width)).transpose(1, 2)


def by_matmul(weights, rows):
    return weights @ rows


def by_einsum(weights, rows):
    return torch.einsum("bthr,btrd->bthd", weights, rows)


def by_bmm(weights, rows):
    """As its authors have it."""
    return torch.bmm(weights.flatten(0, 1), rows.flatten(0, 1)).div(rows.shape[2]).view(*weights.shape[:3], -1)


class Factors(nn.Module):
    """Tensor-product attention (arXiv:2501.06425): heads are sums of outer products, whose channels turn before. In
    plain scores, or in an op."""

    def __init__(self, product, plain):
        super().__init__()
        self.product, self.plain, self.ranks, ranks = product, plain, (3, 2, 2), 7
        self.over_heads, self.over_channels = nn.Linear(40, ranks * 4), nn.Linear(40, ranks * Heads.width)

    def forward(self, x, cos, sin):
        weights, rows = self.over_heads(x).unflatten(-1, (4, -1)), self.over_channels(x).unflatten(-1, (-1, Heads.width))
        q, k, v = rows.split(self.ranks, 2)
        rows = turn(q, cos[:, None], sin[:, None]), turn(k, cos[:, None], sin[:, None]), v
        q, k, v = (self.product(*both).transpose(1, 2) for both in zip(weights.split(self.ranks, -1), rows, strict=True))
        scale = Heads.width**-0.5
        return (q @ k.mT * scale).softmax(-1) @ v if self.plain else F.scaled_dot_product_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("product", [by_matmul, by_einsum, by_bmm], ids=lambda f: f.__name__)
def test_factors_of_heads(product, plain):
    torch.manual_seed(0)
    x = torch.randn(2, SEQ, 40).requires_grad_()
    assert_fires(NAME, Factors(product, plain), (x, *tables("half", SEQ, Heads.width, torch.float32)))


def test_graph():
    frames = assert_fires(NAME, *build(rotated_heads), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
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
return [linear_3]""")


def partly(t, cos, sin, first, end):
    """Lanes in a row turn, the others stay."""
    n = (end - first) // 2
    return torch.cat((t[..., :first], turn(t[..., first:end], cos[:, :n], sin[:, :n]), t[..., end:]), dim=-1)


def neighbours(t, cos, sin):
    a, b = t[..., ::2], t[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def normed_behind(q, k, cos, sin):
    """As Hunyuan's, whose norms follow the rotation, and one of torch's own."""
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    q = q.new_full((Heads.width,), 1.5) * (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-5))
    return q, torch.nn.functional.rms_norm(k, (Heads.width,))


def scaled_before(q, k, cos, sin):
    """As Falcon-H1's keys and Muse's queries."""
    return turn(q / 3.7, cos, sin), turn(0.3 * k, cos, sin)


def in_a_region_of_its_own(t, cos, sin):
    """As rotary-embedding-torch's, which switches autocast off around each rotation and reads views from outside."""
    with torch.autocast("cpu", enabled=False):
        return turn(t.float() if t.dtype == torch.bfloat16 else t, cos, sin).to(t.dtype)


def scaled_behind(t, cos, sin, first=1.25, second=1.25):
    a, b = t.chunk(2, dim=-1)
    return torch.cat(((a * cos - b * sin) * first, (b * cos + a * sin) * second), dim=-1)


def added_into_zeros(t, cos, sin):
    (a, b), n = t.chunk(2, dim=-1), t.shape[-1] // 2
    out = torch.zeros_like(t)
    out[..., :n] += a * cos
    out[..., :n] -= b * sin
    out[..., n:] += b * cos
    out[..., n:] += a * sin
    return out


def by_matrices(t, cos, sin):
    """As FLUX's: a matrix for each pair."""
    m, t = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2)), t.unflatten(-1, (-1, 1, 2))
    return (m[..., 0] * t[..., 0] + m[..., 1] * t[..., 1]).flatten(-2)


def rows_of(m, q, k):
    m = m.unflatten(-1, (2, 2))
    return tuple(m.mul(t.unflatten(-1, (-1, 2)).unsqueeze(-2)).sum(-1).flatten(-2) for t in (q, k))


def tables_of_rows_and_columns(q, k, cos, sin):
    cos, sin = (torch.cat((t[:, :3], t[:1, 3:].expand_as(t[:, 3:])), dim=-1) for t in (cos, sin))
    cos, sin = (torch.cat((t[:, :3], t[:, 3:], t[:, :3], t[:, 3:]), dim=-1) for t in (cos, sin))
    return tuple(t * cos + torch.cat((-t[..., 7:], t[..., :7]), dim=-1) * sin for t in (q, k))


FORMS = {
    "rotated_heads": rotated_heads, "normed_behind": normed_behind,
    # as Granite's in foundation-model-stack
    "by_rows_of_matrices": lambda q, k, cos, sin: rows_of(torch.stack((cos, -sin, sin, cos), dim=-1), q, k),
    "scaled_before": scaled_before,
    # a bias added by hand, as an adapter is
    "shifted_before": lambda q, k, *tables: (
        turn(q + q.new_full((Heads.width,), 0.1), *tables), turn(k + 2.0 * k.tanh(), *tables)
    ),
    "tables_of_rows_and_columns": tables_of_rows_and_columns,
    "leading_lanes": both(lambda *args: partly(*args, 0, 6)),
    "trailing_lanes": both(lambda *args: partly(*args, 8, 14)),
    "neighbours": both(neighbours),
    "backwards": both(lambda t, cos, sin: turn(t, cos, -sin)),
    "scaled_queries": lambda q, k, cos, sin: (turn(q, cos, sin) * 0.3, turn(k, cos, sin)),
    "in_regions_of_their_own": both(in_a_region_of_its_own),
    # the attention's temperature, as where YaRN's is no part of the tables
    "multiplied_behind": both(lambda *args: scaled_behind(*args, 1.3, 1.3)),
    "added_into_zeros": both(added_into_zeros),
    "by_matrices": both(by_matrices),
}


@sampled(9, "dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_fires(form, dtype):
    assert_fires(NAME, *build(FORMS[form], dtype))


def behind_a_cache(q, k, cos, sin):
    """Decoding, or a prompt in chunks: the keys join those that came before."""
    past = torch.ones_like(k[:, :, :3])
    return turn(q, cos, sin), torch.cat((past, turn(k, cos, sin)), dim=2)


def beside_pooled_keys(q, k, cos, sin):
    """As DeepSeek-V4's: keys of whole windows, with positions of their own, stand beside those of the tokens."""
    pooled = k[:, :, :4].unflatten(2, (2, 2)).mean(3)
    return turn(q, cos, sin), torch.cat((turn(pooled, cos[:4:2], sin[:4:2]), turn(k, cos, sin)), dim=2)


class Rounded(Heads):
    """Heads behind norms that compute in float32 and round, as Gemma's do."""

    def __init__(self, body):
        super().__init__(lambda q, k, cos, sin: body(self.norm(q), self.norm(k), cos, sin))

    def norm(self, t):
        wide = t.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(t)


@pytest.mark.parametrize("form", ["rotated_heads", "trailing_lanes"])
def test_fires_in_bfloat16_behind_a_norm_that_rounds(form):
    """What turns is the rounded value; as near to float32's results as eager's bfloat16 is."""
    module, args = build(FORMS[form], torch.bfloat16, Rounded)
    wide, _ = build(FORMS[form], torch.float32, Rounded)
    wide.load_state_dict(module.state_dict())
    exact = train(wide, wide, (args[0].detach().float().requires_grad_(), *(t.float() for t in args[1:])))
    want, frames = train(module, module, args), run(module, args)
    assert frames.counts[NAME] == 1, frames.misses
    ours, eagers = (largest_error({n: t.float() for n, t in r.items()}, exact)[0] for r in (frames.results, want))
    assert ours <= 2 * eagers, f"{ours:.1e} from float32, eager is {eagers:.1e} from it"


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


class AsManyKeys(Heads):
    """As many key heads as query heads."""

    kv_heads = Heads.heads


def attending(attend, n=Heads.kv_heads, first=SEQ):
    """Heads, `n` of them of keys, that attend as `attend(q, k, v)` does, to the first tokens."""

    class Attending(Heads):
        kv_heads = n

        def forward(self, x, cos, sin):
            q, k, v = (heads_of(p(x[:, :first])) for p in (self.q, self.k, self.v))
            q, k = self.body(q, k, cos[:first], sin[:first])
            return self.o(attend(q, k, v).transpose(1, 2).flatten(2))

    return Attending


def some_rows(rows):
    """Of the keys some are read."""

    def attend(q, k, v):
        k, v = (t[:, :, rows].repeat_interleave(2, 1) for t in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    return attending(attend)


def in_blocks(rows):
    def attend(q, k, v):
        scores = torch.einsum("bhnqd,bhnkd->bhnqk", q.unflatten(2, (-1, 2)), rows(k)).softmax(-1)
        return torch.einsum("bhnqk,bhnkd->bhnqd", scores, rows(v)).flatten(2, 3)

    return attending(attend, Heads.heads, 4)


def expanded(t):
    return t[:, :, None].expand(len(t), 1, Heads.heads, *t.shape[2:]).reshape(len(t), Heads.heads, *t.shape[2:])


# as many rows as there are keys, whose values they are
of_keys = attending(lambda q, k, v: (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ k.repeat_interleave(2, 1))
ATTENDING = {
    "behind_a_cache": (behind_a_cache, of_keys), "beside_pooled_keys": (beside_pooled_keys, of_keys),
    # multi-query attention: the one key head is rotated before it is repeated
    "one_key_expanded": (rotated_heads, attending(lambda q, k, v: sdpa(q, expanded(k), expanded(v)), 1)),
    "one_key_interleaved": (
        rotated_heads, attending(lambda q, k, v: sdpa(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)), 1)
    ),
    "one_key_gqa": (rotated_heads, attending(sdpa, 1)),
    "window": (rotated_heads, some_rows(slice(-3, None))), "stride": (rotated_heads, some_rows(slice(None, None, 2))),
    # held by the function, for which a graph by itself has no input
    "list": (rotated_heads, some_rows(torch.tensor([0, 2, 3]))),
    "windows": (rotated_heads, in_blocks(windows)), "gathered": (rotated_heads, in_blocks(gathered)),
    "tables_of_every_head": (lambda q, k, *ts: rotated_heads(q, k, *tables_of_every_head(*ts)), AsManyKeys),
}


@pytest.mark.parametrize("way", ATTENDING)
def test_ways_to_attend(way):
    body, kind = ATTENDING[way]
    assert not assert_fires(NAME, *build(body, kind=kind), dynamo=way == "list").misses


def with_tables(make, of=Heads, **held):
    """Heads whose tables are what `make(module, x)` makes of what is held."""

    class WithTables(of):
        def __init__(self, body):
            super().__init__(body)
            for name, value in held.items():
                setattr(self, name, value())

        def forward(self, x, *_):
            return super().forward(x, *make(self, x))

    return WithTables


def kept(i):
    """A table in a parameter that nothing trains."""
    return lambda: torch.nn.Parameter(tables("half", SEQ + 2, Heads.width)[i], requires_grad=False)


def of_two_coordinates(m, x):
    """Angles by frequencies that each head has of its own: RoPE-Mixed (arXiv:2403.13298)."""
    at = torch.stack((torch.arange(x.shape[1]) // 2, torch.arange(x.shape[1]) % 2), -1).float()
    angles = (at @ m.frequencies).unflatten(-1, (m.heads, -1)).transpose(0, 1)
    return angles.cos(), angles.sin()


def of_the_text(m, x):
    """Of a projection, whose weight goes into all that follows, or its angles alone."""
    angles = m.angle(x).cumsum(1)[:, None]
    return angles.cos(), angles.sin()


FREQUENCIES = {"frequencies": lambda: torch.nn.Parameter(torch.randn(2, Heads.heads * Heads.width // 2))}
TRAINED = {
    "tables": with_tables(lambda m, x: (m.cos[: x.shape[1]], m.sin[: x.shape[1]]), cos=kept(0), sin=kept(1)),
    "frequencies": with_tables(of_two_coordinates, AsManyKeys, **FREQUENCIES),
}


@pytest.mark.parametrize("what", TRAINED)
def test_trained_tables_are_named(what):
    """Parameters that nothing trains are tables like others."""
    module, (x, *_) = build(rotated_heads, kind=TRAINED[what])
    if what == "tables":
        assert_fires(NAME, module, (x,))
    module.requires_grad_(True)
    assert_refused(NAME, "trained-tables", module, (x,))
    with torch.no_grad():
        assert_fires(NAME, module, (x,))
    assert_fires(NAME, module.requires_grad_(False), (x,))


def test_angles_of_the_text_are_no_tables():
    of_text = with_tables(of_the_text, angle=lambda: torch.nn.Linear(40, Heads.width // 2, bias=False))
    frames = check_graph(*build(rotated_heads, kind=of_text))
    assert not frames.fired and "trained-tables" not in frames.tags(NAME)


def test_a_part_of_a_head_for_each_coordinate_has_one_reason():
    """Each rotated by itself, in halves of its own: Gemma 4's vision tower. The parts are no heads."""

    def by_coordinate(t, cos, sin):
        parts = zip(t.split((6, 8), -1), (cos[:, :3], cos[:, 3:]), (sin[:, :3], sin[:, 3:]), strict=True)
        return torch.cat([turn(*part) for part in parts], -1)

    frames = check_graph(*build(both(by_coordinate)))
    assert not frames.fired and [m.tag for m in frames.misses] == ["pairing", "pairing"], frames.misses


def test_keys_of_other_positions_are_no_near_miss():
    def pooled_keys(q, k, cos, sin):
        return turn(q, cos, sin), turn(k[:, :, :4].unflatten(2, (2, 2)).mean(3), cos[:4:2], sin[:4:2])

    frames = check_graph(*build(pooled_keys, kind=of_keys))
    assert frames.fired == {"attention": 1} and not frames.misses


def test_an_output_that_is_rotated_back_is_no_near_miss():
    """As DeepSeek-V4's, whose values are its rotated keys; groups of heads have an output projection each."""

    class TurnedBack(Heads):
        def forward(self, x, cos, sin):
            q, k = turn(heads_of(self.q(x)), cos, sin), turn(heads_of(self.k(x)), cos, sin)
            out = turn(sdpa(q, k, k), cos, -sin).transpose(1, 2).reshape(-1, 2, 2 * self.width)
            weights = self.o.weight.view(2, -1, 2 * self.width).transpose(1, 2)
            return torch.bmm(out.transpose(0, 1), weights).transpose(0, 1).reshape(*x.shape[:2], -1)

    assert not assert_fires(NAME, *build(None, kind=TurnedBack)).misses


@sampled(3, "qk_norm", ["no_upcast", "functional_rms_norm", None])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_normed_queries_and_keys(layout, qk_norm):
    """The norm's output is a tensor of its own, whose memory need not be in the order of its dimensions."""
    block = PlainGQA(layout=layout, qk_norm=qk_norm)
    assert_fires(NAME, block, block.example_inputs())


def tables_of_every_head(cos, sin):
    return (torch.stack([t.roll(h, 0) for h in range(Heads.heads)]) for t in (cos, sin))


def plain(**options):
    block = PlainGQA(**options)
    return block, block.example_inputs()


def lengths():
    return PlainGQA(), lambda length: PlainGQA().example_inputs(seq=length)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = PlainGQA(), PlainGQA()

    def forward(self, x, *tables):
        return self.second(self.first(x, *tables), *tables)


test_conditions = conditions(
    NAME, two_layers=lambda: (Two(), plain()[1], 2), disabled=plain, length=lengths, everything=lengths,
    autocast=lambda: plain(rope_spelling="complex_view_flatten", table_source="buffer"),
    autocast_inside=lambda: plain(table_source="buffer"),
)  # fmt: skip


def test_a_region_without_autocast_in_one_with():
    assert_autocast(NAME, *build(FORMS["in_regions_of_their_own"]))


def test_tables_that_each_layer_makes_anew():
    """Equal tables are one, and the first: the op of the first layer waits for nothing of the second."""

    def made(m, x):
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), 0.3 ** torch.arange(m.width // 2))
        with torch.autocast("cpu", enabled=False):
            return angles.cos(), angles.sin()

    body, kind = FORMS["in_regions_of_their_own"], with_tables(made)
    layers = torch.nn.Sequential(*(build(body, kind=kind)[0] for _ in range(2)))
    frames = assert_fires(NAME, layers, build(None)[1][:1], count=2)
    lines = render(frames.graph).splitlines()
    first, _ = (i for i, line in enumerate(lines) if "megacpp.rope_qk" in line)
    assert sum(" = linear(" in line for line in lines[:first]) == 2, "the queries and keys of the first layer"


def test_tables_that_are_rounded_for_the_rotation_are_read_in_float32():
    """As Inductor reads them, which makes and casts them inside the kernel that rotates. No further from float64
    than eager."""

    def made(m, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = torch.outer(torch.arange(x.shape[1], dtype=wide), 0.3 ** torch.arange(m.width // 2))
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    module, (x, *_) = build(FORMS["in_regions_of_their_own"], torch.bfloat16, with_tables(made))
    exact, x64 = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    frames, eager, want = run(module, (x,)), train(module, module, (x,)), train(exact, exact, (x64,))
    (node,) = frames.graph.graph.find_nodes(op="call_function", target=torch.ops.megacpp.rope_qk.default)
    assert [t.meta["val"].dtype for t in node.args[:4]] == [torch.bfloat16] * 2 + [torch.float32] * 2

    def error(results):
        return sum(float((results[name].double() - t).norm() / t.norm()) ** 2 for name, t in want.items()) ** 0.5

    assert error(frames.results) <= 1.1 * error(eager)  # a few hundred numbers, whose other roundings differ by chance


class Scores(Heads):
    """Only the score product, which does not mind how many lanes there are."""

    def forward(self, x, cos, sin):
        return scores(*self.body(heads_of(self.q(x)), heads_of(self.k(x)), cos, sin))


def scores(q, k):
    return q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)


@sampled(5, "tag", NOT_ROTATIONS)
def test_refuses_what_is_no_rotation(tag):
    assert_refused(NAME, tag, *build(both(NOT_ROTATIONS[tag]), kind=Scores))


def product_read_elsewhere(q, k, cos, sin):
    a, b = q.chunk(2, dim=-1)
    product = a * cos
    rotated = torch.cat((product - b * sin, b * cos + a * sin), dim=-1)
    return rotated + product.sum(), turn(k, cos, sin)


def queries_read_in_another_region_first(q, k, cos, sin):
    q = turn(q, cos, sin)
    with torch.no_grad():
        scale = q.abs().amax()
    return q, turn(k / scale, cos, sin)


def scaled_by_position(q, k, cos, sin):
    """xPos: what queries are multiplied by, keys are divided by."""
    scale = 0.9 ** torch.arange(len(cos), dtype=q.dtype)[:, None]
    cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    half = lambda t: torch.cat((-t[..., 7:], t[..., :7]), dim=-1)  # noqa: E731
    return q * cos * scale + half(q) * sin * scale, k * cos / scale + half(k) * sin / scale


REFUSED = {
    "two-tables": scaled_by_position,
    # equal numbers, but nothing says so
    "tables": lambda q, k, cos, sin: (
        turn(q, *(t.expand(len(q), 1, -1, -1).contiguous() for t in (cos, sin))), turn(k, cos, sin)
    ),
    "matrices": lambda q, k, cos, sin: rows_of(
        torch.cat((cos, -sin, sin, cos), dim=-1)[:, : 4 * 7].clamp(-1, 1).unflatten(-1, (7, 4)), q, k
    ),
    "no-scores": lambda q, k, cos, sin: (turn(q, cos, sin).tanh(), k),
    "escapes": product_read_elsewhere,
    "broadcast": lambda q, k, *tables: rotated_heads(q, k[:, :1].expand(-1, 2, -1, -1), *tables),
    "region": queries_read_in_another_region_first,
}


@sampled(3, "tag", REFUSED)
def test_refuses(tag):
    assert_refused(NAME, tag, *build(REFUSED[tag]))


def test_leaves_lanes_alone_that_rotate_in_the_middle():
    # A value with unrotated lanes is taken for MLA's, so it is that pass that says why.
    frames = check_graph(*build(both(lambda *args: partly(*args, 4, 10))))
    assert not frames.fired and "rotated-middle" in frames.tags(NAME)


@sampled(3, ("tag", "name"), [
    ("tables", "tables_differ_between_query_and_key"), ("tables", "sines_differ_between_query_and_key"),
    ("layout", "pairings_differ_between_query_and_key"), ("signs", "query_halves_change_places"),
])  # fmt: skip
def test_refuses_near_miss(tag, name):
    assert_refused(NAME, tag, *near_miss(name))


def queries_scaled(q, k, cos, sin):
    """In place, in front of a view of whole heads: torchtune's Gemma-2."""
    q = turn(q, cos, sin)
    q.mul_(0.3)
    return q.unflatten(-1, (2, -1)).flatten(-2), turn(k, cos, sin)


def keys_with_one_scaled_table(q, k, cos, sin):
    a, b = k.chunk(2, dim=-1)
    return turn(q, cos, sin), torch.cat((a * cos * 1.25 - b * sin, b * cos * 1.25 + a * sin), dim=-1)


def keys_alone(of_tables):
    """Queries turn by the tables, keys by what `of_tables` makes of them."""
    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, *of_tables(cos, sin)))


def test_refuses_different_numbers_of_rotated_lanes():
    frames = check_graph(*build(lambda q, k, *tables: (partly(q, *tables, 0, 6), partly(k, *tables, 0, 8))))
    assert not frames.counts[NAME] and frames.tags(NAME) & {"layout", "tables"}


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
    check_graph(OneTableRowEach(), (x, *tables("half", SEQ, Heads.width)))


def test_nothing_of_mla():
    block = PlainGQA()
    assert run(block, block.example_inputs()).fired == {NAME: 1}


def test_refuses_one_key_rotated_for_every_head():
    def body(q, k, cos, sin):
        return rotated_heads(q, k[:, :1], *tables_of_every_head(cos, sin))

    assert_refused(NAME, "broadcast", *build(body, kind=AsManyKeys))


KEYS_ROTATED_OTHERWISE = {
    "scaled_and_rotated_back": ("tables", lambda q, k, cos, sin: (turn(q, cos, sin), scaled_behind(k, cos, -sin))),
    "with_one_scaled_table": ("signs", keys_with_one_scaled_table),
    "rotated_back": ("tables", keys_alone(lambda cos, sin: (cos, -sin))),
    "with_axes_in_another_order": (
        "table-order", keys_alone(lambda *ts: [torch.cat((t[:, 3:], t[:, :3]), -1) for t in ts]),
    ),
    "a_position_ahead": ("tables", keys_alone(lambda *ts: [torch.cat((t[1:], t[:1])) for t in ts])),
}


@sampled(3, "keys", KEYS_ROTATED_OTHERWISE)
def test_refuses_keys_rotated_otherwise(keys):
    tag, body = KEYS_ROTATED_OTHERWISE[keys]
    assert_refused(NAME, tag, *build(body, kind=AsManyKeys))


SCALED = {
    "keys": lambda q, k, cos, sin: (turn(q, cos, sin), scaled_behind(k, cos, sin)),
    "queries": queries_scaled,
    "both": lambda q, k, cos, sin: (
        scaled_behind(q, cos, sin), 0.4 * scaled_behind(k, cos, sin).unflatten(-1, (-1, 2)).flatten(-2)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("which", SCALED)
def test_what_is_scaled_alone(which, dtype):
    assert_fires(NAME, *build(SCALED[which], dtype, kind=AsManyKeys))


def test_keys_with_a_dimension_of_one():
    """A view behind the rotation, as torchtune has it in front of what repeats keys, is no part of it."""

    def body(q, k, cos, sin):
        k = turn(k, cos, sin)
        return turn(q, cos, sin), k.view(*k.shape[:2], 1, *k.shape[2:]).expand(-1, -1, 1, -1, -1).reshape(k.shape)

    assert_fires(NAME, *build(body, kind=AsManyKeys))


class OneRow(Heads):
    """Queries of heads, and a key row that all of them share, rotated by one complex table that each reads in another
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
    assert_fires(NAME, *build(complex_turn, kind=OneRow))


def test_refuses_complex_tables_of_other_entries():
    def body(t, table):
        return complex_turn(t, table if t.dim() == 4 else table.roll(1, -1))

    assert_refused(NAME, "tables", *build(body, kind=OneRow))


class Loose(Heads):
    """Rotated queries and keys leave the frame as `body(q, k)` hands them out, behind their scores."""

    def forward(self, x, cos, sin):
        q, k = turn(heads_of(self.q(x)), cos, sin), turn(heads_of(self.k(x)), cos, sin)
        return scores(q, k), *self.body(q, k)


class InTheProjectionsOrder(Loose):
    def forward(self, x, cos, sin):
        q, k = (turn(heads_of(p(x)).transpose(1, 2), cos[:, None], sin[:, None]) for p in (self.q, self.k))
        return scores(q.transpose(1, 2), k.transpose(1, 2)), q, k


SHOWN = {
    "both": lambda q, k: (q, k),
    "queries": lambda q, k: (q,),
    "keys": lambda q, k: (k,),
    "scaled": lambda q, k: (q * 2, k + 1),
    "as_views": lambda q, k: (q.transpose(1, 2), k.transpose(-1, -2)[:, 1:]),
}
LOOSE = {"scores": lambda q, k: (), **SHOWN, "in_the_projections_order": None}


@sampled(5, "handed_out", LOOSE)
def test_results_that_leave_the_frame_have_eagers_strides(handed_out):
    module, args = build(LOOSE[handed_out], kind=Loose if LOOSE[handed_out] else InTheProjectionsOrder)
    frames = assert_fires(NAME, module, args)
    with torch.no_grad():
        got, want = frames.compiled(*args), module(*args)
    assert [t.stride() for t in got] == [t.stride() for t in want]


@pytest.mark.parametrize("kind", [Heads, Loose])
def test_results_that_only_products_read_lie_as_the_projection_does(kind):
    """(B, S, H, D), which is the linear's own memory: nothing is permuted before the op."""
    node = op_of(assert_fires(NAME, *build(rotated_heads if kind is Heads else LOOSE["scores"], kind=kind)), NAME)
    assert [tuple(t.shape) for t in node.meta["val"]] == [(2, SEQ, 4, 14), (2, SEQ, 2, 14)]
    for operand in node.args[:2]:
        assert "view" in str(operand.target) or "reshape" in str(operand.target)
        assert operand.meta["val"].is_contiguous() and operand.args[0].target is torch.ops.aten.linear.default


@sampled(3, "handed_out", SHOWN)
def test_results_whose_strides_show_lie_as_the_plain_ones_did(handed_out):
    frames = assert_fires(NAME, *build(SHOWN[handed_out], kind=Loose))
    assert tuple(op_of(frames, NAME).meta["val"][1].shape) == (2, 2, SEQ, 14)


@pytest.mark.parametrize("tokens", [SEQ, 1])
@pytest.mark.parametrize("form", ["rotated_heads", "neighbours", "scaled_before"])
def test_heads_that_are_inputs_are_told_from_tables(form, tokens):
    """A frame behind a graph break takes heads as inputs, and without gradients these are like tables."""
    q, k, v = torch.randn(3, 1, 4, tokens, Heads.width)
    cos, sin = tables("half", tokens, Heads.width)

    def attend(q, k, v, cos, sin):
        return torch.nn.functional.scaled_dot_product_attention(*FORMS[form](q, k, cos, sin), v)


    with torch.no_grad():
        assert check_graph(Function(attend), (q, k, v, cos, sin)).counts[NAME] == 1
        whole = [t.expand(1, 4, tokens, -1) for t in (cos, sin)]
        assert not check_graph(Function(attend), (q, k, v, *whole)).fired, "either may be the table"
