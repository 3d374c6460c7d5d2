"""Pictures of a run: how far from the limit, what memory costs in time, what fires where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import block, floors, remat

# Subjects with a question of their own; every other one shows its distance from the floor.
DRAWN = {"block": block.draw, "remat": remat.draw}
WITHOUT = {"remat_peaks"}  # its predictions agree with what was measured to 0.1 %: nothing to see


def draw(document: dict[str, Any], path: Path) -> bool:
    """Write the PNG of one subject's JSON; False when matplotlib is not installed or there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    subject = document["subject"]
    if subject in WITHOUT:
        return False
    return (subject in DRAWN and DRAWN[subject](document, path)) or floors.draw(document, path)
