"""torchao's float8 training on the plain block, under Inductor: what a change of precision buys.

Its rows have a bound of their own, as float8 has three bits of mantissa.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Contestant, Missing, Runner, training
from benchmarks.variants import FP8_BOUND


def block(model: nn.Module, inputs: Sequence[Tensor], grad: Tensor) -> list[Contestant]:
    def contestant(recipe: str) -> Contestant:
        return Contestant(f"torchao float8 {recipe}", "peer", lambda: _build(recipe, model, inputs, grad), FP8_BOUND)

    return [contestant("tensorwise"), contestant("rowwise")]


def _build(recipe: str, model: nn.Module, inputs: Sequence[Tensor], grad: Tensor) -> Runner:
    if inputs[0].device.type != "cuda":
        raise Missing("float8 GEMMs need CUDA")
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except Exception as error:
        raise Missing(f"torchao: {type(error).__name__}: {error}") from None
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    converted = copy.deepcopy(model)
    # Widths that are no multiple of 16 are beyond the scaled GEMM, and kv_a gains nothing.
    float8.convert_to_float8_training(converted, config=config, module_filter_fn=lambda _, name: "kv_a" not in name)
    return training(torch.compile(converted), inputs, [inputs[0], *converted.parameters()], [grad])
