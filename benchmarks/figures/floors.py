"""How many times its floor each row takes: a line for each case, a panel for each measure, a log axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import style

_KINDS = {"eager": "eager", "inductor": "Inductor", "ours": "megacpp", "kernels": "our kernels, called alone",
          "peer": "other people's kernels", "limit": "GEMMs and attention alone"}  # fmt: skip
_NARROW, _WIDE = (1, 1.25, 1.5, 2, 2.5, 3, 4), (1, 2, 4, 8, 16, 32, 64)  # ticks by how far the axis reaches
_MARKERS = {"eager": "o", "inductor": "o", "ours": "o", "kernels": "^", "peer": "s", "limit": "|"}


def draw(document: dict[str, Any], path: Path) -> bool:
    """Write the PNG; False when no row has both a time and a floor."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    tables = [t for t in document["tables"] if t["floor_ms"] and any("ms" in r for r in t["rows"])]
    if not tables:
        return False
    measures = list(dict.fromkeys(t["measure"] for t in tables))
    cases = list(dict.fromkeys(t["case"] for t in tables))
    # Of one case the rows are told by name; of several each case is a line.
    lines = cases if len(cases) > 1 else [r["name"] for r in tables[0]["rows"] if "ms" in r and r["kind"] in _KINDS]
    height = (0.42 if len(cases) > 1 else 0.27) * len(lines) + 1.6
    figure, axes = plt.subplots(1, len(measures), figsize=(9, height), sharex=True, sharey=True, squeeze=False,
                                layout="constrained")  # fmt: skip
    seen: dict[str, Any] = {}
    for table in tables:
        axis = axes[0][measures.index(table["measure"])]
        rows = [r for r in table["rows"] if "ms" in r and r["kind"] in _KINDS]
        # Options of ours are hollow, so that the default stands out.
        for r in sorted(rows, key=lambda r: r["kind"] == "ours"):
            plain = r["kind"] != "ours" or r["name"].endswith("megacpp")
            y = -lines.index(table["case"] if len(cases) > 1 else r["name"])
            (mark,) = axis.plot(
                r["ms"]["median"] / table["floor_ms"], y, _MARKERS[r["kind"]], color=style.COLOURS[r["kind"]],
                markersize=7, fillstyle="full" if plain else "none",
            )  # fmt: skip
            if plain:
                seen.setdefault(_KINDS[r["kind"]], mark)
    furthest = max(r["ms"]["median"] / t["floor_ms"] for t in tables for r in t["rows"] if "ms" in r)
    for axis, measure in zip(axes[0], measures, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("time / floor, log scale", fontsize=8)
        axis.xaxis.set_major_locator(FixedLocator(_NARROW if furthest < 4 else _WIDE))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axis.axvline(1, color=style.INK, linewidth=1)
        axis.set_title(measure, fontsize=9, loc="left")
        style.quiet(axis, "x")
    axes[0][0].set_yticks([-i for i in range(len(lines))], lines)
    axes[0][0].set_ylim(-len(lines) + 0.4, 0.6)
    if len(cases) > 1:
        figure.legend(seen.values(), seen.keys(), loc="outside right upper", fontsize=8, frameon=False)
    style.title(figure, document, f"{document['subject']}: how many times its floor?", "hollow: megacpp with an option")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
