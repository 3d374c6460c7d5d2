"""What top-k sparse MLA (`sparse_mla`) costs on XLA: the reference's chunks beside the loop of `tpu_xla.py`.

    PJRT_DEVICE=CPU python -m benchmarks.xla_sparse_mla
    PJRT_DEVICE=CPU python -m benchmarks.xla_sparse_mla --tokens 512 --rows 512 --topk 128 --channels 192 --values 128

Needs torch_xla. The first takes eight minutes, of which six go into compiling the chunks that are written out.

Forward and backward are two programs, in a process of its own for each line. MiB: all buffers of each program. first s:
to trace, compile and run both once. ms of CPU time: median of the steps after that.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import arguments
from benchmarks.xla_programs import compiled_by, counts, show

# Lowering, and the bytes of rows it gathers at once; None for its own.
VARIANTS: dict[str, tuple[str, int | None]] = {
    "reference": ("reference", None),
    "reference, chunks of 8 MiB": ("reference", 8 << 20),
    "tpu_xla": ("tpu_xla", None),
}
SIZES = {
    "tokens": (256, "queries"), "rows": (1024, "rows of keys and values"), "heads": (16, "heads"),
    "topk": (512, "rows a query reads"), "channels": (576, "channels of a row"),
    "values": (512, "of them those of the values"), "steps": (5, "steps behind the first"),
}  # fmt: skip


def measure(variant: str, a: argparse.Namespace) -> dict[str, Any]:
    """Some steps on this process's XLA device."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    from megacpp_compile.lowerings.sparse_mla import reference, tpu_xla

    name, at_once = VARIANTS[variant]
    reference.CHUNK_BYTES = at_once or reference.CHUNK_BYTES
    op = {"reference": reference, "tpu_xla": tpu_xla}[name]
    torch.manual_seed(0)
    q, kv = torch.randn(1, a.tokens, a.heads, a.channels), torch.randn(1, a.rows, 1, a.channels)
    indices = torch.rand(1, a.tokens, 1, a.rows).argsort(-1)[..., : a.topk]
    grad = torch.randn(1, a.tokens, a.heads, a.values)
    q, kv, indices, grad = (t.to(torch_xla.device()) for t in (q, kv, indices, grad))
    settings = (a.channels**-0.5, a.values, True, 0)
    seconds = []
    for _ in range(a.steps + 1):
        torch_xla.sync(wait=True)
        xm.wait_device_ops()
        began, used = time.perf_counter(), time.process_time()
        out, lse = op.sparse_mla(q, kv, indices, None, *settings)
        torch_xla.sync()
        kept = op.sparse_mla_backward(grad, None, q, kv, indices, out, lse, *settings)
        torch_xla.sync(wait=True)
        xm.wait_device_ops()
        seconds.append((time.perf_counter() - began, time.process_time() - used))
        del kept
    fallen = [n for n in metrics.counter_names() if n.startswith("aten::")]
    cpu = statistics.median(used for _, used in seconds[1:])
    return {"first s": seconds[0][0], "ms of CPU time": cpu * 1e3, "on the host": ", ".join(fallen) or "none"}


def run(variant: str, arguments: list[str]) -> dict[str, Any]:
    """`measure` in a process of its own, with the counts and the memory of its two programs."""
    with compiled_by("benchmarks.xla_sparse_mla", variant, arguments) as (row, folder):
        # In the order of the modules, of which the first have no GEMM: they copy inputs.
        given = {p.name.split(".")[0]: p.read_text() for p in sorted(folder.glob("*before_optimizations.txt"))}
        modules = [name for name, text in given.items() if " dot(" in text]
        made = [next(folder.glob(f"{m}.*after_optimizations.txt")).read_text() for m in modules]
        reports = [next(folder.glob(f"{m}.*memory-usage-report.txt")).read_text() for m in modules]
    found = counts([given[m] for m in modules], made)
    used = [re.search(r"[Tt]otal bytes used: (\d+)", text) for text in reports]
    mib = " + ".join(f"{int(m[1]) / 2**20:.0f}" for m in used if m is not None)
    return {**row, "MiB": mib, **{column: found[column] for column in ("dots", "moves in all", "dynamic")}}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.parser("benchmarks.xla_sparse_mla", __doc__)
    for name, (default, meaning) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one here, and print it as JSON")
    argv = sys.argv[1:] if argv is None else argv
    a = parser.parse_args(argv)
    arguments.need_torch_xla(parser)
    if a.variant is not None:
        print(json.dumps(measure(a.variant, a)))
        return
    rows = {name: run(name, list(argv)) for name in VARIANTS}
    show(rows, list(next(iter(rows.values()))))


if __name__ == "__main__":
    main()
