"""Absorbed and expanded attention over cached rows: the same attention, a stated choice, and no training."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from megacpp_compile.decode.absorbed import LowRank, choose_form, latent_attention, split_up_projection
from megacpp_compile.decode.cache import MLAKVCache
from megacpp_compile.errors import AbsorbedInTrainingError, OperandError
from tests.lowerings import relative_error

from .attention import HEADS, LATENT, NOPE, VALUE, WIDTH, Layers
from .test_cache import made

SIZES = {"small": (2, 8, 4, 6, 16), "deepseek": (2, 128, 64, 128, 512), "no_rope_to_speak_of": (3, 8, 1, 8, 8)}


def operands(heads, nope, rope, value, latent, tokens=2, before=5, batch=2, dtype=torch.float64):
    """A cache of `before + tokens` rows, and the queries of the newest `tokens`."""
    cache = MLAKVCache(1, batch, before + tokens + 3, latent, rope, dtype=dtype)
    for n in (before, tokens):
        rows = cache.update(0, torch.randn(batch, n, latent, dtype=dtype), torch.randn(batch, n, 1, rope, dtype=dtype))
        cache.advance(n)
    weight = torch.randn(heads * (nope + value), latent, dtype=dtype) / latent**0.5
    q_nope, q_rope = (torch.randn(batch, tokens, heads, n, dtype=dtype) for n in (nope, rope))
    return q_nope, q_rope, rows, weight


def by_hand(q_nope, q_rope, rows, weight):
    """Keys and values of all heads, one query after the other, in float64."""
    batch, tokens, heads, nope = q_nope.shape
    kept, outs = rows.rows.double(), []
    kv = (kept[..., : rows.latent_dim] @ weight.double().T).unflatten(-1, (heads, -1))
    for t in range(tokens):
        n = int(rows.length[0]) - tokens + t + 1
        scores = torch.einsum("bhd,bshd->bhs", q_nope[:, t].double(), kv[:, :n, :, :nope])
        scores = scores + torch.einsum("bhp,bsp->bhs", q_rope[:, t].double(), kept[:, :n, rows.latent_dim :])
        p = (scores * (nope + rows.rope_dim) ** -0.5).softmax(-1)
        outs.append(torch.einsum("bhs,bshv->bhv", p, kv[:, :n, :, nope:]))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_is_the_attention_of_the_expanded_heads(sizes, form):
    args = operands(*sizes)
    assert relative_error(latent_attention(*args, form=form), by_hand(*args)) < 1e-12


def test_in_half_precision():
    """As far from float64 as the expanded form is in bfloat16, or a quarter more."""
    q_nope, q_rope, rows, weight = operands(*SIZES["deepseek"], dtype=torch.bfloat16, before=40)
    want = by_hand(q_nope, q_rope, rows, weight.bfloat16())
    absorbed, expanded = (
        relative_error(latent_attention(q_nope, q_rope, rows, weight.bfloat16(), form=form), want)
        for form in ("absorbed", "expanded")
    )
    assert 0 < absorbed < 1.25 * expanded


def test_weights_are_views():
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT)
    keys, values = split_up_projection(weight, HEADS, NOPE)
    assert keys.shape == (HEADS, NOPE, LATENT) and values.shape == (HEADS, VALUE, LATENT)
    weight.view(HEADS, NOPE + VALUE, LATENT)[1, NOPE:] = 7
    assert (values[1] == 7).all() and not (keys == 7).any()


def test_a_scale_of_the_model_s_own():
    q_nope, q_rope, rows, weight = operands(*SIZES["small"])
    for form in ("absorbed", "expanded"):
        got = latent_attention(q_nope, q_rope, rows, weight, scale=0.5 * 12**-0.5, form=form)
        assert relative_error(got, by_hand(q_nope / 2, q_rope / 2, rows, weight)) < 1e-12


def test_counts():
    """128 + 64 + 128 channels and latents of 512: (576 + 512) a query, row and head, or 320 and 131072 a row."""
    for tokens, absorbed in ((1, True), (170, True), (172, False), (1000, False)):
        form = choose_form(tokens, 10**6, 16, 128, 64, 128, 512)
        assert form.absorbed == absorbed and form.by == "counts"
        assert form.absorbed_multiply_adds == 16 * tokens * (512 * 256 + 10**6 * 1088)
        assert form.expanded_multiply_adds == 16 * 10**6 * (512 * 256 + tokens * 320)
    forced = choose_form(1, 10**6, 16, 128, 64, 128, 512, "expanded")
    assert (forced.absorbed, forced.by) == (False, "caller")
    assert str(forced).startswith("expanded by caller: 17410097152 multiply-adds absorbed, 2102272")
    # Of rank 8 beside both, with one matrix that narrows: t h p (n + v + 2 r) and s p (r + h (n + v)) more.
    sizes = 3, 1000, 16, 128, 64, 128, 512
    plain, adapted = choose_form(*sizes), choose_form(*sizes, low_rank=LowRank(8, 8, 8))
    assert adapted.absorbed_multiply_adds - plain.absorbed_multiply_adds == 3 * 16 * 8 * (256 + 2 * 512)
    assert adapted.expanded_multiply_adds - plain.expanded_multiply_adds == 1000 * 8 * (512 + 16 * 256)


def test_the_choice_is_taken_and_logged(monkeypatch, caplog):
    from megacpp_compile.decode import absorbed

    absorbed._announce.cache_clear()
    taken, plain = [], absorbed._expanded
    monkeypatch.setattr(absorbed, "_expanded", lambda *args: taken.append("expanded") or plain(*args))
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        latent_attention(*operands(*SIZES["deepseek"], tokens=1))
        assert taken == []
        latent_attention(*operands(*SIZES["small"], tokens=24))
        assert taken == ["expanded"]
    messages = [r.getMessage() for r in caplog.records if "latent attention" in r.getMessage()]
    assert [m.split(":")[1].split()[0] for m in messages] == ["absorbed", "expanded"]
    assert all("multiply-adds absorbed" in m for m in messages)


@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_training_is_refused(which, form):
    args = operands(*SIZES["small"])
    args[which].requires_grad_()
    with pytest.raises(AbsorbedInTrainingError, match=r"20 channels and a value 16.*no flash kernel.*no_grad"):
        latent_attention(*args, form=form)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            latent_attention(*args, form=form)


def test_operands_that_mean_nothing():
    q_nope, q_rope, rows, weight = operands(*SIZES["small"])
    with pytest.raises(OperandError, match=r"rows have 16 \+ 4 channels"):
        latent_attention(q_nope, q_rope[..., 1:], rows, weight)
    with pytest.raises(OperandError, match=r"rows have 16 \+ 4 channels"):
        latent_attention(q_nope, q_rope, rows, weight[:, 1:])
    with pytest.raises(OperandError, match="form is 'absorbs', wanted one of auto, absorbed"):
        latent_attention(q_nope, q_rope, rows, weight, form="absorbs")


@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
@torch.no_grad()
def test_each_step_is_the_full_forward(form):
    model, x, cache = Layers(2), torch.randn(2, 9, WIDTH, dtype=torch.float64), made()
    want, at = model(x), 0
    for n in (4, 1, 1, 2, 1):
        assert relative_error(model.step(cache, x[:, at : at + n], form), want[:, at : at + n]) < 1e-12
        at += n


@pytest.mark.end_to_end
@torch.no_grad()
def test_one_graph_serves_64_steps(no_kernels):
    model, x, cache = Layers(2), torch.randn(2, 64, WIDTH, dtype=torch.float64), made(capacity=64)
    compiled = torch.compile(model.step, backend="megacpp", fullgraph=True, options={"strict": True})
    got = torch.cat([compiled(cache, x[:, i : i + 1], "absorbed") for i in range(64)], 1)
    assert relative_error(got, model(x)) < 1e-12
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
