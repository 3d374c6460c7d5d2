"""Routed experts as a loop over all of them, with shared experts beside: separate Linears, and one tensor of all.

Eager and Inductor wait for the device at every expert, which `waits` in the JSON says of each row.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import limits, models
from benchmarks.harness import Case, Contestant, Settings, run_case
from benchmarks.modules import module_case

# dim, hidden, experts, choices, shared experts, tokens
SIZE, QUICK = (2048, 1408, 64, 6, 2, 16384), (32, 16, 4, 2, 1, 24)


def cases(settings: Settings) -> Iterator[Case]:
    dim, hidden, experts, choices, shared, tokens = QUICK if settings.quick else SIZE
    shapes = [(dim, 2 * hidden), (hidden, dim)]
    alone = functools.partial(limits.of_gemms, tokens * (choices + shared), shapes, settings.device)
    dense = Contestant("its GEMMs alone, dense", "limit", alone)
    for name, stacked in (("separate weights", False), ("stacked weights", True)):
        model = models.RangeLoopMoE(dim, hidden, experts, choices, shared, stacked).to(settings.device, torch.bfloat16)
        anew = functools.partial(code_of_its_own, model, dim, hidden, experts, choices, shared, stacked)
        x = torch.randn(tokens, dim, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
        sizes = {"dim": dim, "hidden": hidden, "experts": experts, "choices": choices, "shared": shared,
                 "tokens": tokens}  # fmt: skip
        gemms = 3 * [(dim, hidden)] * (choices + shared)
        flops = limits.linear_flops(tokens, gemms)
        yield module_case("moe", name, sizes, model, (x,), flops, more=lambda grad: [dense], anew=anew)


def code_of_its_own(model: nn.Module, *sizes: Any) -> nn.Module:
    """`model`, parameters included, of a class that no compiler has seen."""
    spec = importlib.util.find_spec(models.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.device("meta"):
        made: nn.Module = module.RangeLoopMoE(*sizes)
    made.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return made


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
