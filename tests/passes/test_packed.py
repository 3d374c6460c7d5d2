"""RoPE of documents packed into one row: ops read their tables by position, and the documents' offsets, where these are
read in the graph; other positions keep tables by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megacpp_compile.config.options import Config
from tests.corpus.documents import OTHERS, POSITIONS, PackedHeads, PackedLatents, packed_args
from tests.corpus.near_misses import Heads, Latents, rotated_heads, turn
from tests.frames import TOLERANCE, check, check_graph, largest_error, render

from .conditions import assert_serves, sampled
from .contract import assert_fires

ROPES = ("rope_qk", "mla_rope_q", "mla_rope_kv")
PACKED_AT = {"rope_qk": 10, "mla_rope_q": 9, "mla_rope_kv": 9}


@pytest.fixture(autouse=True)
def drawn():
    torch.manual_seed(0)


def offsets_of(frames):
    """What each rope op of the one graph has as `cu_seqlens`: a node, or None."""
    ops = {f"megacpp::{name}": at for name, at in PACKED_AT.items()}
    nodes = [n for n in frames.graph.graph.nodes if getattr(n.target, "_schema", None) and n.target._schema.name in ops]
    return [(n.args[ops[n.target._schema.name] :] or (None,))[0] for n in nodes]


def assert_packed(frames, count):
    found = offsets_of(frames)
    assert len(found) == count and all(found), render(frames.graph)
    return found


def heads(name, **options):
    return PackedHeads(POSITIONS[name], **options)


def assert_by_token(module, args):
    assert offsets_of(assert_fires("rope_qk", module, args)) == [None]


@sampled(5, "name", POSITIONS)
def test_positions_of_queries_and_keys(name):
    assert_packed(assert_fires("rope_qk", heads(name), packed_args(), dynamo=name == "searched"), 1)


@pytest.mark.parametrize("name", ["starts_repeated", "bucketized"])
def test_positions_of_latents(name):
    frames = check_graph(PackedLatents(POSITIONS[name]), packed_args(Latents))
    assert frames.counts["mla_rope_q"] == frames.counts["mla_rope_kv"] == 1, frames.misses
    assert_packed(frames, 2)


@sampled(5, "name", OTHERS)
def test_what_looks_alike_keeps_tables_by_token(name):
    assert_by_token(PackedHeads(OTHERS[name]), packed_args(cu=(0, 4, 9, 12)))


class Given(nn.Module):
    """Positions that came from outside, as Hugging Face's collator makes them."""

    def __init__(self):
        super().__init__()
        self.attention = Heads(rotated_heads)

    def forward(self, x, position_ids, cos, sin):
        return self.attention(x, cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1))


def test_positions_that_are_an_input_keep_tables_by_token():
    x, _, cos, sin = packed_args()
    assert_by_token(Given(), (x, torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]]), cos, sin))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_kernels_get_int32_and_the_model_keeps_its_own(integer):
    """Positions are computed in the model's dtype; the op's operand is int32, whatever that is."""
    args = packed_args(integer=integer)
    frames = check_graph(heads("bucketized"), args)
    (offsets,) = assert_packed(frames, 1)
    assert offsets.meta["val"].dtype == torch.int32
    given = next(n for n in frames.graph.graph.nodes if n.op == "placeholder" and not n.meta["val"].is_floating_point())
    assert given.meta["val"].dtype == args[1].dtype == integer
    assert (offsets is given) == (integer == torch.int32)


@pytest.mark.end_to_end
@sampled(5, "everything", [False, True], ids=["marked", "all"])
@pytest.mark.parametrize(("kind", "of"), [(PackedHeads, Heads), (PackedLatents, Latents)], ids=["heads", "latents"])
def test_dynamic(kind, of, everything):
    """One graph serves every number of tokens and of documents."""
    module = kind(POSITIONS["bucketized"])

    def args(cu):
        torch.manual_seed(1)
        made = packed_args(of, cu)
        if not everything:
            torch._dynamo.mark_dynamic(made[0], 1)
            torch._dynamo.maybe_mark_dynamic(made[1], 0)  # torch guards on there being more than one document
        return made

    frames = check(module, args((0, *range(3, 13))), dynamic=True if everything else None)
    assert_packed(frames, 1 if of is Heads else 2)
    assert_serves(frames, module, args((0, 3, 3, 5, 13)), args((0, 1, 9)))


@pytest.mark.parametrize(("cast", "rows", "packed"), [(False, 12, True), (True, 12, True), (True, 40, False)],
                         ids=["caches in bfloat16", "rounded rows", "rounded rows of a long cache"])
