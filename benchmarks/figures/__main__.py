"""Draws the pictures of the documentation from JSON files of the suite.

    python -m benchmarks.figures --out docs/figures docs/h200/block.json docs/h200/remat.json

A subject's picture takes the name of its file. The grid of models by passes is
`python -m benchmarks.recall_table --figure docs/figures/recall.png docs/generated/recall.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures


def main(argv: Sequence[str] | None = None) -> int:
    """Draw each file; 1 when one of them has nothing to draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder (default %(default)s)")
    a = parser.parse_args(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for file in a.files:
        path = a.out / f"{file.stem}.png"
        drawn.append(figures.draw(json.loads(file.read_text()), path))
        print(f"wrote {path}" if drawn[-1] else f"{file}: nothing to draw, or matplotlib is not installed")
    return 0 if all(drawn) else 1


if __name__ == "__main__":
    sys.exit(main())
