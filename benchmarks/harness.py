"""How a comparison is made: every contestant is built, checked against a wider reference, then timed in turns.

A `Case` is one problem with its contestants; `run_case` gives a table for each of its measures (forward; forward and
backward). What is timed was checked before, on the same inputs and in the same compiled form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType

from benchmarks import observe
from benchmarks.ceilings import Ceilings, Work

FORWARD, STEP = "forward", "forward + backward"

# A contestant may err as much as eager does, and a tenth more, as sums in another order round otherwise. The slack is
# for tensors that eager happens to get exactly: a fraction of one rounding.
MORE_THAN_EAGER = 1.1
SLACK_IN_EPS = 0.05
# By how many standard deviations of that chance the errors of few numbers may be larger than eager's.
DEVIATIONS = 3.0


class Missing(Exception):
    """A contestant that cannot take part here; its text is the reason that is shown."""


@contextlib.contextmanager
def profiled(name: str, folder: Path) -> Iterator[dict[str, float]]:
    """Of a process group: writes a timeline of each rank (for chrome://tracing, or ui.perfetto.dev) into `folder`, and
    prints what the first rank's GPU and host do meanwhile: kernels by their time, and calls by the host's own. What is
    yielded gets each rank's milliseconds of kernels, and launches, when it ends."""
    seen: dict[str, float] = {}
    with torch.profiler.profile() as profile:
        yield seen
    folder.mkdir(parents=True, exist_ok=True)
    plain = "".join(letter if letter.isalnum() else "_" for letter in name)
    profile.export_chrome_trace(str(folder / f"{plain}_rank{dist.get_rank()}.json.gz"))
    rows = profile.key_averages()
    on_gpu = [e for e in profile.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    own, nccl = (sum(e.time_range.elapsed_us() for e in on_gpu if ("nccl" in e.name) is k) / 1e3 for k in (False, True))
    launches = sum(r.count for r in rows if r.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    seen |= {"kernels_ms": own, "nccl_ms": nccl, "launches": launches}
    if dist.get_rank():
        return
    print(f"{name}: kernels {own:.1f} ms, NCCL's {nccl:.1f} ms with what they wait, {launches} launches")
    for order in ("self_device_time_total", "self_cpu_time_total"):
        print(rows.table(sort_by=order, row_limit=25, max_name_column_width=70), flush=True)


@dataclasses.dataclass
class Runner:
    """What a contestant does. `results`: outputs, then gradients, in the order of the reference."""

    measures: dict[str, Callable[[], Any]]
    results: Callable[[], list[Tensor]] | None = None  # None: nothing to check
    saved: Callable[[], int] | None = None
    peak: Callable[[Callable[[], Any]], int] | None = None  # in the place of the device's own count


@dataclasses.dataclass
class Contestant:
    """One row. `kind` is limit, eager, inductor, ours, kernels, peer or control.

    `bound`: largest relative error, for what rounds more by design (fp8); by default it is eager's, `times_eager`.
    `within`: what is open from when it is built to the last measure of its case.
    """

    name: str
    kind: str
    build: Callable[[], Runner]
    bound: float | None = None
    times_eager: float = MORE_THAN_EAGER
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclasses.dataclass
class Case:
    """`work`: measure -> bytes and FLOPs that cannot be avoided. `tensors`: names of what is checked."""

    subject: str
    name: str
    sizes: dict[str, Any]
    work: dict[str, Work]
    reference: Callable[[], list[Tensor]]
    contestants: Sequence[Contestant]
    dtype: torch.dtype
    tensors: Sequence[str] = ()
    attention: bool = False


@dataclasses.dataclass
class Settings:
    device: torch.device
    quick: bool
    turns: int
    budget_ms: float
    seed: int
    ceilings: Ceilings
    with_te: bool = False
    rows: tuple[str, ...] = ()  # texts of which a row's name has to hold one; without any, all rows are measured

    def measured(self, contestant: Contestant) -> bool:
        """Whether a row is asked for; what others are judged by always is."""
        compared = contestant.name in ("eager", "Inductor") or contestant.kind == "limit"
        return compared or not self.rows or any(text in contestant.name for text in self.rows)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def outputs(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def training(
    fn: Callable[..., Any], inputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]
) -> Runner:
    """The runner of a differentiable function."""

    def step() -> Any:
        return torch.autograd.grad(outputs(fn(*inputs)), leaves, grads)

    def results() -> list[Tensor]:
        out = outputs(fn(*inputs))
        gradients = torch.autograd.grad(out, leaves, grads)
        return [t.detach() for t in (*out, *gradients)]

    def saved() -> int:
        return observe.saved_bytes(lambda: fn(*inputs), (*inputs, *leaves))

    return Runner({FORWARD: lambda: fn(*inputs), STEP: step}, results, saved)


def reference(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    leaves: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    """Outputs and gradients of `fn` in the dtype that is wide enough to judge by."""
    wide = [t.detach().to(wider(t.dtype)) for t in inputs]
    chosen = leaves(wide)
    for t in chosen:
        t.requires_grad_()
    out = outputs(fn(*wide))
    gradients = torch.autograd.grad(out, chosen, [g.to(wider(g.dtype)) for g in grads])
    return [t.detach() for t in (*out, *gradients)]


def relative_errors(got: Iterable[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Norm of the difference over norm, for each tensor; unequal shapes or numbers of tensors are infinitely far."""
    got = list(got)
    if [t.shape for t in got] != [t.shape for t in want]:
        return [float("inf")] * len(want)
    errors = []
    for mine, wide in zip(got, want, strict=True):
        size = torch.linalg.vector_norm(wide).item()
        error = torch.linalg.vector_norm(mine.to(wide.dtype) - wide).item() / max(size, 1e-30)
        errors.append(error if error == error else float("inf"))
    return errors


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def run_case(case: Case, settings: Settings) -> list[dict[str, Any]]:
    """One table per measure, as plain data."""
    with contextlib.ExitStack() as opened:
        return _run_case(case, settings, opened)


def _run_case(case: Case, settings: Settings, opened: contextlib.ExitStack) -> list[dict[str, Any]]:
    progress(f"{case.subject}: {case.name}")
    torch._dynamo.reset()
    want, eager = case.reference(), None
    rows: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for contestant in filter(settings.measured, case.contestants):
        row: dict[str, Any] = {"name": contestant.name, "kind": contestant.kind}
        rows[contestant.name] = row
        began = time.perf_counter()
        try:
            opened.enter_context(contestant.within())
            runner = contestant.build()
            with observe.sites(row):
                got = runner.results() if runner.results else []
        except Missing as missing:
            row["missing"] = str(missing)
        except Exception as error:  # one row that fails must not cost the others
            row["missing"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            row["failed"] = True
        else:
            row["first_s"] = time.perf_counter() - began
            runners[contestant.name] = runner
            if runner.results:
                errors = relative_errors(got, want)
                eager = eager or errors
                _judge(row, errors, eager, [t.numel() for t in want], contestant, case)
            del got
            try:
                _observe(row, runner, case, settings)
            except Exception as error:  # a tensor subclass without storage, say: the time is worth having all the same
                row["not_observed"] = f"{type(error).__name__}: {error}"[:300]
        progress(f"  {contestant.name}: {_outcome(row)}")
    del want
    _free(settings.device)
    return [_table(case, measure, rows, _times(runners, measure, settings), settings) for measure in case.work]


def _judge(
    row: dict[str, Any], errors: list[float], eager: list[float], counts: list[int], c: Contestant, case: Case
) -> None:
    """counts: of numbers in each tensor. Where they are few, two sets of rounding errors differ by chance: the ratio of
    two norms of n errors each scatters by about 1 / sqrt(n)."""
    slack = SLACK_IN_EPS * torch.finfo(case.dtype).eps
    chance = [1 + DEVIATIONS / max(n, 1) ** 0.5 for n in counts]
    by_eager = [c.times_eager * by * e + slack for e, by in zip(eager, chance, strict=True)]
    bounds = by_eager if c.bound is None else [c.bound] * len(eager)
    worst = max(range(len(errors)), key=lambda i: errors[i] / bounds[i])
    names = case.tensors or [str(i) for i in range(len(errors))]
    row["error"], row["bound"], row["worst"] = errors[worst], bounds[worst], names[worst]
    row["ok"] = errors[worst] <= bounds[worst]
    row["errors"] = dict(zip(names, errors, strict=True))


def _observe(row: dict[str, Any], runner: Runner, case: Case, settings: Settings) -> None:
    whole = runner.measures.get(STEP) or next(iter(runner.measures.values()))
    if runner.saved is not None:
        row["saved_mib"] = runner.saved() / 2**20
    peak = runner.peak or (observe.peak_bytes if settings.device.type == "cuda" else None)
    if peak is not None:
        row["peak_mib"] = peak(whole) / 2**20
    if settings.device.type == "cuda":
        row["waits"] = observe.waits_for_device(whole)
    if case.attention:
        row["attention"] = observe.attention_kernels(whole, settings.device)


def _outcome(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"{'failed' if row.get('failed') else 'missing'}: {row['missing']}"
    checked = "not checked" if "ok" not in row else f"error {row['error']:.1e} (bound {row['bound']:.1e})"
    return f"{'WRONG, ' if row.get('ok') is False else ''}{checked}, first call {row['first_s']:.1f} s"


def _times(runners: dict[str, Runner], measure: str, settings: Settings) -> dict[str, list[float]]:
    """Milliseconds of every turn; within a turn each contestant is measured once."""
    times: dict[str, list[float]] = {name: [] for name, runner in runners.items() if measure in runner.measures}
    for turn in range(settings.turns):
        for name in order_of(turn, times):
            times[name].append(milliseconds(runners[name].measures[measure], settings.device, settings.budget_ms))
        progress(f"  {measure}: turn {turn + 1} of {settings.turns}")
    return times


def say(text: str) -> None:
    """Progress, by the first rank, on stderr."""
    if dist.get_rank() == 0:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def order_of(turn: int, names: Collection[str]) -> list[str]:
    """Every turn starts with another one: a GPU that has just waited is cooler and faster."""
    start = turn % max(len(names), 1)
    return [*names][start:] + [*names][:start]


def kernel_times(step: Callable[[], Any], steps: int) -> dict[str, tuple[float, float]]:
    """Milliseconds a step of each CUDA kernel, and how often it runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in seen.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.key] = event.self_device_time_total / 1e3 / steps, event.count / steps
    return found


def milliseconds(fn: Callable[[], Any], device: torch.device, budget_ms: float) -> float:
    """Median time of one call, measured for about `budget_ms`; caches of the device are flushed between calls."""
    if device.type == "cuda":
        from triton.testing import do_bench

        if (alone := once(fn)) > 5 * budget_ms:
            return alone  # nothing of it is left in a cache, and a median would take minutes
        return float(do_bench(fn, warmup=max(1, int(budget_ms / 4)), rep=int(budget_ms), return_mode="median"))
    samples: list[float] = []
    while not samples or sum(samples) < budget_ms and len(samples) < 100:
        began = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


def once(fn: Callable[[], Any]) -> float:
    """Milliseconds of one call on the current CUDA device."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    fn()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def summary(turns: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(turns), "min": min(turns), "max": max(turns), "turns": turns}


def _table(
    case: Case, measure: str, rows: dict[str, dict[str, Any]], times: dict[str, list[float]], settings: Settings
) -> dict[str, Any]:
    floor = settings.ceilings.milliseconds(case.work[measure])
    made = []
    for name, row in rows.items():
        if name in times:
            row = row | {"ms": summary(times[name])}
        if name in times or "missing" in row:
            made.append(row)
    return {"subject": case.subject, "case": case.name, "measure": measure, "sizes": case.sizes,
            "dtype": str(case.dtype).removeprefix("torch."), "work": dataclasses.asdict(case.work[measure]),
            "floor_ms": floor, "last_of_case": measure == [*case.work][-1],
            "rows": with_ratios(made, floor)}  # fmt: skip


def with_ratios(rows: list[dict[str, Any]], floor: float | None) -> list[dict[str, Any]]:
    inductor = next((r["ms"]["median"] for r in rows if r["kind"] == "inductor" and "ms" in r), None)
    for row in rows:
        if "ms" in row:
            row["x_floor"] = row["ms"]["median"] / floor if floor else None
            row["per_inductor"] = row["ms"]["median"] / inductor if inductor else None
    return rows


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
