"""A grid of models by passes: where an idiom fires at every site, at some, or not at all; and by conditions, whether
the same sites fire under each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_CONDITIONS = "on the right: how many of the sites fire under other conditions, all passes; blank: fails or not run"
_GAP = 0.6


def colour(cell: Cell) -> str:
    """What a cell says, as a colour."""
    must, may, fired = cell
    if fired == 0:
        return PARTLY if must else NOTHING
    if may is None:
        return UNCOUNTED
    return FULL if fired >= must else PARTLY


def draw(
    passes: Sequence[str], models: Sequence[tuple[str, Sequence[Cell] | None]], path: Path,
    conditions: Sequence[str] = (), under: Mapping[str, Sequence[Cell | None]] | None = None,
) -> None:  # fmt: skip
    """Write the PNG. `models`: name and a cell for each pass, or None where the model does not run. under: model -> a
    cell for each of `conditions`, of which every site counts as one that must fire."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    places = [*range(len(passes)), *(len(passes) + _GAP + i for i in range(len(conditions)))]
    figure, axis = plt.subplots(
        figsize=(3.2 + 0.6 * len(places), 0.262 * len(models) + 1.75 + 0.2 * bool(conditions)), layout="constrained"
    )
    for y, (name, cells) in enumerate(models):
        blank: list[Cell | None] = [None] * len(passes)
        row = [*(cells or blank), *(under or {}).get(name, ())]
        for x, cell in zip(places, row, strict=False):
            if cell is None:
                continue
            shade = colour(cell)
            axis.add_patch(Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, facecolor=shade, edgecolor="none"))
            ink = "white" if shade == FULL else style.INK
            axis.text(x, y, _text(cell), ha="center", va="center", fontsize=7, color=ink)
    axis.set_xlim(-0.5, places[-1] + 0.5)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.set_xticks(places, [*passes, *conditions], rotation=25, ha="left", fontsize=8)
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(models)), [name for name, _ in models], fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    handles = [Patch(facecolor=c, label=said) for c, said in _LEGEND.items()]
    handles += [Patch(facecolor="none", label=_CONDITIONS)] * bool(conditions)
    figure.legend(handles=handles, ncols=2, fontsize=8,
                  frameon=False, loc="outside lower center")  # fmt: skip
    figure.suptitle("What fires in other people's models (number: sites)", fontsize=11, x=0.01, ha="left",
                    fontweight="bold")  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _text(cell: Cell) -> str:
    must, _, fired = cell
    return f"{fired} of {must}" if fired < must else str(fired or "")
