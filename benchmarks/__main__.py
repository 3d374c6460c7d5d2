"""The benchmark suite: what plain models cost under eager, Inductor, megacpp and other people's kernels.

    python -m benchmarks                        # every subject; needs a CUDA GPU
    python -m benchmarks --subject block        # one of them, likewise
    python -m benchmarks --device cpu --quick   # the whole path at toy sizes, for trying the suite itself

Every row is checked against a wider eager reference before it is timed, and rows are timed in turns. For each subject
there is a table, a JSON file with every repetition and the conditions, and a plot. The exit code is 1 when a row is
WRONG or failed (somebody else's rows are marked only), 2 when there is nothing to measure on.

Other measurements, each with its own --help: benchmarks.compile_time, benchmarks.saved_for_backward,
benchmarks.recall_table, benchmarks.coverage, benchmarks.rounding_loss, benchmarks.compression_loss.
benchmarks.performance_page makes docs/generated/performance.md of JSON files, benchmarks.figures its pictures. On
several GPUs, by torchrun: benchmarks.parallel, benchmarks.titan. On a GPU: benchmarks.fp8_gate, benchmarks.hybrid_lm,
benchmarks.qwen3_next, benchmarks.decode_model, benchmarks.rope_in_block; with torch_xla: benchmarks.xla_programs,
benchmarks.xla_sparse_mla, benchmarks.xla_zoo.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, subjects

FORMAT = 1  # of the JSON; raise it when a key changes its meaning or goes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.parser("benchmarks", __doc__)
    parser.add_argument(
        "--subject", action="append", type=subjects.current, choices=subjects.NAMES,
        help="repeatable; default: all of them",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick alone")
    parser.add_argument("--quick", action="store_true", help="toy sizes, two turns")
    parser.add_argument("--turns", type=int, help="how often every row is measured (default 5, quick: 2)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="where JSON and plots go")
    parser.add_argument(
        "--rows", action="append", metavar="TEXT",
        help="repeatable: only rows whose name holds it, beside eager, Inductor and the limits; default: all of them",
    )
    parser.add_argument("--seed", type=int, help="of the random inputs; default: a fresh one, kept in the JSON")
    parser.add_argument("--plain", action="store_true", help="tables without rich")
    parser.add_argument("--with-te", action="store_true", help="Transformer Engine's rows too: see peers/")
    return parser.parse_args(argv)


def nothing_to_measure_on(a: argparse.Namespace) -> str | None:
    import torch

    if a.device == "cpu":
        return None if a.quick else "--device cpu is for trying the suite: it needs --quick"
    if not torch.cuda.is_available():
        return (
            f"no CUDA GPU: torch {torch.__version__} sees none. The suite at toy sizes: "
            "python -m benchmarks --device cpu --quick"
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    a = parse(argv)
    reason = nothing_to_measure_on(a)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    if a.with_te:
        from benchmarks.harness import Missing
        from benchmarks.peers import transformer_engine

        try:
            transformer_engine.load()
        except Missing as missing:
            print(missing, file=sys.stderr)
            return 2
    settings = make_settings(a)
    a.out.mkdir(parents=True, exist_ok=True)
    good = True
    for name in a.subject or subjects.NAMES:
        good &= run_subject(name, settings, a)
    return 0 if good else 1


def make_settings(a: argparse.Namespace) -> Any:
    import torch

    from benchmarks import ceilings
    from benchmarks.harness import Settings, milliseconds, progress

    device = torch.device(a.device)
    seed = secrets.randbelow(2**31) if a.seed is None else a.seed
    turns = a.turns or (2 if a.quick else 5)
    budget = 5.0 if a.quick else 60.0
    # One code object serves every row of a table: more entries than Dynamo allows by default, and never eager instead.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    progress(f"ceilings of {device}, seed {seed}")
    top = ceilings.measure(device, a.quick, turns, lambda fn: milliseconds(fn, device, budget))
    return Settings(device, a.quick, turns, budget, seed, top, a.with_te, tuple(a.rows or ()))


def run_subject(name: str, settings: Any, a: argparse.Namespace) -> bool:
    """Measure, show and write one subject; whether all rows that are ours to answer for are right."""
    import torch

    from benchmarks import figures, tables
    from benchmarks.conditions import conditions
    from benchmarks.harness import progress

    torch.manual_seed(settings.seed)
    measured: list[dict[str, Any]] = []
    top, file = settings.ceilings, a.out / f"{name}.json"
    document = {
        "format": FORMAT, "subject": name, "quick": settings.quick, "turns": settings.turns,
        "conditions": conditions(settings.device, settings.seed),
        "ceilings": {"copy_TB_per_s": top.copy_bytes_per_s / 1e12,
                     "bf16_matmul_TFLOP_per_s": top.matmul_flops_per_s / 1e12, "turns": top.turns},
        "tables": measured,
    }  # fmt: skip
    for table in subjects.tables_of(name)(settings):
        tables.show(table, a.plain)
        measured.append(table)
        file.write_text(json.dumps(document, indent=1))  # what is measured outlasts what comes next
    drawn = figures.draw(document, file.with_suffix(".png"))
    progress(f"wrote {file}" + (f" and {file.with_suffix('.png')}" if drawn else "; no plot without matplotlib"))
    return not any(
        row.get("ok") is False or row.get("failed") for t in measured for row in t["rows"] if row["kind"] != "peer"
    )


if __name__ == "__main__":
    sys.exit(main())
