"""Split-RoPE-concat where it runs: in a compiled MLA block, behind the GEMMs that make its operands.

    python -m benchmarks.rope_in_block

It needs a GPU (with `--device cpu --quick` it compiles a toy block, and there are no kernels to time). For each of the
blocks of `--subject block`: the time of our rotation kernels in a forward and a backward, as the profiler has it, and
how far that is from their bytes at the copying speed measured in the same run, working in place; beside it the time of
everything in the block that is neither a GEMM nor attention, where a copy made for them would show.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import megacpp_compile
from benchmarks import arguments, ceilings
from benchmarks.conditions import conditions
from benchmarks.harness import Settings, kernel_times, milliseconds
from benchmarks.subjects.block import QUICK, SIZES, Size, inputs
from benchmarks.subjects.rope import moved

OURS = "mla_rope"
# How kernels of GEMMs and of attention are called, here by cuBLAS and cuDNN.
OTHERS = ("nvjet", "gemm", "cutlass", "cudnn", "sdpa", "flash", "fmha", "splitK", "cublas")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = arguments.parser("benchmarks.rope_in_block", __doc__)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick alone")
    p.add_argument("--quick", action="store_true", help="a toy block")
    p.add_argument("--steps", type=int, default=10, help="profiled of each block")
    p.add_argument("--out", type=Path, help="a JSON file of the rows")
    return p.parse_args(argv)


def row(size: Size, steps: int, settings: Settings) -> dict[str, Any]:
    device = settings.device
    model = size.attention().to(device, torch.bfloat16)
    args = inputs(size, settings)
    leaves = [args[0], *model.parameters()]
    grad = torch.randn_like(args[0])
    with megacpp_compile.record() as report:
        call = torch.compile(model, backend="megacpp", options={"keep_latents": True})
        torch.autograd.grad(call(*args), leaves, grad)
    found: dict[str, Any] = {"block": size.name, "sites": {k: n for k, n in report.counts.items() if n}}
    if device.type != "cuda":
        return found
    times = kernel_times(lambda: torch.autograd.grad(call(*args), leaves, grad), steps)
    tables = (args[1].numel() + args[2].numel()) * args[1].element_size()
    bytes_ = sum(moved(size.batch * size.tokens, size.heads, size.nope, size.rope, size.v, 2, tables))
    ours = {name: ms for name, (ms, _) in times.items() if OURS in name}
    rest = {n: ms for n, (ms, _) in times.items() if n not in ours and not any(word in n for word in OTHERS)}
    floor = settings.ceilings.milliseconds(ceilings.Work(bytes=bytes_))
    taken, everything = sum(ours.values()), sum(ms for ms, _ in times.values())
    return found | {"kernels": ours, "ms": taken, "floor": floor, "x": taken / floor, "rest": rest,
                    "rest_ms": sum(rest.values()), "all_ms": everything}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':8}{'rotations ms':>14}{'floor ms':>10}{'x floor':>9}{'other small ms':>16}{'all ms':>9}"]
    for r in rows:
        lines.append(f"{r['block']:8}{r['ms']:14.3f}{r['floor']:10.3f}{r['x']:9.2f}{r['rest_ms']:16.3f}"
                     f"{r['all_ms']:9.2f}")  # fmt: skip
        lines += [f"  {ms:8.3f}  {name}" for name, ms in sorted(r["kernels"].items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    if a.device == "cpu" and not a.quick or a.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU to measure on; the whole path at toy sizes: --device cpu --quick", file=sys.stderr)
        return 2
    device, seed = torch.device(a.device), 0
    torch.manual_seed(seed)
    top = ceilings.measure(device, a.quick, 3, lambda fn: milliseconds(fn, device, 200.0))
    settings = Settings(device, a.quick, 3, 200.0, seed, top)
    rows = [row(size, a.steps, settings) for size in (QUICK if a.quick else SIZES)]
    if a.out:
        a.out.write_text(json.dumps({"conditions": conditions(device, seed), "rows": rows}, indent=1))
    print(table(rows) if a.device == "cuda" else "\n".join(f"{r['block']}: {r['sites']}" for r in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
