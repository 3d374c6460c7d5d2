"""A grid of models by passes: where an idiom fires at every site, at some, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import style

# (must fire, may fire or None where nobody has counted, fired)
Cell = tuple[int, int | None, int]
FULL, UNCOUNTED, PARTLY, NOTHING = "#2b6a4d", "#9cc9a9", "#e8a33d", "#f2f2f2"
_LEGEND = {
    FULL: "fires at every site counted by hand",
    UNCOUNTED: "fires; sites not counted",
    PARTLY: "fires at some of the sites",
    NOTHING: "does not fire: no such idiom, not required, or not counted",
}


def colour(cell: Cell) -> str:
    """What a cell says, as a colour."""
    must, may, fired = cell
    if fired == 0:
        return PARTLY if must else NOTHING
    if may is None:
        return UNCOUNTED
    return FULL if fired >= must else PARTLY


def draw(passes: Sequence[str], models: Sequence[tuple[str, Sequence[Cell] | None]], path: Path) -> None:
    """Write the PNG. `models`: name and a cell for each pass, or None where the model does not run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    figure, axis = plt.subplots(figsize=(7.4, 0.262 * len(models) + 1.75), layout="constrained")
    for y, (_, cells) in enumerate(models):
        for x, cell in enumerate(cells or ()):
            shade = colour(cell)
            axis.add_patch(Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, facecolor=shade, edgecolor="none"))
            ink = "white" if shade == FULL else style.INK
            axis.text(x, y, _text(cell), ha="center", va="center", fontsize=7, color=ink)
    axis.set_xlim(-0.5, len(passes) - 0.5)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.set_xticks(range(len(passes)), passes, rotation=25, ha="left", fontsize=8)
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(models)), [name for name, _ in models], fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.legend(handles=[Patch(facecolor=c, label=said) for c, said in _LEGEND.items()], ncols=2, fontsize=8,
                  frameon=False, loc="outside lower center")  # fmt: skip
    figure.suptitle("What fires in other people's models (number: sites)", fontsize=11, x=0.01, ha="left",
                    fontweight="bold")  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _text(cell: Cell) -> str:
    must, _, fired = cell
    return f"{fired} of {must}" if fired < must else str(fired or "")
