"""What the pictures share: colours by who wrote the code, and labels that keep out of each other's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OURS, INDUCTOR, PEER, EAGER, INK, GRID = "#c8324b", "#2f6db3", "#4f8a4b", "#8a8a8a", "#222222", "#e6e6e6"
COLOURS = {"limit": INK, "eager": EAGER, "inductor": INDUCTOR, "control": INDUCTOR, "ours": OURS, "kernels": "#e08a98",
           "peer": PEER}  # fmt: skip
# Where a label may stand, in points from its marker, the most wanted first.
_OFFSETS = [(7, 2), (-7, 0), (6, 8), (-6, 8), (6, -8), (-6, -8), (0, 11), (0, -11), (12, 14), (-12, 14), (12, -14),
            (-12, -14), (10, 22), (10, -22), (-10, 22), (-10, -22)]  # fmt: skip


def title(figure: Any, document: dict[str, Any], question: str, *notes: str) -> None:
    """The question the picture answers above it; below it `notes`, and where it was measured."""
    where = document["conditions"]
    figure.suptitle(question, fontsize=11, x=0.01, ha="left", fontweight="bold")
    lines = ["; ".join(notes), f"{where['device']}, torch {where['torch']}, {where['date'][:10]}"]
    text = "\n".join(line for line in lines if line)
    figure.text(0.01, 0.04 / figure.get_figheight(), text, fontsize=7, color="#666666", va="bottom")
    bottom = (0.34 if notes else 0.2) / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))


def quiet(axis: Any, direction: str) -> None:
    """No frame, and a grid behind the marks along `direction`."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#999999")
    axis.grid(axis=direction, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, length=0)


def label_points(axis: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) beside each point, over no other label and no point."""
    figure = axis.figure
    figure.canvas.draw()
    renderer, to_pixels, scale = figure.canvas.get_renderer(), axis.transData, figure.dpi / 72
    marks = [to_pixels.transform(p[:2]) for p in points]
    taken: list[Any] = []  # where labels stand already
    inside = axis.get_window_extent(renderer)
    for x, y, text, colour in points:
        best: tuple[int, Any] | None = None
        for dx, dy in _OFFSETS:
            align = "left" if dx > 0 else "right" if dx < 0 else "center"
            far = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            drawn = axis.annotate(text, (x, y), (dx, dy), textcoords="offset points", ha=align, va="center", fontsize=8,
                                  color=colour, arrowprops=far if abs(dy) > 10 else None)  # fmt: skip
            drawn.set_in_layout(False)  # labels must not move what they were placed beside
            box = _text_box(drawn, renderer)
            crossed = sum(box.overlaps(other) for other in taken)
            near = box.padded(3 * scale)
            covered = sum(bool(near.contains(*mark)) for mark in marks)
            outside = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
            cost = 10 * crossed + 3 * covered + 20 * outside
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, drawn)
            else:
                drawn.remove()
            if cost == 0:
                break
        assert best is not None
        taken.append(_text_box(best[1], renderer))


def _text_box(label: Any, renderer: Any) -> Any:
    """Of the words alone: an annotation's own box has its line in it."""
    from matplotlib.text import Text

    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer)
