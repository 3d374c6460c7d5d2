"""What a linear gains in fp8 by its shape, beside what `megacpp_compile.precision.gate` predicts.

    python -m benchmarks.fp8_gate                        # on a GPU with Transformer Engine
    python -m benchmarks.fp8_gate --shape 16384,8192,512 --recipe fp8_current

Each row is a training step of one linear (forward, gradients of input and weight) as `nn.Linear` in bf16 and as the
module that `replace_linears` puts in its place, timed in turns. Where the two gains fall on different sides of
`LEAST_GAIN`, the gate decides wrongly, and `RATES` want another value.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness import milliseconds
from megacpp_compile.precision import engine, gate
from megacpp_compile.precision.plan import PrecisionPlan
from megacpp_compile.precision.replace import replace_linears
from megacpp_compile.report_table import table_text

# (tokens, out, in): the linears of the MLA blocks in docs/performance.md, and squares down to where fp8 must lose.
SHAPES = (
    *((16384, n, k) for n, k in ((576, 2048), (576, 4096), (1536, 4096), (6144, 1536), (8192, 512), (4096, 4096))),
    *((4096, n, k) for n, k in ((576, 7168), (1536, 7168), (24576, 1536), (32768, 512), (7168, 16384))),
    *((16384, n, n) for n in (256, 512, 1024, 2048)),
    *((m, 4096, 4096) for m in (128, 512, 2048)),
)
HEADERS = ("tokens", "out", "in", "recipe", "bf16 ms", "fp8 ms", "gain", "predicted", "gate")


def measure(
    shapes: Sequence[tuple[int, int, int]], recipes: Sequence[str], device: torch.device, dtype: torch.dtype,
    target: str = "auto", turns: int = 5, budget_ms: float = 200.0,
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """A row of HEADERS for each shape and recipe. Raises RuntimeError where a module could not be replaced."""
    for m, n, k in shapes:
        for recipe in recipes:
            plain = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
            other = nn.Sequential(nn.Linear(k, n, bias=False, device=device, dtype=dtype))
            table = replace_linears(other, PrecisionPlan((("*", recipe),), gate=False), target=target)
            if not table.done:
                raise RuntimeError(f"{recipe} at {(m, n, k)}: {table.reason or table.skipped}")
            times: dict[str, list[float]] = {"bf16": [], "fp8": []}
            for _ in range(turns):
                for name, module in (("bf16", plain), ("fp8", other)):
                    times[name].append(milliseconds(_step(module, m, k, device, dtype), device, budget_ms))
            bf16, fp8 = (statistics.median(t) for t in times.values())
            predicted = gate.gain(recipe, (m, n, k))
            verdict = "fp8" if predicted >= gate.LEAST_GAIN else "bf16"
            yield m, n, k, recipe, bf16, fp8, bf16 / fp8, predicted, verdict


def _step(module: nn.Module, m: int, k: int, device: torch.device, dtype: torch.dtype) -> Any:
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    wanted = [x, *module.parameters()]
    grad = torch.randn_like(module(x))
    return lambda: torch.autograd.grad(module(x), wanted, grad)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit status 1 where there is nothing to measure with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="TOKENS,OUT,IN", help="repeatable")
    parser.add_argument("--recipe", action="append", choices=sorted(gate.RATES), help="repeatable")
    chosen = parser.parse_args(argv)
    _, reason = engine.load()
    if reason:
        print(f"nothing to measure with: {reason}")
        return 1
    shapes = [tuple(map(int, text.split(","))) for text in chosen.shape or ()] or SHAPES
    rows = []
    for row in measure(shapes, chosen.recipe or sorted(gate.RATES), torch.device("cuda"), torch.bfloat16):  # type: ignore[arg-type]
        rows.append(tuple(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row))
        print(" ".join(rows[-1]), flush=True)
    print(table_text("fp8 by shape", HEADERS, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
