"""Joins what PyTorch's benchmarks/dynamo wrote for several backends into a table.

    python -m benchmarks.dynamo_table FOLDER > table.md

FOLDER has what the harness names `speedup_BACKEND.csv`, of --performance, and `accuracy_BACKEND.csv`, of --accuracy;
either may be missing. A line is a model: each backend's speed over eager, and what became of it where that failed;
beside Inductor, every other backend's speed and peak over its. Means are geometric, over models that all backends run.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import arguments

KINDS = "speedup", "accuracy"
BASE = "inductor"
TOO_SLOW = 0.97  # of Inductor's speed; models below it are named


class Result(NamedTuple):
    """Of a model by a backend; None is not measured, a speed of 0 is a run that failed."""

    speed: float | None = None
    ms: float | None = None
    peak_gb: float | None = None
    accuracy: str | None = None

    @property
    def passes(self) -> bool:
        """As the harness counts: what it has no accuracy of, for its size or its randomness, is no failure."""
        return self.speed != 0 and (self.accuracy or "pass").startswith("pass")


Results = dict[str, dict[str, Result]]  # by backend and model


def results(folder: Path) -> Results:
    """Raises ValueError for a folder without such files."""
    found: Results = {}
    for path in (path for kind in KINDS for path in sorted(folder.glob(f"{kind}_*.csv"))):
        kind, _, backend = path.stem.partition("_")
        if backend.endswith(("_compilation_metrics", "_graph_breaks", "_graph_breaks_deduped")):
            continue  # the harness's own notes on a run
        models = found.setdefault(backend, {})
        with open(path, newline="") as f:
            for row in csv.DictReader(f):
                known = models.get(row["name"], Result())
                if kind == "accuracy":
                    models[row["name"]] = known._replace(accuracy=row["accuracy"])
                else:
                    ms, peak = (float(row.get(key) or 0) or None for key in ("abs_latency", "dynamo_peak_mem"))
                    models[row["name"]] = known._replace(speed=float(row["speedup"]), ms=ms, peak_gb=peak)
    if not found:
        raise ValueError(f"{folder} has no speedup_BACKEND.csv and no accuracy_BACKEND.csv")
    return {backend: found[backend] for backend in sorted(found, key=lambda name: (name != BASE, name))}


def ratio(found: Results, backend: str, model: str, field: str = "speed") -> float | None:
    """A backend's speed or peak over Inductor's. A speed is over eager's, which the harness times in turns with it."""
    ours, base = (getattr(found[name].get(model, Result()), field) for name in (backend, BASE))
    return ours / base if ours and base else None


def mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value]
    return number(statistics.geometric_mean(known)) if known else ""


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(found: Results) -> Iterator[str]:
    """Markdown, line by line."""
    models = sorted({model for of in found.values() for model in of})
    others = [backend for backend in found if backend != BASE and BASE in found]
    over = [f"{what}{name} / {BASE}" for what in ("", "peak ") for name in others]
    yield line("model", "eager, ms", *found, *over)
    yield "|---|" + "---:|" * (1 + len(found) + len(over))
    for model in models:
        of = {backend: found[backend].get(model, Result()) for backend in found}
        eager = next((r.speed * r.ms for r in of.values() if r.speed and r.ms), None)
        ratios = [ratio(found, name, model, field) for field in ("speed", "peak_gb") for name in others]
        yield line(model, number(eager, 1), *map(cell, of.values()), *map(number, ratios))
    timed = [model for model in models if all(found[backend].get(model, Result()).speed for backend in found)]
    speeds = [[found[backend][model].speed for model in timed] for backend in found]
    compared = [[ratio(found, name, m, field) for m in timed] for field in ("speed", "peak_gb") for name in others]
    yield line(f"mean of {len(timed)}", "", *map(mean, speeds), *map(mean, compared))
    yield ""
    for backend, of in found.items():
        failed = [f"{model} ({of[model].accuracy or 'does not run'})" for model in sorted(of) if not of[model].passes]
        yield f"{backend}: {len(of) - len(failed)} of {len(of)} pass" + (f"; not {', '.join(failed)}" if failed else "")
    for name in others:
        slow = [f"{m} {at:.3f}" for m in models if (at := ratio(found, name, m)) is not None and at < TOO_SLOW]
        yield f"{name} below {TOO_SLOW} of {BASE}: {', '.join(slow) or 'none'}"


def cell(result: Result) -> str:
    """`1.234`, or what became of it instead; what did not pass beside it."""
    speed = "" if result.speed is None else f"{result.speed:.3f}" if result.speed else "fails"
    said = result.accuracy if result.accuracy and (not result.speed or not result.accuracy.startswith("pass")) else ""
    return " ".join(filter(None, (speed, said)))


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.dynamo_table", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the harness wrote (its --output-directory)")
    args = parser.parse_args(argv)
    try:
        print(*table(results(args.folder)), sep="\n")
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
