"""Checkpoints around fp8 linears of Transformer Engine: a plain recompute would upset the history of their scales."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megacpp_compile.errors import PackageMissingError
from megacpp_compile.remat.policy import CheckpointingPolicy


def wrapper(policy: CheckpointingPolicy | None) -> Callable[..., Any] | None:
    """What an fp8 layer is to be called through: `wrapper(policy)(layer, *args)`; None: it is called as it is.

    Under "te_checkpoint" this is `transformer_engine.pytorch.checkpoint`, which tells its layers that a forward is a
    recomputation. Raises PackageMissingError where Transformer Engine cannot be imported; nothing before imports it.
    """
    if policy is None or policy.fp8_wrapper == "none":
        return None
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # OSError: a library of CUDA that is not there
        raise PackageMissingError("transformer_engine", 'policy.fp8_wrapper = "te_checkpoint"', str(error)) from error
    found: Callable[..., Any] = engine.checkpoint
    return found
