"""`MLAKVCache`: rows where they belong, one advance a step, and an error for everything else before anything is written."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from megacpp_compile.decode.cache import CachedRows, MLAKVCache
from megacpp_compile.errors import CacheError
from tests.lowerings import relative_error

from .attention import LATENT, ROPE, WIDTH, Layers

BATCH, TOKENS = 2, 9


def made(layers=2, capacity=TOKENS, dtype=torch.float64, batch=BATCH, **more):
    return MLAKVCache(layers, batch, capacity, LATENT, ROPE, dtype=dtype, **more)


def drawn(n=1, dtype=torch.float64, batch=BATCH):
    return torch.randn(batch, n, LATENT, dtype=dtype), torch.randn(batch, n, 1, ROPE, dtype=dtype)


def bits(cache):
    return [t.clone() for store in cache._stores for t in store] + [cache.cache_seqlens.clone()]


@pytest.mark.parametrize("steps", [[1] * 9, [5, 1, 1, 2], [9], [3, 6]], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_decoding_is_the_full_forward_at_every_position(layers, steps):
    model, x, cache = Layers(layers), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64), made(layers)
    want, at = model(x), 0
    for n in steps:
        got = model.step(cache, x[:, at : at + n])
        assert relative_error(got, want[:, at : at + n]) < 1e-12
        at += n
        assert cache.length == at and cache.cache_seqlens.tolist() == [at] * BATCH


@torch.no_grad()
def test_in_single_and_in_half_precision():
    """float32 to 1e-5; bfloat16 as far from float64 as a full forward in bfloat16 is, or a quarter more."""
    model, x = Layers(2), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    want = model(x)
    for dtype in (torch.float32, torch.bfloat16):
        model, cache = model.to(dtype), made(dtype=dtype)
        got = torch.cat([model.step(cache, x[:, i : i + 1].to(dtype)) for i in range(TOKENS)], 1)
        full = relative_error(model(x.to(dtype)), want)
        assert relative_error(got, want) < (1e-5 if dtype == torch.float32 else 1.25 * full)


def test_update_returns_all_rows_and_moves_no_counter():
    cache, given = made(), []
    for n in (2, 3):
        latent, rope = drawn(n)
        rows = cache.update(0, latent, rope)
        given.append(torch.cat((latent, rope.squeeze(2)), -1))
        cache.update(1, *drawn(n))
        so_far = torch.cat(given, 1)
        assert rows.length.tolist() == [so_far.shape[1]] * BATCH and cache.length == so_far.shape[1] - n
        assert torch.equal(rows.rows[:, : so_far.shape[1]], so_far)
        prefix = cache.prefix(0)
        assert torch.equal(prefix[0], so_far[..., :LATENT]) and torch.equal(prefix[1].squeeze(2), so_far[..., LATENT:])
        cache.advance(n)
    assert isinstance(rows, CachedRows) and torch.equal(cache.rows(1).length, cache.cache_seqlens)


def test_the_two_parts_are_views_of_one_allocation():
    cache = made()
    rows = cache.update(0, *drawn())
    assert rows.rows.is_contiguous() and rows.rows.shape == (BATCH, TOKENS, LATENT + ROPE)
    for part in (rows.latent, rows.rope, *cache.prefix(0)):
        assert part.untyped_storage().data_ptr() == cache._stores[0][0].untyped_storage().data_ptr()
    assert rows.rope.shape == (BATCH, TOKENS, 1, ROPE), "stored once, for all heads"


def test_bytes_are_the_formula(caplog):
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        cache = MLAKVCache(3, 2, 10, 512, 64, expanded_channels=128 * (128 + 64 + 128))
    assert cache.nbytes() == 3 * 2 * 10 * 1152 == sum(t.nbytes for store in cache._stores for t in store)
    assert cache.nbytes(4) == 3 * 2 * 4 * 1152
    (line,) = [r.getMessage() for r in caplog.records]
    for word in ("3 layers", "batch 2", "capacity 10", "512 + 64", "bfloat16", "69120 bytes", "4915200 (71.1x)"):
        assert word in line, line


def test_the_same_bits_twice():
    def run():
        torch.manual_seed(3)
        cache = made()
        for n in (4, 1, 1):
            for layer in range(2):
                cache.update(layer, *drawn(n))
            cache.advance(n)
        return bits(cache)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_reset_begins_anew_and_an_abandoned_step_is_written_over():
    cache = made()
    cache.update(0, *drawn(3))
    cache.reset()
    assert cache.length == 0
    for layer in range(2):
        cache.update(layer, *drawn(2))
    cache.advance(2)
    assert cache.length == 2
    cache = made()
    cache.update(0, *drawn(3))
    cache.abandon_step()
    latent, rope = drawn(2)
    cache.update(0, latent, rope)
    cache.update(1, *drawn(2))
    cache.advance(2)
    assert torch.equal(cache.prefix(0)[0], latent)


def test_made_in_inference_mode_it_serves_outside_too():
    with torch.inference_mode():
        cache = made(1)
        cache.update(0, *drawn())
        cache.advance(1)
    with torch.no_grad():
        cache.update(0, *drawn())
        cache.advance(1)
    assert cache.length == 2


def refused(cache, call, *words):
    """Raises with these words, and nothing is written."""
    before = bits(cache)
    with pytest.raises(CacheError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), caught.value
    assert all(torch.equal(a, b) for a, b in zip(before, bits(cache), strict=True))


def test_advances_behind_each_layer_or_by_another_number():
    """The mistake that leaves every later layer's rows in the wrong place."""
    cache = made(3)
    cache.update(0, *drawn())
    refused(cache, lambda: cache.advance(1), "advance of layer 1", "an update of every layer", "not behind each")
    cache = made()
    cache.update(0, *drawn(2))
    cache.update(1, *drawn(1))
    refused(cache, lambda: cache.advance(2), "advance of layer 1", "2 tokens", "found 1")
    cache = made(1)
    cache.update(0, *drawn(2))
    refused(cache, lambda: cache.advance(1), "1 tokens", "found 2")


