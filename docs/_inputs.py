"""A number for all that `make docs` reads: pages, pictures, settings, and the package without its code.

`make docs` writes it to `docs/.built` after a build without a broken link; `make docs-if-changed` builds where it is
another now.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def signatures(source: str) -> str:
    """Python source as its docstrings, signatures and assignments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[: ast.get_docstring(node) is not None] or [ast.Pass()]
    return ast.unparse(tree)


def number() -> str:
    whole = hashlib.sha256()
    pages = [path for path in (ROOT / "docs").rglob("*.*") if path.is_file() and path.suffix not in (".pyc", "")]
    for path in sorted([*pages, ROOT / "mkdocs.yml", *(ROOT / "megacpp_compile").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        text = signatures(path.read_text()).encode() if name.startswith("megacpp_compile") else path.read_bytes()
        whole.update(name.encode() + b"\0" + hashlib.sha256(text).digest())
    return whole.hexdigest()


if __name__ == "__main__":
    print(number())
