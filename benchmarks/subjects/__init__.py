"""What is measured, one file each: `tables(settings)` gives the tables of a subject, one after the other."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import Settings

NAMES = (
    "rope", "rope_gqa", "down_norm_up", "causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule", "mixer",
    "moe", "sparse_mla", "dsa", "mla_decode", "fp8_gemms", "head", "block", "stack",
    "language_model", "remat", "remat_peaks", "compile_time",
)  # fmt: skip
RENAMED = {"fp8_products": "fp8_gemms"}  # taken with a warning until the next release


def current(name: str) -> str:
    """The present name of a subject that is asked for by an old one; any other name as it is."""
    if name not in RENAMED:
        return name
    warnings.warn(f"the subject {name} is now called {RENAMED[name]}", FutureWarning, stacklevel=2)
    return RENAMED[name]


def tables_of(name: str) -> Callable[[Settings], Iterator[dict[str, Any]]]:
    return importlib.import_module(f"benchmarks.subjects.{name}").tables
