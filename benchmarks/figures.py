"""The tables of one subject as horizontal bars: median, spread, and the floor as a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"limit": "#9e9e9e", "eager": "#c8c8c8", "inductor": "#7aa6d1", "ours": "#d1495b", "kernels": "#e39aa3",
           "peer": "#8fb08c"}  # fmt: skip


def draw(document: dict[str, Any], path: Path) -> bool:
    """Write the PNG; False when matplotlib is not installed or nothing was measured."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables = [t for t in document["tables"] if any("ms" in row for row in t["rows"])]
    if not tables:
        return False
    counts = [sum("ms" in row for row in t["rows"]) for t in tables]
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(9, sum(0.28 * n + 0.9 for n in counts)), height_ratios=[n + 2.2 for n in counts],
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, table in zip(axes[:, 0], tables, strict=True):
        _bars(axis, table)
    where = document["conditions"]
    figure.suptitle(f"{document['subject']} on {where['device']}, torch {where['torch']}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _bars(axis: Any, table: dict[str, Any]) -> None:
    rows = [row for row in table["rows"] if "ms" in row][::-1]
    medians = [row["ms"]["median"] for row in rows]
    below = [row["ms"]["median"] - row["ms"]["min"] for row in rows]
    above = [row["ms"]["max"] - row["ms"]["median"] for row in rows]
    names = [row["name"] + (" (WRONG)" if row.get("ok") is False else "") for row in rows]
    colours = [COLOURS.get(row["kind"], "#cccccc") for row in rows]
    axis.barh(names, medians, xerr=[below, above], color=colours, capsize=2)
    if table["floor_ms"]:
        axis.axvline(table["floor_ms"], color="black", linewidth=1, linestyle="--")
    for i, row in enumerate(rows):
        axis.text(row["ms"]["max"], i, f" {row['ms']['median']:.3g}", va="center", fontsize=7)
    axis.margins(x=0.12)
    axis.set_title(f"{table['case']}, {table['measure']} (ms; dashed: floor)", fontsize=8, loc="left")
    axis.tick_params(labelsize=7)
