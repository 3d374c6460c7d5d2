"""Training runs of one model under several compilers, and what the examples say about them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_mla import Help, batches, progress

AVERAGED = 20  # last steps whose mean is a run's final loss: a single batch says little


@dataclasses.dataclass
class Run:
    """`backend` may name a dtype or the recipe of a precision plan of its own, "eager:float32", "megacpp:fp8_current".
    `linears`: under a plan, how many compute in what. `failed`: why it stopped, "" where it did not. Figures are of the
    steps before. Peak in MiB, 0 without CUDA."""

    backend: str
    losses: list[float] = dataclasses.field(default_factory=list)
    final_loss: float = float("nan")
    step_ms: float = 0.0
    tokens_per_second: float = 0.0
    compile_seconds: float = 0.0
    peak_mib: float = 0.0
    fused: dict[str, int] = dataclasses.field(default_factory=dict)
    frames: int = 0
    linears: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: str = ""


class MasterAdamW(torch.optim.AdamW):
    """AdamW on float32 copies of a model's parameters, which are rounded from them after each step, as Megatron-LM
    has it: at usual learning rates most updates are too small for a parameter in bfloat16."""

    def __init__(self, parameters: Sequence[Tensor], **settings: Any):
        self.rounded = list(parameters)
        super().__init__([p.detach().float().requires_grad_() for p in self.rounded], **settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        masters = self.param_groups[0]["params"]
        for master, p in zip(masters, self.rounded, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        super().step(closure)
        for master in masters:
            master.grad = None
        with torch.no_grad():
            torch._foreach_copy_(self.rounded, masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.rounded:
            p.grad = None


def train(
    name: str,
    build: Callable[[], nn.Module],
    text: Tensor,
    args: argparse.Namespace,
    masters: bool = False,
    blocks: str = "",
    decay: bool = False,
) -> Run:
    """Train what `build` makes for `args.steps`. masters: the optimizer holds float32 copies of the parameters. blocks:
    name of the model's list of equal blocks, which are then compiled instead of the whole. decay: the learning rate
    falls to a tenth by the last step."""
    run = Run(name)
    backend, dtype, precision = parts(name, args.dtype)
    cuda = args.device.startswith("cuda")
    held = 0
    if cuda:
        gc.collect()  # what an earlier run left in cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    seconds: list[float] = []
    progress(name, 0, args.steps, "" if backend == "eager" else "compiling")
    try:
        torch.manual_seed(args.seed)
        model = build().to(args.device, dtype)
        kind = MasterAdamW if masters and dtype != torch.float32 else torch.optim.AdamW
        optimizer = kind(list(model.parameters()), lr=args.lr, betas=(0.9, 0.95), fused=cuda or None)
        last = 0.9 / args.steps if decay else 0.0
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - last * step))
        step_model: Any = model
        if backend != "eager":
            options = {"precision": precision} if precision else None
            how: dict[str, Any] = {"backend": found(backend), "options": options}
            if blocks:
                for block in model.get_submodule(blocks).children():
                    block.compile(**how)
            else:
                step_model = torch.compile(model, **how)
        for tokens, targets in batches(text, args.steps, args.batch, args.length, args.seed):
            start = time.perf_counter()
            tokens, targets = tokens.to(args.device), targets.to(args.device)
            loss = F.cross_entropy(step_model(tokens).flatten(0, 1).float(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            run.losses.append(loss.item())  # waits for the device, so the time below is the step's own
            seconds.append(time.perf_counter() - start)
            progress(name, len(run.losses), args.steps, f"loss {run.losses[-1]:.4f}")
    except Exception as error:  # a compiler that fails is a result here
        run.failed = f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0][:160]}"
        print(f"\n{name}: {run.failed}", file=sys.stderr)
    if run.losses:
        run.final_loss = statistics.fmean(run.losses[-AVERAGED:])
    if len(seconds) > 1:
        step_seconds = statistics.median(seconds[1:])
        run.step_ms, run.tokens_per_second = step_seconds * 1e3, args.batch * args.length / step_seconds
        run.compile_seconds = 0.0 if backend == "eager" else seconds[0] - step_seconds
    if cuda:
        run.peak_mib = (torch.cuda.max_memory_allocated() - held) / 2**20
    return run


def parts(name: str, default: torch.dtype) -> tuple[str, torch.dtype, str | None]:
    """(backend, dtype of the model, recipe of its precision plan) of "megacpp:fp8_current". What stands before a "+" is
    the model's name."""
    backend, _, own = name.rpartition("+")[2].partition(":")
    dtype = getattr(torch, own, None) if own else default
    return (backend, dtype, None) if isinstance(dtype, torch.dtype) else (backend, default, own)


