"""TurboQuant, PolarQuant and fp8 rows: errors of their laws, bytes, seeds, and attention over rows that stay as stored."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys

import pytest
import torch

from megacpp_compile.decode.absorbed import latent_attention
from megacpp_compile.decode.cache import MLAKVCache
from megacpp_compile.decode.codecs import PolarQuant, TurboQuant, mean_cosine, normal_codebook, rotation
from megacpp_compile.decode.row_formats import NAMES
from megacpp_compile.errors import CodecError
from tests.lowerings import relative_error

CODECS = {"turboquant": TurboQuant, "polarquant": PolarQuant}


def rows(kind, channels, n=600):
    """Gaussian; with heavy tails (a few channels have most of it); one channel alone, each once."""
    if kind == "one_hot":
        return torch.eye(channels) * 3
    drawn = torch.randn(n, channels)
    return drawn if kind == "gaussian" else drawn**3 * torch.rand(n, 1) * 10


def squared(codec, x):
    """The mean over rows of the square error over the row's own square."""
    return float(((codec.decode(codec.encode(x)) - x).square().sum(-1) / x.square().sum(-1)).mean())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["gaussian", "heavy_tails", "one_hot"])
@pytest.mark.parametrize("channels", [512, 64])
def test_errors_are_those_of_the_laws(kind, channels):
    """Whatever the rows are like, since they are rotated: TurboQuant's within the paper's bound, and that of Lloyd-Max
    for normal numbers; PolarQuant's as its angles' laws have it, radii in float16 included."""
    x = rows(kind, channels)
    assert 0.0085 < squared(TurboQuant(channels), x) < TurboQuant.bound < 0.01064
    polar = PolarQuant(channels)
    assert abs(squared(polar, x) / polar.expected_error - 1) < 0.04 and 0.031 < polar.expected_error < 0.033


def test_codebook_angles_and_rotations():
    """Max (1960), table I, 16 levels."""
    want = [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326]
    assert torch.allclose(normal_codebook()[8:], torch.tensor(want), atol=1e-4)
    errors = [1 - mean_cosine(level) for level in (2, 3, 4)]
    assert errors[0] > errors[1] > errors[2] > 0
    for d in (16, 96, 512):
        r = rotation(d, 5)
        assert (r @ r.T - torch.eye(d)).abs().max() < 1e-5
    assert not torch.equal(rotation(16, 5), rotation(16, 6))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_is_stored_of_a_row_of_nothing_and_in_bytes(codec):
    made, x = codec(96), torch.randn(7, 96)
    whole = made.encode(x)
    for i in range(7):
        one = made.encode(x[i : i + 1])
        assert torch.equal(one.payload, whole.payload[i : i + 1])
        assert torch.allclose(one.side.float(), whole.side[i : i + 1].float(), rtol=1e-3)
    made = codec(32)
    assert torch.equal(made.decode(made.encode(torch.zeros(3, 32))), torch.zeros(3, 32))
    for d in (512, 64):
        made = codec(d)
        encoded = made.encode(torch.randn(1, d))
        assert encoded.payload.nbytes + encoded.side.nbytes == made.nbytes()


STORED = """
import hashlib, sys, torch
from megacpp_compile.decode.codecs import PolarQuant, TurboQuant
x = torch.arange(96.0).sin()[None]
for codec in (TurboQuant(96, 7), PolarQuant(96, 7)):
    print(hashlib.sha256(codec.encode(x).payload.numpy().tobytes()).hexdigest())
"""


@pytest.mark.end_to_end
def test_another_process_stores_the_same():
    done = subprocess.run([sys.executable, "-c", STORED], capture_output=True, text=True, check=True)
    x = torch.arange(96.0).sin()[None]
    here = [hashlib.sha256(c(96, 7).encode(x).payload.numpy().tobytes()).hexdigest() for c in (TurboQuant, PolarQuant)]
    assert done.stdout.split() == here
    assert hashlib.sha256(TurboQuant(96, 8).encode(x).payload.numpy().tobytes()).hexdigest() != here[0]


def filled(codec, r=64, p=16, batch=2, length=40, dtype=torch.float32, **more):
    cache = MLAKVCache(1, batch, length + 3, r, p, dtype=dtype, codec=codec, **more)
    latent, rope = torch.randn(batch, length, r, dtype=dtype), torch.randn(batch, length, 1, p, dtype=dtype)
    stored = cache.update(0, latent, rope)
    cache.advance(length)
    return cache, stored, torch.cat((latent, rope.squeeze(2)), -1)


@pytest.mark.parametrize(("codec", "bytes_", "least"), [
    (None, 1152, 1), ("fp8", 580, 1.98), ("turboquant", 296, 3.8), ("polarquant", 288, 3.8),
])  # fmt: skip
def test_bytes_of_a_row(codec, bytes_, least):
    """Of what is allocated: the key row is stored like the latent."""
    cache = MLAKVCache(2, 3, 10, 512, 64, codec=codec)
    held = sum(t.nbytes for store in cache._stores for t in store)
    assert held == cache.nbytes() == 2 * 3 * 10 * bytes_ and 1152 / bytes_ >= least


