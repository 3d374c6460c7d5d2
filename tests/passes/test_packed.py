"""RoPE of documents packed into one row: ops read their tables by position, and the documents' offsets, where these are
read in the graph; other positions keep tables by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megacpp_compile.config.options import Config
from tests.corpus.documents import OTHERS, POSITIONS, PackedHeads, PackedLatents, packed_args
from tests.corpus.near_misses import Heads, Latents, turn
from tests.frames import TOLERANCE, check, largest_error, render, train

from .contract import assert_fires

ROPES = ("rope_qk", "mla_rope_q", "mla_rope_kv")
PACKED_AT = {"rope_qk": 10, "mla_rope_q": 9, "mla_rope_kv": 9}


def offsets_of(frames):
    """What each rope op of the one graph has as `cu_seqlens`: a node, or None."""
    ops = {f"megacpp::{name}": at for name, at in PACKED_AT.items()}
    nodes = [n for n in frames.graph.graph.nodes if getattr(n.target, "_schema", None) and n.target._schema.name in ops]
    return [(n.args[ops[n.target._schema.name] :] or (None,))[0] for n in nodes]


def assert_packed(frames, count):
    found = offsets_of(frames)
    assert len(found) == count and all(found), render(frames.graph)
    return found


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_queries_and_keys(name):
    torch.manual_seed(0)
    assert_packed(assert_fires("rope_qk", PackedHeads(POSITIONS[name]), packed_args()), 1)


@pytest.mark.parametrize("name", ["starts_repeated", "bucketized"])
def test_positions_of_latents(name):
    torch.manual_seed(0)
    frames = check(PackedLatents(POSITIONS[name]), packed_args(Latents))
    assert frames.counts["mla_rope_q"] == frames.counts["mla_rope_kv"] == 1, frames.misses
    assert_packed(frames, 2)


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_alike_keeps_tables_by_token(name):
    torch.manual_seed(0)
    frames = assert_fires("rope_qk", PackedHeads(OTHERS[name]), packed_args(cu=(0, 4, 9, 12)))
    assert offsets_of(frames) == [None]


def given(positions):
    """Positions that came from outside, as Hugging Face's collator makes them."""

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Heads(lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin)))

        def forward(self, x, position_ids, cos, sin):
            return self.attention(x, cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1))

    return Given()


def test_positions_that_are_an_input_keep_tables_by_token():
    torch.manual_seed(0)
    x, _, cos, sin = packed_args()
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])
    assert offsets_of(assert_fires("rope_qk", given(at), (x, at, cos, sin))) == [None]


# --- the offsets' dtypes


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_kernels_get_int32_and_the_model_keeps_its_own(integer):
    """Positions are computed in the model's dtype; the op's operand is int32, whatever that is."""
    torch.manual_seed(0)
    args = packed_args(integer=integer)
    frames = check(PackedHeads(POSITIONS["bucketized"]), args)
    (offsets,) = assert_packed(frames, 1)
    assert offsets.meta["val"].dtype == torch.int32
    given = next(n for n in frames.graph.graph.nodes if n.op == "placeholder" and not n.meta["val"].is_floating_point())
    assert given.meta["val"].dtype == args[1].dtype == integer
    assert (offsets is given) == (integer == torch.int32)


# --- lengths and numbers of documents


@pytest.mark.parametrize("everything", [False, True], ids=["marked", "all"])
@pytest.mark.parametrize("kind", [PackedHeads, PackedLatents])
def test_dynamic(kind, everything):
    """One graph serves every number of tokens and of documents."""
    torch.manual_seed(0)
    module = kind(POSITIONS["bucketized"])
    of = Heads if kind is PackedHeads else Latents

    def args(cu):
        made = packed_args(of, cu)
        if not everything:
            torch._dynamo.mark_dynamic(made[0], 1)
            torch._dynamo.maybe_mark_dynamic(made[1], 0)  # torch guards on there being more than one document
        return made

    frames = check(module, args((0, *range(3, 13))), dynamic=True if everything else None)
    assert_packed(frames, 1 if of is Heads else 2)
    for cu in ((0, 3, 3, 5, 13), (0, 1, 9)):
        torch.manual_seed(1)
        want = train(module, module, packed_args(of, cu))
        torch.manual_seed(1)
        error, which = largest_error(train(frames.compiled, module, args(cu)), want)
        assert error <= TOLERANCE[torch.float32], (cu, which, error)
    assert len(frames.graphs) == 1


