"""The package's sources as trees, parsed once, which takes a second: tests that read them are in one group."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import megacpp_compile

PACKAGE = Path(megacpp_compile.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
ON_ONE_WORKER = pytest.mark.xdist_group("sources")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))