@pytest.mark.parametrize(("codec", "error"), [("fp8", 0.03), ("turboquant", 0.11), ("polarquant", 0.19)])
def test_rows_come_back(codec, error):
    cache, stored, want = filled(codec)
    latent, rope = cache.prefix(0)
    assert 0 < relative_error(torch.cat((latent, rope.squeeze(2)), -1), want) < error
    assert torch.equal(stored.rows, cache.rows(0).rows) and latent.dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("codec", NAMES)
def test_attention_is_that_over_the_decoded_rows(codec, tokens):
    """Queries are rotated instead of rows, and what comes out is rotated back: the same attention but for rounding."""
    _, stored, _ = filled(codec)
    weight = torch.randn(3 * (8 + 6), 64) / 8
    q_nope, q_rope = torch.randn(2, tokens, 3, 8), torch.randn(2, tokens, 3, 16)
    got, want = (latent_attention(q_nope, q_rope, stored, weight, form=form) for form in ("absorbed", "expanded"))
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize(("codec", "error"), [("fp8", 0.06), ("turboquant", 0.2), ("polarquant", 0.35)])
def test_attention_is_near_that_over_plain_rows(codec, error):
    weight, results = torch.randn(3 * (8 + 6), 64) / 8, []
    q_nope, q_rope = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 16)
    for kind in (None, codec):
        torch.manual_seed(1)
        results.append(latent_attention(q_nope, q_rope, filled(kind)[1], weight))
    assert 0 < relative_error(results[1], results[0]) < error


@pytest.mark.sampled(3)
@torch.no_grad()
@pytest.mark.parametrize("codec", NAMES)
def test_a_compiled_step_stores_the_same(no_kernels, codec):
    caches = [MLAKVCache(1, 1, 8, 32, 16, dtype=torch.float32, codec=codec) for _ in range(2)]
    weight, given = torch.randn(2 * 14, 32), [torch.randn(4, 1, 1, n) for n in (32, 16)]

    def step(cache, latent, rope):
        rows = cache.update(0, latent, rope.unsqueeze(2))
        cache.advance(1)
        return latent_attention(latent.new_ones(1, 1, 2, 8), rope.new_ones(1, 1, 2, 16), rows, weight)

    compiled = torch.compile(step, backend="megacpp", fullgraph=True, options={"strict": True})
    for latent, rope in zip(*given, strict=True):
        got, want = compiled(caches[0], latent, rope), step(caches[1], latent, rope)
        assert relative_error(got, want) < 1e-5
    for a, b in zip(*(cache._stores[0] for cache in caches), strict=True):
        assert torch.equal(a, b) if a.dtype == torch.uint8 else torch.allclose(a, b, rtol=1e-3)


def test_layers_are_routed_by_a_map(caplog):
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        cache = MLAKVCache(5, 1, 10, 512, 64, codec={0: "turboquant", 1: "turboquant", 3: "fp8"})
    assert [kind.name for kind in cache.formats] == ["turboquant", "turboquant", "plain", "fp8", "plain"]
    assert cache.formats[0] is cache.formats[1]
    (line,) = [r.getMessage() for r in caplog.records]
    assert "turboquant: layers 0-1" in line and "plain: layers 2, 4" in line and "fp8: layers 3" in line
    assert cache.nbytes() == 10 * (2 * 296 + 2 * 1152 + 580)


def refused(call, *words):
    with pytest.raises(CodecError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), caught.value


def test_channels_rows_and_maps_that_do_not_fit():
    refused(lambda: TurboQuant(33), "multiples of 2, not 33")
    refused(lambda: PolarQuant(40), "multiples of 16, not 40")
    refused(lambda: TurboQuant(32).encode(torch.zeros(2, 30)), "vectors of 32 channels, not 30")
    refused(lambda: MLAKVCache(1, 1, 8, 512, 63, codec="turboquant"), "multiples of 2, not 63")
    x = torch.randn(2, 32)
    stored = TurboQuant(32, 1).encode(x)
    for other in (TurboQuant(32, 2), PolarQuant(32, 1), TurboQuant(48, 1)):
        refused(lambda other=other: other.decode(stored), "('turboquant', 32, 1)", "the codec that encoded")
    refused(lambda: MLAKVCache(2, 1, 8, 32, 16, codec={}), "not of no layer")
    refused(lambda: MLAKVCache(2, 1, 8, 32, 16, codec={2: "fp8", 5: "fp8"}), "from 0 to 1, not of layers [2, 5]")
    refused(lambda: MLAKVCache(2, 1, 8, 32, 16, codec="turbo"), "one of fp8, turboquant, polarquant, not 'turbo'", "'turboquant'?")
    refused(lambda: MLAKVCache(2, 1, 8, 32, 16, codec={0: "int4"}), "not 'int4'", "Leave it out")


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_training(codec):
    x = torch.zeros(2, 32, requires_grad=True)
    refused(lambda: codec(32).encode(x), "without a gradient", "no_grad")
    with torch.no_grad():
        codec(32).encode(x)
