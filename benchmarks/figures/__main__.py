"""Draws the pictures of the documentation from JSON files of the suite.

    python -m benchmarks.figures --out docs/figures docs/h200/block.json docs/h200/remat.json

Needs matplotlib. A subject's picture takes the name of its file. The grid of models by passes is
`python -m benchmarks.recall_table --figure docs/figures/recall.png docs/generated/recall.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import arguments, figures


def main(argv: Sequence[str] | None = None) -> int:
    """Draw each file; 1 when one of them has nothing to draw."""
    parser = arguments.parser("benchmarks.figures", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="what the suite wrote, by subject")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder")
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
