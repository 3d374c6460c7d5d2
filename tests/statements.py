"""How many statements the package has, by folder. Blank lines, docstrings, imports and signatures are none.

    python -m tests.statements
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

_NONE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def statements(text: str) -> int:
    """Those of a module's source."""
    found = list(ast.walk(ast.parse(text)))
    documented = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    docstrings = sum(ast.get_docstring(n) is not None for n in found if isinstance(n, documented))
    return sum(isinstance(n, ast.stmt) and not isinstance(n, _NONE) for n in found) - docstrings


def by_folder(root: Path) -> Counter[str]:
    counts = Counter[str]()
    for path in root.rglob("*.py"):
        below = path.relative_to(root).parts
        counts[below[0] if len(below) > 1 else "."] += statements(path.read_text())
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("megacpp_compile"), help="what to count")
    counted = by_folder(parser.parse_args().folder)
    for folder, count in sorted(counted.items()):
        print(f"{folder:16} {count:6}")
    print(f"{'all':16} {counted.total():6}")
