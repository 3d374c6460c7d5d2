"""Draw the loss curves of several runs of an example over each other, and say how far they are apart.

    python examples/train_mla.py --steps 100 --json out/cpu.json
    PJRT_DEVICE=CPU python examples/train_mla.py --steps 100 --device xla --json out/xla.json
    python examples/overlay.py out/cpu.json out/xla.json --plot out/overlay.png --tolerance 1e-4

The first two take some minutes on CPU; the second needs torch_xla, and a figure matplotlib. FILE: what an example wrote
by `--json`. The text is the interpreter's own, so both have to come from one Python.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path, backend: str) -> dict[str, Any]:
    found = json.loads(path.read_text())
    about = found if isinstance(found, dict) else {"runs": found}
    for run in about["runs"]:
        if run["backend"] == backend and run["losses"]:
            return {**run, "name": f"{backend} on {run.get('device', about.get('device', path.stem))}"}
    sys.exit(f"{path}: no losses of {backend!r}")


def relative(a: list[float], b: list[float]) -> list[float]:
    """Step by step, the difference over the first one's value."""
    if len(a) != len(b):
        sys.exit(f"runs of {len(a)} and {len(b)} steps")
    return [abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)]


def largest(differences: list[float]) -> float:
    return max(differences, key=lambda d: (d != d, d))  # NaN above all


def plot(path: Path, runs: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    for i, run in enumerate(runs):
        colour = f"C{i - 1}" if i else "0.7"
        top.plot(run["losses"], label=run["name"], linewidth=1 if i else 4, color=colour)
        if i:
            bottom.semilogy(relative(runs[0]["losses"], run["losses"]), linewidth=1, color=colour)
    top.set_ylabel("loss")
    top.legend()
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the first is what others are compared to")
    which = "which run of each file (default: megacpp); given twice, the first is what the other is compared to, too"
    parser.add_argument("--backend", action="append", help=which)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="figure; needs matplotlib")
    parser.add_argument("--tolerance", type=float, help="fail where a relative difference is larger")
    args = parser.parse_args()
    runs = [read(path, backend) for path in args.files for backend in args.backend or ["megacpp"]]
    worst = [largest(relative(runs[0]["losses"], run["losses"])) for run in runs[1:]]
    for run, difference in zip(runs[1:], worst, strict=True):
        print(f"{run['name']} beside {runs[0]['name']}: largest relative difference {difference:.1e}")
    if args.plot:
        plot(args.plot, runs)
    return int(args.tolerance is not None and not all(d <= args.tolerance for d in worst))  # NaN fails too


if __name__ == "__main__":
    sys.exit(main())
