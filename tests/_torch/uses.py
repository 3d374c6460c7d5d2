"""Which files of the package use which row of the table of torch's private symbols."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict

from megacpp_compile._torch.symbols import SYMBOLS
from tests.sources import PACKAGE, SOURCES, nodes

DOOR = "megacpp_compile._torch"


@functools.cache
def users() -> dict[str, list[str]]:
    """Key in SYMBOLS -> files: that import the name or read it from its theme; for a row without a name, that have the
    last part of its path as an attribute, an argument or a word."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        if path.name == "symbols.py":
            continue
        file = path.relative_to(PACKAGE.parent).as_posix()
        words: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DOOR):
                theme = (node.module or "").removeprefix(DOOR).lstrip(".")
                for alias in node.names:
                    found[f"{theme}.{alias.name}"].add(file)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
                if isinstance(node.value, ast.Name):
                    found[f"{node.value.id}.{node.attr}"].add(file)
            elif isinstance(node, ast.keyword):
                words.add(node.arg or "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= {node.value, node.value.rpartition(".")[2]}
        for key, symbol in SYMBOLS.items():
            if not symbol.name and symbol.path.rpartition(".")[2] in words:
                found[key].add(file)
    return {key: sorted(files) for key, files in found.items() if key in SYMBOLS}