def test_a_second_update_lengths_that_differ_and_no_room():
    cache = made()
    cache.update(0, *drawn())
    refused(cache, lambda: cache.update(0, *drawn()), "update of layer 0", "a second one")
    cache = made()
    cache.cache_seqlens[1] = 3
    refused(cache, lambda: cache.update(0, *drawn()), "one length for all sequences, 0", "[0, 3]")
    cache = made(1, capacity=4)
    cache.update(0, *drawn(3))
    cache.advance(3)
    refused(cache, lambda: cache.update(0, *drawn(2)), "at most 4 tokens", "found 5", "reset")
    with pytest.raises(CacheError, match="capacity of at least 1"):
        made(capacity=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_counter_that_moved_within_the_step(batch):
    cache = made(batch=batch)
    cache.update(0, *drawn(batch=batch))
    cache.cache_seqlens += 1
    refused(cache, lambda: cache.update(1, *drawn(batch=batch)), "update of layer 1", "length 0", "found 1")


def test_operands_of_another_kind():
    cache = made()
    latent, rope = drawn(2)
    for args, *words in (
        ((2, latent, rope), "a layer from 0 to 1", "found 2"), ((-1, latent, rope), "a layer from 0 to 1", "found -1"),
        ((0, latent[..., 1:], rope), "the latent as (2, 2, 16)", "(2, 2, 15)"),
        ((0, latent[:1], rope[:1]), "(1, 2, 16)"),
        ((0, latent, rope[:, :1]), "the rope row as (2, 2, 1, 4)", "(2, 1, 1, 4)"),
        ((0, latent, rope.squeeze(2)), "(2, 2, 4)"),
        ((0, latent.float(), rope), "the latent in torch.float64", "torch.float32"),
        ((0, latent, rope.bfloat16()), "the rope row in", "torch.bfloat16"),
        ((0, latent.to("meta"), rope), "on cpu", "meta"),
    ):
        refused(cache, lambda args=args: cache.update(*args), *words)


def test_gradients():
    cache = made(1)
    latent, rope = drawn()
    latent.requires_grad_()
    refused(cache, lambda: cache.update(0, latent, rope), "without a gradient", "no_grad")
    with torch.no_grad():
        cache.update(0, latent, rope)


@pytest.fixture
def step(no_kernels):
    model = Layers(2)
    return model, torch.compile(model.step, backend="megacpp", fullgraph=True, options={"strict": True})


@pytest.mark.end_to_end
@torch.no_grad()
def test_one_graph_serves_64_steps(step):
    model, compiled = step
    x, cache = torch.randn(BATCH, 64, WIDTH, dtype=torch.float64), made(capacity=64)
    want, got = model(x), torch.cat([compiled(cache, x[:, i : i + 1]) for i in range(64)], 1)
    assert relative_error(got, want) < 1e-12
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"] and cache.length == 64
    with pytest.raises(RuntimeError, match="exceed 64"):
        compiled(cache, x[:, :1])


@pytest.mark.end_to_end
@torch.no_grad()
def test_compiled_steps_assert_that_the_counter_is_where_advance_left_it(step):
    _, compiled = step
    cache = made()
    compiled(cache, torch.randn(BATCH, 1, WIDTH, dtype=torch.float64))
    cache.cache_seqlens[1] += 1
    with pytest.raises(RuntimeError, match="lengths differ"):
        compiled(cache, torch.randn(BATCH, 1, WIDTH, dtype=torch.float64))


@torch.no_grad()
def test_an_advance_behind_each_layer_fails_compiled_too(no_kernels):
    cache = made()

    def step(latent, rope):
        for layer in range(2):
            cache.update(layer, latent, rope)
            cache.advance(1)

    with pytest.raises(CacheError, match="not behind each"):
        torch.compile(step, backend="megacpp")(*drawn())
