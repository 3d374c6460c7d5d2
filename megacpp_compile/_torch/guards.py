"""What Dynamo knows of the frame it compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._guards import TracingContext, tracing
else:
    __getattr__ = theme(__name__)
