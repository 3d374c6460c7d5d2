"""What XLA makes of a plain MLA block, forward and backward: openxla alone beside openxla behind this package.

    PJRT_DEVICE=CPU python -m benchmarks.xla_programs
    PJRT_DEVICE=CPU python -m benchmarks.xla_programs --tokens 1024 --dim 1024 --heads 8 --dtype bf16

A line a variant; each runs in processes of its own, as XLA reads its flags once, in turn with the others. "given":
instructions that compute elementwise, and those that only move data, in what XLA was given. The rest is of the programs
it made of that: dots; fusions; what is launched outside of fusions; and moves inside or outside. ms, CPU ms: medians of
forward and backward together, by the clock and in all threads, of the best round. Ahead of the table: whether any shape
was dynamic, and what ran on the host. Needs torch_xla, and some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments

VARIANTS: dict[str, dict[str, Any] | None] = {
    "openxla": None,
    "megacpp": {},
    "megacpp, latents recomputed": {"keep_latents": False},
}
MOVES = frozenset(
    "concatenate copy dynamic-slice dynamic-update-slice gather pad reverse scatter slice transpose".split()
)
ELEMENTWISE = frozenset(
    "abs add and compare convert cosine divide exponential log maximum minimum multiply negate not or power rsqrt "
    "select sine sqrt subtract tanh".split()
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?P<type>\([^)]*\)|\S+) (?P<op>[\w-]+)\(")
_CALLED = re.compile(r"(?:to_apply|body)=(%?[\w.-]+)")
# A GEMM that XLA gave to a library.
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|dot)', re.IGNORECASE)


def instructions(text: str, launched_only: bool = False) -> Counter[str]:
    """Opcode -> how often it stands in an HLO module's text; with `launched_only`, outside of fusions and reducers."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    name = entry = ""
    for line in text.splitlines():
        if not line.startswith(" ") and line.endswith("{") and not line.startswith("HloModule"):
            name = line.removeprefix("ENTRY ").split()[0].split("(")[0]
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif (match := _INSTRUCTION.match(line)) is not None:
            bodies[name].append((match["op"], line))
    wanted = list(bodies)
    if launched_only:
        wanted = [entry]
        for at in wanted:  # grows: what is called runs as if it stood here
            calls = (_CALLED.search(line) for op, line in bodies[at] if op in ("call", "while", "conditional"))
            wanted += [match[1] for match in calls if match is not None]
    return Counter(
        "dot" if op == "custom-call" and _LIBRARY.search(line) else op for at in wanted for op, line in bodies[at]
    )


def counts(given: list[str], made: list[str]) -> dict[str, int]:
    """The columns of the table, of HLO modules before and after XLA's optimisations."""
    before = sum((instructions(t) for t in given), Counter())
    after = sum((instructions(t) for t in made), Counter())
    launched = sum((instructions(t, launched_only=True) for t in made), Counter())
    return {
        "programs": len(made),
        "given elementwise": sum(n for op, n in before.items() if op in ELEMENTWISE),
        "given moves": sum(n for op, n in before.items() if op in MOVES),
        "dots": after["dot"],
        "fusions": launched["fusion"],
        "elementwise": sum(n for op, n in launched.items() if op in ELEMENTWISE),
        "moves": sum(n for op, n in launched.items() if op in MOVES),
        "moves in all": sum(n for op, n in after.items() if op in MOVES),
        "dynamic": sum(t.count("<=") for t in given),
    }


