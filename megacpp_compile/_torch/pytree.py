"""Nested containers of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp_compile._torch._theme import theme

if TYPE_CHECKING:
    from torch.utils._pytree import tree_leaves, tree_map
else:
    __getattr__ = theme(__name__)
