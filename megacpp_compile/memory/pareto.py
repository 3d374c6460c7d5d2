"""`megacpp plan`: checkpointing policies by modelled time and peak memory.

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
from megacpp_compile.errors import BadOptionError
from megacpp_compile.memory.estimate import estimate
from megacpp_compile.memory.fit import matters, policy_candidates
from megacpp_compile.report.tables import table_text
from megacpp_compile.report.text import bytes_text, seconds_text
from megacpp_compile.targets import gpus

_BUDGETS = (0.8, 0.6, 0.4, 0.2)
_LEGEND = "* no other policy takes as little time at as low a peak"


@dataclasses.dataclass(frozen=True)
class Point:
    """One policy. `activations`: bytes kept on the device over all blocks; `peak`: bytes of a step, `Estimate.peak`;
    `seconds`: what it adds to a step; `best`: no other policy is better in one of peak and time, and as good in the
    other; `alike`: names of further policies with the same numbers."""

    name: str
    policy: CheckpointingPolicy
    activations: int
    peak: int
    seconds: float
    best: bool = False
    alike: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "policy": self.policy.to_dict(), "alike": list(self.alike)}


def points(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | Config | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> list[Point]:
    """Policies for `model(*args, **kwargs)`, by falling peak; of those that are alike in all numbers the first tried.
    Arguments and errors are those of `estimate`; `options` have no policy."""
    if "policy" in (given := given_options(options)):
        raise BadOptionError("policy", given["policy"], "no value: a plan tries policies of its own")
    found: list[Point] = []
    present: set[str] = set(KINDS)
    before: CheckpointingPolicy | None = None
    for name, policy in _candidates():
        if before is not None and not matters(policy, before, present):
            continue
        before = policy
        seen = estimate(model, *args, device=device, options={**given, "policy": policy}, **kwargs)
        present = set(seen.levers) & set(KINDS) or present
        away = sum(lever["offloaded"] for lever in seen.levers.values())
        kept = (seen.eager if seen.compiled is None else seen.compiled) - away
        found.append(Point(name, policy, kept, seen.peak, seen.seconds))
    return marked(found)


def marked(found: Sequence[Point]) -> list[Point]:
    """`found` by falling peak, those alike merged into the first of them, the best marked."""
    merged: dict[tuple[int, int, float], Point] = {}
    for p in found:
        key = p.activations, p.peak, p.seconds
        first = merged.setdefault(key, p)
        if first is not p:
            merged[key] = dataclasses.replace(first, alike=(*first.alike, p.name))
    rows = sorted(merged.values(), key=lambda p: (-p.peak, p.seconds, -p.activations))
    # Of two that only differ in what they keep below the peak, the one that keeps less.
    return [dataclasses.replace(p, best=not any(_beats(other, p) for other in rows)) for p in rows]


def _candidates() -> Iterator[tuple[str, CheckpointingPolicy]]:
    for lever in policy_candidates(None):
        yield lever.name, lever.policy or CheckpointingPolicy.of("none")  # type: ignore[misc]
    for budget in _BUDGETS:
        yield f"budget {budget}", CheckpointingPolicy(budget=budget)


def _beats(one: Point, other: Point) -> bool:
    if (one.peak, one.seconds) == (other.peak, other.seconds):
        return one.activations < other.activations
    return one.peak <= other.peak and one.seconds <= other.seconds


def text(found: Sequence[Point], device: str | torch.device | None = None) -> str:
    """A table, what its star means, and for a GPU by name what its memory holds."""
    rows = [
        (" = ".join((p.name, *p.alike)), bytes_text(p.activations), bytes_text(p.peak), f"+{seconds_text(p.seconds)}",
         "*" if p.best else "")
        for p in found
    ]  # fmt: skip
    headers = ("policy", "activations", "peak of a step", "time (modelled)", "")
    table = f"{table_text('policies: time against peak memory', headers, rows).rstrip()}\n\n{_LEGEND}"
    if (gpu := gpus.named(device)) is None:
        return table
    fit = sum(p.peak <= gpu.memory for p in found)
    size = bytes_text(gpu.memory)
    return f"{table}\n  {gpu.name.upper()}: times by its rates; {fit} of {len(found)} fit into its {size}"
