"""How a module of this folder hands out the symbols of its theme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megacpp_compile._torch.symbols import SYMBOLS


def theme(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of this folder: its symbols by the names the table gives them."""
    prefix = module.rpartition(".")[2]

    def lookup(name: str) -> Any:
        symbol = SYMBOLS.get(f"{prefix}.{name}")
        if symbol is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return symbol.get()

    return lookup
