"""Models of transformers with caches of their own, which hold latents, compiled: each step takes the absorbed form, and
they generate eager's tokens."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import megacpp_compile

from .test_transformers_cache import generated, made, prompt, transformers


@pytest.mark.parametrize(("which", "kind"), [("v2", "static"), ("v3", "dynamic")])
@torch.no_grad()
def test_generates_the_tokens_of_eager(which, kind, no_kernels):
    torch._dynamo.reset()
    model, ids = made(which), prompt()

    def cache():
        if kind == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=17)

    want = generated(model, ids, past_key_values=cache())
    with megacpp_compile.record() as report:
        model.compile(backend="megacpp", options={"strict": True})
        assert torch.equal(generated(model, ids, past_key_values=cache()), want)
    assert all(frame.captured for frame in report.frames)
    steps = [frame for frame in report.frames if frame.passes["mla_decode"]]
    assert steps and {frame.passes["mla_decode"] for frame in steps} == {2}, report.misses
    assert all(site.note.startswith("absorbed by counts") for site in report.sites if site.pass_name == "mla_decode")


@torch.no_grad()
def test_a_static_cache_is_one_graph_for_64_steps(no_kernels):
    torch._dynamo.reset()
    counters.clear()
    model, ids = made(num_hidden_layers=1), prompt(1, 70)
    eager, own = (transformers.StaticCache(config=model.config, max_cache_len=70) for _ in range(2))
    for one in (eager, own):
        model(ids[:, :5], past_key_values=one)
    compiled = torch.compile(model, backend="megacpp", options={"strict": True})

    def step(called, at, past):
        place = torch.tensor([at])
        return called(ids[:, at : at + 1], past_key_values=past, cache_position=place, position_ids=place[None]).logits

    with megacpp_compile.record() as report:
        got = [step(compiled, 5, own)]
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        got += [step(compiled, at, own) for at in range(6, 70)]
    assert report.counts["mla_decode"] == 1, report.misses
    assert graphs == counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for at, logits in zip(range(5, 70), got, strict=True):
        torch.testing.assert_close(logits, step(model, at, eager), msg=lambda m, at=at: f"step {at}: {m}")
