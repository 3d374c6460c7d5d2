"""Torch's structured log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._logging import trace_structured
else:
    __getattr__ = theme(__name__)