def measure(options: dict[str, Any] | None, a: argparse.Namespace) -> dict[str, Any]:
    """Train the block for some steps on this process's XLA device."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    import megacpp_compile
    from benchmarks.models import rotary_tables
    from benchmarks.saved_for_backward import PlainBlock

    torch.manual_seed(0)
    device, dtype = torch_xla.device(), {"fp32": torch.float32, "bf16": torch.bfloat16}[a.dtype]
    nope, rope = a.head, a.head // 2
    block = PlainBlock(a.dim, a.heads, a.dim // 2, a.dim // 4, nope, rope, nope).to(device, dtype)
    x = torch.randn(a.batch, a.tokens, a.dim, dtype=dtype).to(device).requires_grad_()
    tables = [t.to(device) for t in rotary_tables(a.tokens, rope, torch.device("cpu"), dtype)]
    settings: Any = {"backend": "openxla"} if options is None else {"backend": "megacpp", "options": options}
    grad = torch.randn(a.batch, a.tokens, a.dim, dtype=dtype).to(device)
    torch_xla.sync(wait=True)
    seconds, cpu, kept = [], [], {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[torch_xla._XLAC._xla_get_tensor_id(t)] = t
        return t

    with megacpp_compile.record() as report:
        call = torch.compile(block, **settings)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call(x, *tables).backward(grad)
    own = {torch_xla._XLAC._xla_get_tensor_id(t) for t in (*block.parameters(), x, *tables)}
    saved = sum(t.numel() * t.element_size() for key, t in kept.items() if key not in own)
    for _ in range(a.steps):
        x.grad = None
        block.zero_grad()
        torch_xla.sync(wait=True)
        xm.wait_device_ops()
        began, used = time.perf_counter(), time.process_time()
        call(x, *tables).backward(grad)
        torch_xla.sync(wait=True)
        xm.wait_device_ops()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    ms, cpu_ms = (statistics.median(times) * 1e3 for times in (seconds, cpu))
    fallen = [n for n in metrics.counter_names() if n.startswith("aten::")]
    return {"ms": ms, "CPU ms": cpu_ms, "sites": len(report.sites), "saved MiB": saved / 2**20, "fallen": fallen}


@contextlib.contextmanager
def compiled_by(module: str, variant: str, arguments: list[str]) -> Iterator[tuple[dict[str, Any], Path]]:
    """`python -m module --variant ...` in a process of its own: the JSON it prints last, and, for the time of the
    context, the folder with the programs it compiled. Raises RuntimeError with the end of what a failed one said."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, "--variant", variant],
            env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{variant}: {done.stderr[-2000:]}")
        yield json.loads(done.stdout.splitlines()[-1]), Path(folder)


def show(rows: dict[str, dict[str, Any]], columns: Sequence[str]) -> None:
    """The rows as a table in Markdown."""
    print("| | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name, row in rows.items():
        cells = (f"{row[c]:.1f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        print(f"| {name} | " + " | ".join(cells) + " |")


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """`measure` in a process of its own, and the counts of the programs it compiled."""
    with compiled_by("benchmarks.xla_programs", name, arguments) as (row, folder):
        given = [p.read_text() for p in sorted(folder.glob("*before_optimizations.txt"))]
        made = [p.read_text() for p in sorted(folder.glob("*after_optimizations.txt"))]
    wanted = [i for i, text in enumerate(given) if " dot(" in text]  # the rest copies inputs and zeroes gradients
    return {**row, **counts([given[i] for i in wanted], [made[i] for i in wanted])}


SIZES = {
    "batch": (2, "sequences"), "tokens": (256, "tokens of each"), "dim": (512, "width of the block"),
    "heads": (4, "heads"), "head": (64, "channels of a head, beside half as many that RoPE rotates"),
    "steps": (20, "steps of a round"), "rounds": (3, "rounds"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.parser("benchmarks.xla_programs", __doc__)
    for name, (default, meaning) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights and activations")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one here, and print it as JSON")
    argv = sys.argv[1:] if argv is None else argv
    a = parser.parse_args(argv)
    arguments.need_torch_xla(parser)
    if a.variant is not None:
        print(json.dumps(measure(VARIANTS[a.variant], a)))
        return
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(a.rounds):
        for name in VARIANTS:
            row = run(name, list(argv))
            best = rows.setdefault(name, row)
            best.update({c: min(best[c], row[c]) for c in ("ms", "CPU ms")})
    fallen = sorted({n for row in rows.values() for n in row["fallen"]})
    dynamic = sum(row["dynamic"] for row in rows.values())
    print(f"dynamic shapes: {dynamic}; ops on the host: {', '.join(fallen) or 'none'}")
    show(rows, [c for c in next(iter(rows.values())) if c not in ("fallen", "dynamic")])


if __name__ == "__main__":
    main()
