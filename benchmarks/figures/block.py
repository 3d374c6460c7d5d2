"""How near a block comes to its GEMMs and attention alone: a panel for each size, a row for each compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.figures import style

LIMIT = "GEMMs and attention alone"
OTHER_RUN = Path(__file__).parents[2] / "docs" / "h200" / "block_other_run.json"
BELOW, ABOVE = 0.80, 1.30  # what is further off is written at the border
_NAMES = {
    "kernels wired by hand, Inductor": "RoPE kernels wired by hand + Inductor",
    "megacpp, float8": "megacpp, fp8_current",
    "megacpp, float8 by blocks": "megacpp, fp8_block",
    "torchao float8 tensorwise": "torchao fp8 tensorwise + Inductor",
    "torchao float8 rowwise": "torchao fp8 rowwise + Inductor",
}


def draw(document: dict[str, Any], path: Path) -> bool:
    """Write the PNG; False where the limit was not measured."""
    import matplotlib.pyplot as plt

    tables = [t for t in document["tables"] if "backward" in t["measure"]]
    ratios = {t["case"]: _ratios(t) for t in tables}
    if not tables or not all(ratios.values()):
        return False
    other = json.loads(OTHER_RUN.read_text())["rows"] if OTHER_RUN.exists() and not document["quick"] else []
    kinds = {r["name"]: r["kind"] for t in tables for r in t["rows"]}
    names = [n for n in kinds if any(n in ratios[c] for c in ratios) and n not in (LIMIT, "Inductor, again")]
    ends = [*(_NAMES.get(n, n) for n in names), *(r["name"] for r in other)]
    half = [[n for n in ends if ("fp8" in n) == fp8] for fp8 in (False, True)]
    order = [*half[0], *([""] if half[1] else []), *half[1]]
    place = {name: -i for i, name in enumerate(order)}
    figure, axes = plt.subplots(1, len(tables), figsize=(3.0 * len(tables) + 2.6, 0.30 * len(order) + 1.7), sharey=True,
                                squeeze=False, layout="constrained")  # fmt: skip
    for axis, table in zip(axes[0], tables, strict=True):
        axis.axvline(1, color=style.INK, linewidth=1.2)
        found = ratios[table["case"]]
        for name in names:
            if name in found:
                _dot(axis, place[_NAMES.get(name, name)], *found[name], style.COLOURS[kinds[name]], True)
        if (again := found.get("Inductor, again")) is not None:
            axis.plot(again[0], place["Inductor"], "o", markersize=6, color=style.INDUCTOR, fillstyle="none")
        for row in other:
            if table["case"] in row["ratio"]:
                value = row["ratio"][table["case"]]
                _dot(axis, place[row["name"]], value, value, value, style.PEER, False)
        axis.set_xlim(BELOW, ABOVE)
        axis.set_xticks([0.8, 0.9, 1.0, 1.1, 1.2])
        limit = next(r for r in table["rows"] if r["name"] == LIMIT)["ms"]["median"]
        axis.set_title(f"{table['case']}  (limit {limit:.2f} ms)", fontsize=9, loc="left")
        axis.set_xlabel("time / limit", fontsize=8)
        style.quiet(axis, "x")
    axes[0][0].set_yticks([place[n] for n in order if n], [n for n in order if n], fontsize=8)
    axes[0][0].set_ylim(-len(order) + 0.4, 0.7)
    if half[1]:
        for axis in axes[0]:
            axis.axhline(place[""], color="#bbbbbb", linewidth=0.8)
    notes = ["limit: the same bf16 GEMMs and attention, nothing between them", "lines: fastest and slowest turn"]
    notes += ["hollow circle: Inductor measured again"]
    notes += ["diamonds: another run, over its own limit"] if other else []
    question = "How near is an MLA block, forward + backward, to its GEMMs and attention alone?"
    style.title(figure, document, question, *notes)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _dot(axis: Any, y: float, value: float, low: float, high: float, colour: str, filled: bool) -> None:
    if value > ABOVE:
        axis.annotate(f"{value:.2f} →", (ABOVE, y), ha="right", va="center", fontsize=8, color=colour)
        return
    axis.plot([low, high], [y, y], color=colour, linewidth=1.5, alpha=0.5)
    axis.plot(value, y, "o" if filled else "D", color=colour, markersize=6 if filled else 5,
              fillstyle="full" if filled else "none")  # fmt: skip
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the limit's line would cross the number
    axis.annotate(f"{value:.2f}", (max(value, high), y), (6, 0), textcoords="offset points", va="center", fontsize=7,
                  color=colour, bbox=behind)  # fmt: skip


def _ratios(table: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Row -> (median, least, most), each over the limit's median."""
    timed = {r["name"]: r["ms"] for r in table["rows"] if "ms" in r}
    if LIMIT not in timed:
        return {}
    limit = timed[LIMIT]["median"]
    return {name: (ms["median"] / limit, ms["min"] / limit, ms["max"] / limit) for name, ms in timed.items()}
