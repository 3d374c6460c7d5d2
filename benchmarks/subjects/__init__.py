"""What is measured, one file each: `tables(settings)` gives the tables of a subject, one after the other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import Settings

NAMES = (
    "rope", "rope_gqa", "down_norm_up", "causal_conv1d", "gated_rms_norm", "ssd", "mixer", "moe",
    "sparse_mla", "fp8_products", "block", "stack", "remat", "remat_peaks", "compile_time",
)  # fmt: skip


def tables_of(name: str) -> Callable[[Settings], Iterator[dict[str, Any]]]:
    return importlib.import_module(f"benchmarks.subjects.{name}").tables
