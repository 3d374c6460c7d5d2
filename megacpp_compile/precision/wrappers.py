"""Forwards to `megacpp_compile.nn.fp8_wrappers`, its new name, with a warning; gone in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from megacpp_compile.nn import fp8_wrappers


def __getattr__(name: str) -> Any:
    found = getattr(fp8_wrappers, name)
    if not name.startswith("_"):
        new = f"megacpp_compile.nn.fp8_wrappers.{name}"
        warnings.warn(f"megacpp_compile.precision.wrappers.{name} is now {new}", FutureWarning, stacklevel=2)
    return found
