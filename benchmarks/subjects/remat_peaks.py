"""The peak of a step, as predicted and as measured: ten budgets, each to peak no higher than the one before, and eight
limits on the peak, each to be met. The stack of `remat.py`; a subject of its own, as it compiles eighteen times.

"peak MiB" is measured, beyond what was allocated before; what is predicted stands in the notes and in the JSON
(`predicted_mib`, `predicted_by_measured`, and `limit_mib`, `device_mib`, `met` of a row with a limit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import observe
from benchmarks.harness import Runner, Settings, run_case
from benchmarks.subjects.remat import Rows, case, problem
from benchmarks.variants import inductor, ours

BUDGETS = [i / 10 for i in range(10, 0, -1)]
LIMITS = 8


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    model, args, chosen = problem(settings)
    most, least = (predicted(model, args, budget) for budget in (1.0, 0.0))  # before the rows: it resets Dynamo
    rows: Rows = {
        "eager": ("eager", lambda model: model),
        "Inductor": ("inductor", inductor),
        **{f"budget {b}": ("ours", ours({"policy": b})) for b in BUDGETS},
        **{f"limit {i + 1} of {LIMITS}": ("ours", limited(i, most, least)) for i in range(LIMITS)},
    }
    made = case("remat_peaks", settings, model, args, chosen, rows)
    for contestant in made.contestants:
        contestant.build = _with_peak_on_cpu(contestant.build, settings)
    # Every row compiles the same code anew.
    with torch._dynamo.config.patch(recompile_limit=64):
        for table in run_case(made, settings):
            judge(table, args[0].numel() * args[0].element_size())
            yield table


def limited(index: int, most: dict[str, Any], least: dict[str, Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """Under the limit `index` of `LIMITS`, spread from a little above what is needed to a little above the lowest.

    most, least: `report.Frame.peak` of the two."""

    def compiled(model: nn.Module) -> Callable[..., Any]:
        from megacpp_compile.remat.peak import MARGIN
        from megacpp_compile.report.measure import allocated

        place = next(model.parameters()).device
        before = max(most["before"], allocated(place))
        highest, lowest = 1.05 * most["step"], 1.02 * least["step"]
        step = highest + (lowest - highest) * index / (LIMITS - 1)
        return ours({"policy": {"peak_gib": (before + MARGIN * step) / 2**30}})(model)

    return compiled


def predicted(model: nn.Module, args: list[Tensor], budget: float) -> dict[str, Any]:
    """`report.Frame.peak` under a budget, on fake tensors."""
    from megacpp_compile.config.checkpointing import CheckpointingPolicy
    from megacpp_compile.config.options import Config
    from megacpp_compile.memory.fake_run import FakeRun

    run = FakeRun(model, args, {}, args[0].device, [])
    run.compiled(Config(policy=CheckpointingPolicy(budget=budget)))
    (found,) = [frame.peak for frame in run.frames if frame.peak]
    return found


def judge(table: dict[str, Any], tangent: int) -> None:
    """Prediction beside measurement. tangent: bytes of the output's gradient, which here is there before the step."""
    for row in table["rows"]:
        if "peak_mib" not in row or len(row.get("peaks", ())) != 1:
            continue
        (peak,) = row["peaks"]
        row["predicted_mib"] = (peak["step"] - tangent) / 2**20
        row["predicted_by_measured"] = row["predicted_mib"] / row["peak_mib"]
        if peak["limit"]:
            row["limit_mib"] = peak["limit"] / 2**20
            row["device_mib"] = peak["before"] / 2**20 + row["peak_mib"]
            row["met"] = row["device_mib"] <= row["limit_mib"]


def _with_peak_on_cpu(build: Callable[[], Runner], settings: Settings) -> Callable[[], Runner]:
    """On CPU, where the suite measures no peaks, this subject does."""

    def built() -> Runner:
        runner = build()
        runner.peak = None if settings.device.type == "cuda" else observe.peak_bytes_on_cpu
        return runner

    return built
