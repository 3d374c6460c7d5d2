"""What a linear gains in fp8 by its shape, beside what `megacpp_compile.config.fp8_gain` predicts.

    python -m benchmarks.fp8_gate                        # on a GPU with Transformer Engine
    python -m benchmarks.fp8_gate --shape 16384,8192,512 --recipe fp8_current    # likewise
    python -m benchmarks.fp8_gate --compiled             # on a GPU; linears of compiled graphs

Each row is a training step of one linear (forward, gradients of input and weight) as `nn.Linear` in bf16 and as the
module that `replace_linears` puts in its place, timed in turns; with `--compiled` as Inductor compiles it and as
megacpp does under a plan, both replayed as CUDA graphs: a linear alone is too short for the host that launches it. By
itself it has nothing before it to fuse its casts into, so a model gains more. Where the two gains fall on different
sides of `LEAST_GAIN`, the gate decides wrongly, and `RATES` want another value. Exit status 2 without a GPU that has
float8, or for modules without Transformer Engine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import megacpp_compile
from benchmarks import arguments
from benchmarks.harness import milliseconds
from megacpp_compile.config import fp8_gain
from megacpp_compile.config.precision import UNTRACEABLE, PrecisionPlan
from megacpp_compile.precision import engine
from megacpp_compile.precision.replace import replace_linears
from megacpp_compile.report.tables import table_text

# (tokens, out, in): the linears of the MLA blocks in docs/generated/performance.md, squares down to where fp8 loses.
SHAPES = (
    *((16384, n, k) for n, k in ((576, 2048), (576, 4096), (1536, 4096), (6144, 1536), (8192, 512), (4096, 4096))),
    *((4096, n, k) for n, k in ((576, 7168), (1536, 7168), (24576, 1536), (32768, 512), (7168, 16384))),
    *((16384, n, n) for n in (256, 512, 1024, 2048)),
    *((m, 4096, 4096) for m in (128, 512, 2048)),
)
HEADERS = ("tokens", "out", "in", "recipe", "bf16 ms", "fp8 ms", "gain", "predicted", "gate")


def measure(
    shapes: Sequence[tuple[int, int, int]], recipes: Sequence[str], device: torch.device, dtype: torch.dtype,
    target: str = "auto", turns: int = 5, budget_ms: float = 200.0, compiled: bool = False,
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """A row of HEADERS for each shape and recipe. Raises RuntimeError where a linear could not be had in fp8."""
    for m, n, k in shapes:
        for recipe in recipes:
            plain: Any = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
            other: Any = nn.Sequential(nn.Linear(k, n, bias=False, device=device, dtype=dtype))
            plan = PrecisionPlan((("*", recipe),), gate=False)
            if compiled:
                plain, other = _compiled(plain, other, plan, m, k, device, dtype)
            elif not (table := replace_linears(other, plan, target=target)).done:
                raise RuntimeError(f"{recipe} at {(m, n, k)}: {table.reason or table.skipped}")
            steps = {name: _step(module, m, k, device, dtype) for name, module in (("bf16", plain), ("fp8", other))}
            if compiled and device.type == "cuda":
                steps = {name: _captured(step) for name, step in steps.items()}
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(turns):
                for name, step in steps.items():
                    times[name].append(milliseconds(step, device, budget_ms))
            bf16, fp8 = (statistics.median(t) for t in times.values())
            predicted = fp8_gain.gain(recipe, (m, n, k))
            verdict = "fp8" if predicted >= fp8_gain.LEAST_GAIN else "bf16"
            yield m, n, k, recipe, bf16, fp8, bf16 / fp8, predicted, verdict


def _compiled(plain: nn.Module, other: nn.Module, plan: PrecisionPlan, m: int, k: int, *where: Any) -> tuple[Any, Any]:
    """Both compiled, and run once; RuntimeError where the second is not in fp8."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"precision": plan, "strict": True}
    pair: tuple[Any, Any] = torch.compile(plain), torch.compile(other, backend=megacpp_compile.backend, options=options)
    with megacpp_compile.record() as report:
        for module in pair:
            _step(module, m, k, *where)()
    if report.counts["linear"] != 1:
        raise RuntimeError(str(report))
    return pair


def _captured(step: Any) -> Any:
    """`step`, without its host: replays of what it launches."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _step(module: nn.Module, m: int, k: int, device: torch.device, dtype: torch.dtype) -> Any:
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    wanted = [x, *module.parameters()]
    grad = torch.randn_like(module(x))
    return lambda: torch.autograd.grad(module(x), wanted, grad)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit status 2 where there is nothing to measure with."""
    parser = arguments.parser("benchmarks.fp8_gate", __doc__)
    parser.add_argument("--shape", action="append", metavar="TOKENS,OUT,IN", help="repeatable; default: 18 shapes")
    parser.add_argument("--compiled", action="store_true", help="linears of compiled graphs, not modules")
    parser.add_argument("--recipe", action="append", choices=sorted(fp8_gain.RATES),
                        help="repeatable; default: all")  # fmt: skip
    chosen = parser.parse_args(argv)
    reason = engine.why_no_device() if chosen.compiled else engine.load()[1]
    if reason:
        print(f"nothing to measure with: {reason}", file=sys.stderr)
        return 2
    shapes = [tuple(map(int, text.split(","))) for text in chosen.shape or ()] or SHAPES
    rows = []
    recipes = chosen.recipe or sorted(fp8_gain.RATES)
    if chosen.compiled:  # sizes that blocks do not divide stay in bf16, and delayed scaling cannot be traced
        recipes = [recipe for recipe in recipes if recipe not in UNTRACEABLE]
        shapes = [shape for shape in shapes if "fp8_block" not in recipes or not any(size % 128 for size in shape)]
    where = torch.device("cuda"), torch.bfloat16
    for row in measure(shapes, recipes, *where, compiled=chosen.compiled):  # type: ignore[arg-type]
        rows.append(tuple(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row))
        print(" ".join(rows[-1]), flush=True)
    print(table_text("fp8 by shape", HEADERS, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