def test_bfloat16(cast, rows, packed):
    """Caches in bfloat16, and caches in float32 of which gathered rows are rounded: to round a cache longer than the text
    costs more than to round what is gathered."""
    module = heads("searched", gathered=lambda cache, at: cache[at].to(torch.bfloat16) if cast else cache[at])
    x, cu, *tables = packed_args(rows=rows, dtype=torch.bfloat16)
    tables = [t.float() for t in tables] if cast else tables
    frames = check_graph(module.bfloat16(), (x, cu, *tables), tolerance=TOLERANCE[torch.bfloat16])
    assert frames.counts["rope_qk"] == 1
    assert [bool(offsets) for offsets in offsets_of(frames)] == [packed]


def test_inference():
    x, *others = packed_args()
    with torch.no_grad():
        assert_packed(check_graph(heads("starts_repeated"), (x.detach(), *others)), 1)


GATHERED = {
    "views": (lambda cache, at: cache[at].unsqueeze(0).unsqueeze(0), True),
    "embedding": (lambda cache, at: torch.nn.functional.embedding(at[None], cache), True),
    "casts": (lambda cache, at: cache.index_select(0, at).double().float(), False),
    "arithmetic": (lambda cache, at: cache[:12][at] + 0.0 * at[:, None], False),
}


@sampled(3, "how", GATHERED)
def test_how_rows_are_gathered(how):
    gathered, packed = GATHERED[how]
    (offsets,) = offsets_of(assert_fires("rope_qk", heads("searched", gathered=gathered), packed_args()))
    assert bool(offsets) == packed


def test_several_texts_keep_tables_by_token():
    """The ops' packed form has one row of tokens."""

    class Texts(PackedHeads):
        def forward(self, x, cu, cos, sin):
            return super().forward(x.expand(2, -1, -1), cu, cos, sin)

    assert_by_token(Texts(POSITIONS["searched"]), packed_args())


def yarn(rows, width):
    """Frequencies interpolated where they turn slowly, and an attention factor on both tables (arXiv:2309.00071)."""
    plain = 1 / 100 ** (torch.arange(width) / width)
    ramp = ((torch.arange(width) - 1) / 4).clamp(0, 1)
    angle = torch.outer(torch.arange(rows).float(), plain / 4 * ramp + plain * (1 - ramp))
    factor = 0.1 * math.log(4) + 1
    return factor * angle.cos(), factor * angle.sin()


def piecewise(rows, width):
    """As Llama 3.1's: low frequencies divided, high ones kept, a blend between."""
    plain = 1 / 100 ** (torch.arange(width) / width)
    length = 2 * math.pi / plain
    blend = ((16 / length - 1) / 3).clamp(0, 1)
    scaled = torch.where(length > 16, plain / 8, torch.where(length < 4, plain, (1 - blend) * plain / 8 + blend * plain))
    angle = torch.outer(torch.arange(rows).float(), scaled)
    return angle.cos(), angle.sin()


class Layers(nn.Module):
    """Layers of packed attention, each with tables of its own."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(PackedHeads(POSITIONS["starts_repeated"]) for _ in range(count))

    def forward(self, x, cu, *tables):
        for i, layer in enumerate(self.layers):
            x = x + layer(x, cu, *tables[2 * i : 2 * i + 2])
        return x


TABLES = {"yarn": (yarn,), "piecewise": (piecewise,), "per_layer": (yarn, piecewise)}


@sampled(3, "name", TABLES)
def test_tables_of_every_kind(name):
    """Fused by position, fused by token (positions given), and plain (passes off) are equal."""
    module = Layers(len(TABLES[name]))
    tables = [t for make in TABLES[name] for t in make(16, Heads.width // 2)]
    x, cu, *_ = packed_args()
    frames = check_graph(module, (x, cu, *tables))
    assert_packed(frames, len(TABLES[name]))
    off = check_graph(module, (x, cu, *tables), Config(strict=True, disable=ROPES))
    for layer in module.layers:
        layer.positions = lambda cu, tokens: POSITIONS["searched"](cu, tokens) % 16  # no spelling that is read
    by_token = check_graph(module, (x, cu, *tables))
    assert offsets_of(by_token) == [None] * len(TABLES[name])
    for results in (frames.results, by_token.results):
        error, which = largest_error(results, off.results)
        assert error <= TOLERANCE[torch.float32], which


def test_queries_and_keys_of_different_caches_stay_plain():
    class TwoCaches(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Heads(lambda q, k, cos, sin, cos_k, sin_k: (turn(q, cos, sin), turn(k, cos_k, sin_k)))

        def forward(self, x, cu, cos, sin, cos_k, sin_k):
            at = POSITIONS["searched"](cu, x.shape[1])
            return self.attention(x, cos[at], sin[at], cos_k[at], sin_k[at])

    x, cu, *_ = packed_args()
    width = Heads.width // 2
    frames = check_graph(TwoCaches(), (x, cu, *yarn(16, width), *piecewise(16, width)))
    assert not frames.counts["rope_qk"]
    assert "tables" in frames.tags("rope_qk")
