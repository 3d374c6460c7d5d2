"""Train a hybrid of attention, Mamba-2 and expert layers under several compilers, on the same text, and compare them.

The model (`plain_hybrid.py`) is plain PyTorch. A compiler that cannot train it, for want of memory or because it fails,
is shown with its reason. The text is Python's own standard library, as in `train_mla.py`.

    python examples/train_hybrid.py                                       # a tiny model, on CPU in a few minutes
    python examples/train_hybrid.py --size large --dtype bfloat16 --length 4096 --batch 4 --steps 200
    python examples/train_hybrid.py --dtype bfloat16 --backends eager:float32 eager megacpp --steps 200
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import plain_hybrid
import torch
import torch.nn.functional as F
from plain_hybrid import HybridLM
from torch import nn
from train_mla import batches, progress, standard_library_text


@dataclasses.dataclass
class Run:
    """`backend` may name a dtype of its own, "eager:float32". `failed`: why it stopped, "" where it did not. Figures
    are of the steps before. Peak in MiB, 0 without CUDA."""

    backend: str
    losses: list[float] = dataclasses.field(default_factory=list)
    tokens_per_second: float = 0.0
    compile_seconds: float = 0.0
    peak_mib: float = 0.0
    fused: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: str = ""


def train(name: str, text: torch.Tensor, args: argparse.Namespace) -> Run:
    run = Run(name)
    backend, dtype = backend_and_dtype(name, args.dtype)
    torch.manual_seed(args.seed)
    config = plain_hybrid.LARGE if args.size == "large" else plain_hybrid.TINY
    model = HybridLM(config).to(args.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    step_model = model if backend == "eager" else torch.compile(model, backend=backend)
    seconds: list[float] = []
    cuda = args.device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    progress(backend, 0, args.steps, "" if backend == "eager" else "compiling")
    try:
        for tokens, targets in batches(text, args.steps, args.batch, args.length, args.seed):
            start = time.perf_counter()
            tokens, targets = tokens.to(args.device), targets.to(args.device)
            loss = F.cross_entropy(step_model(tokens).flatten(0, 1).float(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            run.losses.append(loss.item())  # waits for the device, so the time below is the step's own
            seconds.append(time.perf_counter() - start)
            progress(backend, len(run.losses), args.steps, f"loss {run.losses[-1]:.4f}")
    except Exception as error:  # a compiler that fails is a result here
        run.failed = f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0][:160]}"
        print(f"\n{backend}: {run.failed}", file=sys.stderr)
    if len(seconds) > 1:
        step_seconds = statistics.median(seconds[1:])
        run.tokens_per_second = args.batch * args.length / step_seconds
        run.compile_seconds = 0.0 if backend == "eager" else seconds[0] - step_seconds
    if cuda:
        run.peak_mib = torch.cuda.max_memory_allocated() / 2**20
    return run


def backend_and_dtype(name: str, default: torch.dtype) -> tuple[str, torch.dtype]:
    backend, _, dtype = name.partition(":")
    return backend, getattr(torch, dtype) if dtype else default


def recorded(backend: str, text: torch.Tensor, args: argparse.Namespace) -> Run:
    torch._dynamo.reset()
    if not backend.startswith("megacpp"):
        return train(backend, text, args)
    import megacpp_compile

    with megacpp_compile.record() as report:
        run = train(backend, text, args)
    run.fused = {name: count for name, count in report.counts.items() if count}
    return run


def show(runs: list[Run], reference: Run) -> None:
    print(f"\n{'':<12}{'final loss':>12}{'largest diff':>14}{'tokens/s':>12}{'compile s':>11}{'peak MiB':>10}")
    for run in runs:
        loss = f"{run.losses[-1]:.4f}" if run.losses else "-"
        difference = f"{largest_difference(run, reference):.1e}" if run.losses and run is not reference else "-"
        print(
            f"{run.backend:<12}{loss:>12}{difference:>14}{run.tokens_per_second:>12,.0f}"
            f"{run.compile_seconds:>11.1f}{run.peak_mib:>10,.0f}"
        )
        if run.fused:
            print("  fused: " + ", ".join(f"{name} {count}" for name, count in run.fused.items()))
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


# The largest difference allowed between the loss curves of the first backend that runs and the others.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


def parse_arguments() -> argparse.Namespace:
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--backends", nargs="+", default=["eager", "megacpp"],
        help="eager, or backends of torch.compile; with a dtype of its own as in eager:float32",
    )  # fmt: skip
    parser.add_argument("--size", default="tiny", choices=["tiny", "large"], help="large: a billion parameters")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run, at least 2")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence, a multiple of the scan's chunk")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and activations")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write losses and figures there")
    default_plot = Path(__file__).parent / "out" / "train_hybrid.png"
    parser.add_argument("--plot", type=Path, default=default_plot, metavar="PATH", help="figure of the loss curves")
    parser.add_argument("--no-plot", action="store_true", default=argparse.SUPPRESS, help="write no figure")
    args = parser.parse_args()
    chunk = (plain_hybrid.LARGE if args.size == "large" else plain_hybrid.TINY).chunk
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is the one that compiles")
    if args.length % chunk:
        parser.error(f"--length must be a multiple of the scan's chunk, {chunk}")
    args.dtype = getattr(torch, args.dtype)
    return args


def main() -> int:
    args = parse_arguments()
    text = standard_library_text()
    print(f"{len(text):,} bytes of text, {args.size}, {args.device}, {args.dtype}, torch {torch.__version__}")
    runs = [recorded(backend, text, args) for backend in args.backends]
    ran: list[Any] = [run for run in runs if not run.failed]
    show(runs, ran[0] if ran else runs[0])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1))
    if "no_plot" not in args:
        plot(args.plot, [run for run in runs if run.losses])
    if any(run.backend.startswith("megacpp") and (run.failed or not run.fused) for run in runs):
        print("FAILED: megacpp did not train the model, or fused nothing")
        return 1
    worst = max((largest_difference(run, ran[0]) for run in ran[1:]), default=0.0)
    if not worst <= TOLERANCE[args.dtype]:  # written so that NaN fails too
        print(f"FAILED: the loss curves differ by {worst:.2e}, more than {TOLERANCE[args.dtype]:.0e}")
        return 1
    print(f"OK: the loss curves agree within {TOLERANCE[args.dtype]:.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
