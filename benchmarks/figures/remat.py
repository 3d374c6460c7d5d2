"""What memory costs in time: each setting by the peak and the time of its step, and the front that none beats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import style

GIB = 1024.0  # MiB


def draw(document: dict[str, Any], path: Path) -> bool:
    """Write the PNG; False where fewer than three rows have both a time and a peak."""
    import matplotlib.pyplot as plt

    table = document["tables"][-1]
    rows = [r for r in table["rows"] if "ms" in r and "peak_mib" in r and r["kind"] not in ("control", "eager")]
    if len(rows) < 3:
        return False
    figure, axis = plt.subplots(figsize=(8.6, 5.4), layout="constrained")
    at = {r["name"]: (r["peak_mib"] / GIB, r["ms"]["median"]) for r in rows}
    best = front([*at.values()])
    steps_x, steps_y = [best[0][0]], [best[0][1]]
    for (_, above), (x, y) in zip(best, best[1:], strict=False):
        steps_x += [x, x]
        steps_y += [above, y]
    axis.plot(steps_x, steps_y, color="#bbbbbb", linewidth=5, alpha=0.55, zorder=1, solid_joinstyle="round")
    budgets = [at[r["name"]] for r in rows if r["kind"] == "inductor" and "whole blocks" not in r["name"]]
    axis.plot(*zip(*budgets, strict=True), color=style.INDUCTOR, linewidth=1, alpha=0.6, zorder=2)
    for r in rows:
        marker = "s" if "whole blocks" in r["name"] else "o"
        axis.plot(*at[r["name"]], marker, color=style.COLOURS[r["kind"]], markersize=7, zorder=3)
    labels = [(*at[r["name"]], _short(r["name"]), style.COLOURS[r["kind"]]) for r in rows]
    axis.margins(0.08)
    axis.set_xlim(0, 1.12 * max(x for x, _ in at.values()))
    style.quiet(axis, "both")
    axis.set_xlabel("peak memory of a step beyond parameters and inputs, GiB", fontsize=9)
    axis.set_ylabel("forward + backward, ms", fontsize=9)
    handles = [
        plt.Line2D([], [], color=style.OURS, marker="o", linestyle="", label="megacpp, options={\"policy\": ...}"),
        plt.Line2D([], [], color=style.INDUCTOR, marker="o", linewidth=1, label="Inductor, activation_memory_budget"),
        plt.Line2D([], [], color=style.INDUCTOR, marker="s", linestyle="", label="Inductor, torch.utils.checkpoint"),
        plt.Line2D([], [], color="#bbbbbb", linewidth=5, alpha=0.55, label="Pareto front"),
    ]
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="upper right")
    question = f"What does a lower peak cost? {table['case']}, MLA and SwiGLU"
    style.title(figure, document, question, "lower left is better", "line: Inductor's budget from 1.0 down")
    style.label_points(axis, labels)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is at most equal to in both coordinates, by the first of them."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def _short(name: str) -> str:
    name = name.removeprefix("megacpp, ").removeprefix("Inductor, ")
    return {"megacpp": "no policy", "Inductor": "no budget", "whole blocks by hand": "every block"}.get(name, name)
