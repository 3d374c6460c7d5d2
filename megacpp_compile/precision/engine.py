"""Imports Transformer Engine on demand, and says why where it is not available.

Facts of its API are those of 2.20: `autocast`, `quantized_model_init`, `checkpoint`, `initialize_ub`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

# Recipe -> class in transformer_engine.common.recipe, and the function that says whether the device supports it.
_CLASSES = {
    "fp8_current": ("Float8CurrentScaling", "is_fp8_available"),
    "fp8_block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "fp8_delayed": ("DelayedScaling", "is_fp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),  # Transformer Engine 2.8 and newer
}
_NEEDED = ("autocast", "quantized_model_init", "checkpoint", "Linear", "LayerNormLinear")

# One object a recipe and its `disable_rht`: Transformer Engine keys its state by the object.
_recipes: dict[tuple[str, bool | None], Any] = {}
_suspended = 0


def load() -> tuple[Any, str]:
    """(module `transformer_engine.pytorch`, "") or (None, why it cannot be imported or used).

    Any failure counts: a missing package, another torch's ABI, a library that does not load, a machine without CUDA.
    """
    missing = why_no_device()
    if missing:
        return None, missing
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
    return te, ""


def why_no_device() -> str:
    """Why this process cannot construct any module of Transformer Engine, "" where it can."""
    return "" if torch.cuda.is_available() else "no CUDA device"


def lacks(te: Any, recipe: str) -> str:
    """Why `recipe` cannot run with the Transformer Engine `te` on this device, "" where it can."""
    missing = [name for name in _NEEDED if not hasattr(te, name)]
    if missing:
        return f"this Transformer Engine has no {', '.join(missing)}: 2.20 has"
    asked = getattr(te, _CLASSES[recipe][1], None)
    if asked is None:
        return f"this Transformer Engine has no {_CLASSES[recipe][1]}, and so no {recipe}: 2.20 has"
    available, reason = asked(return_reason=True)
    return "" if available else f"{recipe}: {reason or 'not available on this device'}"


def recipe_object(recipe: str, disable_rht: bool | None = None) -> Any:
    """Transformer Engine's object for a recipe of `config.precision.RECIPES`, with its defaults: e4m3 in forward and
    e5m2 for gradients; under "fp8_block" e4m3 for both. disable_rht: of "nvfp4", None for its default."""
    key = recipe, disable_rht
    if key not in _recipes:
        classes = importlib.import_module("transformer_engine.common.recipe")
        settings = {} if disable_rht is None else {"disable_rht": disable_rht}
        _recipes[key] = getattr(classes, _CLASSES[recipe][0])(**settings)
    return _recipes[key]


def user_buffers_initialised() -> bool:
    """Whether `transformer_engine.pytorch.initialize_ub` has been called; does not import it."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is None:
        return False
    asked = getattr(base, "is_ub_initialized", None)
    return bool(asked()) if asked is not None else getattr(base, "_ub_communicators", None) is not None


def in_autocast(recipe: str, disable_rht: bool | None = None) -> bool:
    """Whether an autocast is active whose recipe is the object of `recipe_object(recipe, disable_rht)`."""
    state = sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    return bool(state.is_fp8_enabled()) and state.get_fp8_recipe() is recipe_object(recipe, disable_rht)


def fp8_in_force() -> bool:
    """Whether an fp8 autocast of Transformer Engine's is active, whoever entered it; does not import it."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    return quantization is not None and bool(quantization.FP8GlobalStateManager.is_fp8_enabled())


def is_of_transformer_engine(module: torch.nn.Module) -> bool:
    """Whether the class of `module` is Transformer Engine's or derived from one of its; does not import it."""
    return any(c.__module__.partition(".")[0] == "transformer_engine" for c in type(module).__mro__)


@contextlib.contextmanager
def high_precision() -> Iterator[None]:
    """Inside, modules that `replace_linears` put in place compute in their parameters' dtype instead of fp8.

    It tells whether fp8 is what breaks a run. Use it around whole steps, as forward and backward have to agree.
    """
    global _suspended
    _suspended += 1
    try:
        yield
    finally:
        _suspended -= 1


def suspended() -> bool:
    """Whether `high_precision` is active."""
    return _suspended > 0