def found(backend: str) -> Any:
    """The backend by its name, or by itself in a checkout that is not installed."""
    if backend != "megacpp" or backend in torch._dynamo.list_backends(exclude_tags=()):
        return backend
    import megacpp_compile

    return megacpp_compile.backend


def scattered(values: Sequence[float]) -> str:
    """Their mean, and its standard error where there are several."""
    error = f" +- {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{error}"


def recorded(name: str, *what: Any, **how: Any) -> Run:
    """`train`, with what was fused where the backend is megacpp."""
    torch._dynamo.reset()
    if not name.startswith("megacpp"):
        return train(name, *what, **how)
    import megacpp_compile

    with megacpp_compile.record() as report:
        run = train(name, *what, **how)
    run.fused = {name: count for name, count in report.counts.items() if count}
    run.frames = len(report.frames)
    rows = [row for frame in report.frames for row in frame.precision if row["kind"] == "linear"]
    run.linears = dict(collections.Counter(row["effective"] for row in rows))
    return run


def show(runs: list[Run], reference: Run) -> None:
    width = max(12, *(len(run.backend) + 2 for run in runs))
    print(f"\n{'':<{width}}{'final loss':>12}{'largest diff':>14}{'tokens/s':>12}{'step ms':>10}"
          f"{'compile s':>11}{'peak MiB':>10}")  # fmt: skip
    for run in runs:
        loss = f"{run.final_loss:.4f}" if run.losses else "-"
        difference = f"{largest_difference(run, reference):.1e}" if run.losses and run is not reference else "-"
        print(
            f"{run.backend:<{width}}{loss:>12}{difference:>14}{run.tokens_per_second:>12,.0f}{run.step_ms:>10.1f}"
            f"{run.compile_seconds:>11.1f}{run.peak_mib:>10,.0f}"
        )
        if run.fused:
            print("  fused: " + ", ".join(f"{name} {count}" for name, count in run.fused.items()))
        if run.linears:
            linears = ", ".join(f"{count} in {recipe}" for recipe, count in run.linears.items())
            print(f"  linears: {linears}; {run.frames} compiled frame{'s' * (run.frames != 1)}")
        if run.failed:
            print(f"  stopped after {len(run.losses)} steps: {run.failed}")


def largest_difference(a: Run, b: Run) -> float:
    return max((abs(x - y) for x, y in zip(a.losses, b.losses, strict=False)), default=float("nan"))


def plot(path: Path, runs: list[Run]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is missing (pip install matplotlib, or pass --no-plot)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run, width in zip(runs, (4, 2.5, 1.0, 0.7, 0.5), strict=False):
        axes.plot(run.losses, label=run.backend, linewidth=width)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def arguments(summary: str, figure: str, steps: int, lr: float, backends: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what every comparison can be told. summary: the text of `--help`."""
    parser = argparse.ArgumentParser(description=summary, formatter_class=Help)
    parser.add_argument(
        "--backends", nargs="+", default=list(backends),
        help="eager, or backends of torch.compile; with a dtype of its own as in eager:float32, or a recipe of "
        "megacpp's precision plan as in megacpp:fp8_current",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of each run, at least 2")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write losses and figures there")
    default_plot = Path(__file__).parent / "out" / figure
    parser.add_argument("--plot", type=Path, default=default_plot, metavar="PATH", help="figure of the loss curves")
    parser.add_argument("--no-plot", action="store_true", default=argparse.SUPPRESS, help="write no figure")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is the one that compiles")
    return args
