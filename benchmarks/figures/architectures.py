"""Training steps of architectures as ratios to Inductor's: time, peak and first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.architectures import ratio
from benchmarks.figures import style

_PANELS = (("least_ms", "time of a step"), ("peak_mib", "peak memory"), ("first_s", "first step, cold"))


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the PNG: an architecture a row, the slowest last; left of the line is less than Inductor takes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [m for m in document["architectures"] if ratio(m, "megacpp", "least_ms")]
    timed.sort(key=lambda m: ratio(m, "megacpp", "least_ms") or 0)
    figure, axes = plt.subplots(
        1, len(_PANELS), sharey=True, figsize=(9.5, 0.21 * len(timed) + 1.5), layout="constrained"
    )
    for axis, (key, name) in zip(axes, _PANELS, strict=True):
        for y, model in enumerate(timed):
            if (r := ratio(model, "megacpp", key)) is not None:
                axis.plot([1, r], [y, y], color=style.OURS if r <= 1 else style.EAGER, linewidth=1.5)
                axis.plot(r, y, "o", color=style.OURS if r <= 1 else style.EAGER, markersize=5)
        axis.axvline(1, color=style.INDUCTOR, linewidth=1)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xlim(left=0)
        style.quiet(axis, "x")
    axes[0].set_yticks(range(len(timed)), [m["name"] for m in timed], fontsize=8)
    axes[0].invert_yaxis()
    newest = max((m["conditions"] for m in document["architectures"]), key=lambda where: where["date"])
    style.title(figure, {"conditions": newest}, "What does a training step take, of Inductor's?",
                "blue: Inductor; red: less than it; transformers' code, 4 layers at real widths, bfloat16")  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)
