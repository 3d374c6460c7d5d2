"""The picture of `megacpp plan`: a point per policy, and their names in a column beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_compile.errors import BadOptionError, PackageMissingError
from megacpp_compile.memory.pareto import Point
from megacpp_compile.report.text import bytes_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREY = "#999999"


def check(path: str) -> None:
    """That the picture can be drawn into the file `path`, before what it shows is computed. Raises PackageMissingError
    without matplotlib, BadOptionError for an ending that matplotlib has no format for, and OSError where no file can be
    written."""
    figure = _figure()
    ending = Path(path).suffix[1:].lower()
    if ending and ending not in figure.canvas.get_supported_filetypes():
        raise BadOptionError("--plot", path, "a file such as plan.png, plan.svg or plan.pdf")
    there = Path(path).exists()
    with open(path, "ab"):
        pass
    if not there:
        Path(path).unlink()


def plot(found: Sequence[Point], path: str) -> None:
    """Draw the policies into the file `path`. Raises what `check` does."""
    figure = _figure()
    draw(figure, found)
    figure.savefig(path, dpi=150)


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissingError("matplotlib", "--plot", str(error)) from error
    return Figure()


def draw(figure: Figure, found: Sequence[Point]) -> None:
    """Draw the policies into a figure of matplotlib's."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure.set_size_inches(10, 5.5)
    axes = figure.add_axes((0.1, 0.11, 0.48, 0.8))
    front = [p for p in found if p.best]
    axes.plot([p.peak for p in front], [p.seconds for p in front], "-", color="tab:blue", zorder=1)
    for p in found:
        axes.plot(p.peak, p.seconds, "o", color="tab:blue" if p.best else _GREY, zorder=2)
    axes.margins(0.08)
    low, high = axes.get_xlim()
    unit = 1024 ** int(math.log(max(high, 1), 1024))  # ticks are round in the unit they are written in
    axes.set_xticks([t * unit for t in MaxNLocator(5).tick_values(low / unit, high / unit) if low <= t * unit <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))
    axes.set_xlabel("estimated peak of a step")
    axes.set_ylabel("modelled time added to a step")
    axes.set_title("checkpointing policies (blue: no other takes as little time at as low a peak)", fontsize=9)
    # Names stand in a column in the order of their points, each tied to its own, so that none lies on another.
    ordered = sorted(found, key=lambda p: (p.seconds, -p.peak))
    for i, p in enumerate(ordered):
        name = p.name if not p.alike else f"{p.name}, and {len(p.alike)} alike"
        height = 0.5 if len(ordered) == 1 else i / (len(ordered) - 1)
        axes.annotate(
            f"{name}: {bytes_text(p.peak)}, +{seconds_text(p.seconds)}",
            (p.peak, p.seconds), (1.04, height), textcoords="axes fraction", fontsize=7.5, va="center",
            color="black" if p.best else "#666666",
            arrowprops={"arrowstyle": "-", "color": _GREY, "linewidth": 0.4, "relpos": (0, 0.5)}, zorder=0,
        )  # fmt: skip
