"""Megatron-Core, where it is installed: nothing here imports it before it is asked for.

Facts are those of release 0.16.1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any

from megacpp_compile.errors import PackageMissingError

DISTRIBUTION = "megatron-core"


def version() -> str:
    """Megatron-Core's release, "" where it is not installed or does not say."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("megatron.core"), "__version__", ""))


def loaded(path: str) -> Any:
    """The class at `path`, "megatron.core.transformer.mlp.MLP", if its module is imported and has it; None else. The
    classes of a model that exists are found so, without an import."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None  # Megatron has mocks of what Transformer Engine would bring


def load(path: str, asked: str) -> Any:
    """The same, imported. asked: what needs it, for the error. Raises PackageMissingError."""
    found = try_load(path)
    if isinstance(found, str):
        raise PackageMissingError(DISTRIBUTION, asked, found)
    return found


def try_load(path: str) -> Any:
    """The same, or why it cannot be had, as a string."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a missing package, another torch's, a machine without CUDA
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