# --- conditions


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_bfloat16(cast):
    """Caches in bfloat16, and caches in float32 of which the gathered rows are rounded."""
    torch.manual_seed(0)
    kind = PackedHeads(POSITIONS["searched"], gathered=lambda cache, at: cache[at] if cast is None else cache[at].to(cast))
    x, cu, cos, sin = packed_args(rows=12, dtype=torch.bfloat16)
    if cast is not None:
        cos, sin = cos.float(), sin.float()
    assert_packed(check(kind.bfloat16(), (x, cu, cos, sin), tolerance=TOLERANCE[torch.bfloat16]), 1)


def test_rounding_a_cache_longer_than_the_text_costs_more_than_rounding_what_is_gathered():
    torch.manual_seed(0)
    kind = PackedHeads(POSITIONS["searched"], gathered=lambda cache, at: cache[at].to(torch.bfloat16)).bfloat16()
    x, cu, cos, sin = packed_args(rows=40, dtype=torch.bfloat16)
    frames = check(kind, (x, cu, cos.float(), sin.float()), tolerance=TOLERANCE[torch.bfloat16])
    assert frames.counts["rope_qk"] == 1
    assert offsets_of(frames) == [None]


def test_inference():
    torch.manual_seed(0)
    x, *others = packed_args()
    with torch.no_grad():
        frames = check(PackedHeads(POSITIONS["starts_repeated"]), (x.detach(), *others))
    assert_packed(frames, 1)


@pytest.mark.parametrize("gathered", [
    lambda cache, at: cache[at].unsqueeze(0).unsqueeze(0),
    lambda cache, at: torch.nn.functional.embedding(at[None], cache),
    lambda cache, at: cache.index_select(0, at).double().float(),
    lambda cache, at: cache[:12][at] + 0.0 * at[:, None],
], ids=["views", "embedding", "casts", "arithmetic"])  # fmt: skip
def test_how_rows_are_gathered(gathered, request):
    torch.manual_seed(0)
    kind = PackedHeads(POSITIONS["searched"], gathered=gathered)
    found = offsets_of(assert_fires("rope_qk", kind, packed_args()))
    assert (found == [None]) == ("arithmetic" in request.node.name or "casts" in request.node.name)


def test_several_texts_keep_tables_by_token():
    """The ops' packed form has one row of tokens."""

    class Texts(PackedHeads):
        def forward(self, x, cu, cos, sin):
            return super().forward(x.expand(2, -1, -1), cu, cos, sin)

    torch.manual_seed(0)
    assert offsets_of(assert_fires("rope_qk", Texts(POSITIONS["searched"]), packed_args())) == [None]


# --- tables: both ways give what eager gives


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


TABLES = {
    "yarn": (yarn,), "piecewise": (piecewise,), "per_layer": (yarn, piecewise),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_every_kind(name):
    """Fused by position, fused by token (positions given), and plain (passes off) are equal."""
    torch.manual_seed(0)
    module = Layers(len(TABLES[name]))
    tables = [t for make in TABLES[name] for t in make(16, Heads.width // 2)]
    x, cu, *_ = packed_args()
    frames = check(module, (x, cu, *tables))
    assert_packed(frames, len(TABLES[name]))
    off = check(module, (x, cu, *tables), Config(strict=True, disable=ROPES))
    error, which = largest_error(frames.results, off.results)
    assert error <= TOLERANCE[torch.float32], which
    for layer in module.layers:
        layer.positions = lambda cu, tokens: POSITIONS["searched"](cu, tokens) % 16  # no spelling that is read
    by_token = check(module, (x, cu, *tables))
    assert offsets_of(by_token) == [None] * len(TABLES[name])
    error, which = largest_error(by_token.results, off.results)
    assert error <= TOLERANCE[torch.float32], which


def test_queries_and_keys_of_different_caches_stay_plain():
    class TwoCaches(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Heads(lambda q, k, cos, sin, cos_k, sin_k: (turn(q, cos, sin), turn(k, cos_k, sin_k)))

        def forward(self, x, cu, cos, sin, cos_k, sin_k):
            at = POSITIONS["searched"](cu, x.shape[1])
            return self.attention(x, cos[at], sin[at], cos_k[at], sin_k[at])

    torch.manual_seed(0)
    x, cu, *_ = packed_args()
    width = Heads.width // 2
    frames = check(TwoCaches(), (x, cu, *yarn(16, width), *piecewise(16, width)))
    assert not frames.counts["rope_qk"]
    assert "tables" in frames.tags("rope_qk")
