"""`megacpp plan`: checkpointing policies by modelled time and memory kept.

Every policy is estimated on fake tensors as `estimate` does. Its cost is the modelled time of what it recomputes, on an
idle device and without fusion (`remat/costs.py`), and of what it moves to main memory and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacpp_compile.config.checkpointing import KINDS, CheckpointingPolicy
from megacpp_compile.config.options import Config, given_options
from megacpp_compile.errors import PackageMissingError
from megacpp_compile.memory.estimate import estimate
from megacpp_compile.memory.fit import matters, policy_candidates
from megacpp_compile.report.tables import table_text
from megacpp_compile.report.text import bytes_text

_BUDGETS = (0.8, 0.6, 0.4, 0.2)


@dataclasses.dataclass(frozen=True)
class Point:
    """One policy. `activations`: bytes kept on the device over all blocks; `peak`: bytes of a step, `Estimate.peak`;
    `seconds`: what it adds to a step; `best`: no other policy is better in one of activations and time, and as good in
    the other."""

    name: str
    policy: CheckpointingPolicy
    activations: int
    peak: int
    seconds: float
    best: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "policy": self.policy.to_dict()}


def points(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | Config | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> list[Point]:
    """Policies for `model(*args, **kwargs)`, by falling activations. Arguments and errors are those of `estimate`."""
    found: list[Point] = []
    present: set[str] = set(KINDS)
    before: CheckpointingPolicy | None = None
    for name, policy in _candidates():
        if before is not None and not matters(policy, before, present):
            continue
        before = policy
        seen = estimate(model, *args, device=device, options={**given_options(options), "policy": policy}, **kwargs)
        present = set(seen.levers) & set(KINDS) or present
        away = sum(lever["offloaded"] for lever in seen.levers.values())
        kept = (seen.eager if seen.compiled is None else seen.compiled) - away
        found.append(Point(name, policy, kept, seen.peak, seen.seconds))
    found.sort(key=lambda p: (-p.activations, p.seconds))
    return [dataclasses.replace(p, best=not any(_beats(other, p) for other in found)) for p in found]


def _candidates() -> Iterator[tuple[str, CheckpointingPolicy]]:
    for lever in policy_candidates(None):
        yield lever.name, lever.policy or CheckpointingPolicy.of("none")  # type: ignore[misc]
    for budget in _BUDGETS:
        yield f"budget {budget}", CheckpointingPolicy(budget=budget)


def _beats(one: Point, other: Point) -> bool:
    mine, theirs = (one.activations, one.seconds), (other.activations, other.seconds)
    return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def text(found: Sequence[Point]) -> str:
    """A table."""
    rows = [
        (p.name, bytes_text(p.activations), bytes_text(p.peak), f"+{p.seconds * 1e3:.3g} ms", "*" if p.best else "")
        for p in found
    ]
    headers = ("policy", "activations", "peak of a step", "time (modelled)", "best")
    return table_text("policies: time against memory", headers, rows)


def plot(found: Sequence[Point], path: str) -> None:
    """Draw them into the file `path`. Raises PackageMissingError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissingError("matplotlib", "--plot", str(error)) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    front = [p for p in found if p.best]
    axes.plot([p.activations / 2**30 for p in front], [p.seconds * 1e3 for p in front], "-", color="tab:blue")
    for p in found:
        axes.plot(p.activations / 2**30, p.seconds * 1e3, "o", color="tab:blue" if p.best else "lightgrey")
        axes.annotate(p.name, (p.activations / 2**30, p.seconds * 1e3), (4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("activations kept on the device, GiB")
    axes.set_ylabel("modelled time added to a step, ms")
    figure.savefig(path)
