"""Tensors without data, and the mode that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        disable_fake_tensor_cache,
        is_fake,
    )
else:
    __getattr__ = theme(__name__)
