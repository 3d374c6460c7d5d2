"""Six layers of MLA and SwiGLU with their norms: the time and the memory of something like a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import limits, models
from benchmarks.harness import Case, Contestant, Settings, run_case
from benchmarks.modules import module_case
from benchmarks.subjects.block import QUICK, SIZES, Size, inputs


def stack(size: Size, hidden: int, layers: int) -> models.Stack:
    return models.Stack([models.Layer(size.attention(), size.dim, hidden) for _ in range(layers)])


def cases(settings: Settings) -> Iterator[Case]:
    size, hidden, layers = (QUICK[0], 96, 2) if settings.quick else (SIZES[0], 5632, 6)
    model = stack(size, hidden, layers).to(settings.device, torch.bfloat16)
    mlp = [(size.dim, hidden), (size.dim, hidden), (hidden, size.dim)]
    linear = limits.linear_flops(size.batch * size.tokens, [*size.gemms, *mlp])
    forward = layers * (linear + size.attention_flops())
    step = layers * (3 * linear + 3.5 * size.attention_flops())
    limit = Contestant(
        "GEMMs and attention alone", "limit", lambda: limits.mla(size, settings.device, mlp, layers)
    )
    sizes = {**dataclasses.asdict(size), "hidden": hidden, "layers": layers}
    name = f"{layers} layers of {size.name}"
    yield module_case("stack", name, sizes, model, inputs(size, settings), forward, step, lambda grad: [limit], True)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
