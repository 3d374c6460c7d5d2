"""Qwen3-Next as transformers writes it, trained: three layers of Gated DeltaNet to one of attention, experts in each.

    python -m benchmarks.qwen3_next --rows float32 eager inductor megacpp --steps 100

It needs a GPU (with `--device cpu --quick` none, at toy sizes) and transformers. A row is its own process: bfloat16
parameters, AdamW, the same weights and the same text (a random walk over words) in every row. `float32` is eager in
float32, what losses are judged by. `fla` is eager with flash-linear-attention's kernels, which transformers calls
wherever they are installed; every other row hides that package.
For each row: the first step in seconds; the median step, in ms, forward, backward and optimizer; the peak in GiB; the
first and the last loss; the largest and the mean distance of a loss from float32's. For megacpp also where the seconds
of the first step went, the sites, and what was nearly one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import arguments

ROWS = ("float32", "eager", "inductor", "megacpp", "fla")
SIZES = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
         "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "num_experts": 128, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "vocab_size": 16384}  # fmt: skip
QUICK = SIZES | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
                 "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                 "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 32, "vocab_size": 128}  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = arguments.parser("benchmarks.qwen3_next", __doc__)
    p.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS[:-1]), help="whose step is trained, in turn")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick alone")
    p.add_argument("--quick", action="store_true", help="toy sizes, 128 tokens")
    p.add_argument("--tokens", type=int, default=8192, help="of a step")
    p.add_argument("--batch", type=int, default=1, help="sequences that share them")
    p.add_argument("--steps", type=int, default=20, help="of training, in every row")
    p.add_argument("--policy", help="option `policy` of the row megacpp")
    p.add_argument("--limit", type=float, default=900, help="seconds that a row may take")
    p.add_argument("--out", type=Path, help="a JSON file of the rows")
    p.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # a row's own process: where its results go
    return p.parse_args(argv)


def train(row: str, a: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    """One row, in this process; `stack` is left behind it."""
    if row != "fla":
        hidden = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "fla" else hidden(name, *rest)
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    sizes = QUICK if a.quick else SIZES
    tokens = 128 if a.quick else a.tokens
    with torch.device(a.device):  # not as the process's default: Dynamo would take every call through its mode
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, use_cache=False)).to(
            torch.float32 if row == "float32" else torch.bfloat16
        )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    draw = torch.Generator(device=a.device).manual_seed(1)
    size = a.steps, a.batch, tokens // a.batch
    text = torch.randint(-3, 4, size, generator=draw, device=a.device).cumsum(-1) % sizes["vocab_size"]
    call: Any = model
    report: Any = None
    if row == "inductor":
        call = torch.compile(model)
    elif row == "megacpp":
        import megacpp_compile

        report = stack.enter_context(megacpp_compile.record())
        call = torch.compile(model, backend="megacpp", options={"policy": a.policy} if a.policy else {})

    def step(words: torch.Tensor) -> float:
        loss = call(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    cuda = a.device == "cuda"
    losses, times = [], []
    for i, words in enumerate(text):
        if cuda and i == 3:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(step(words))
        times.append(time.perf_counter() - begin)
        if i in (0, 1) or i % 10 == 9:
            print(f"  {row}: step {i + 1} of {a.steps}, loss {losses[-1]:.4f}, {times[-1]:.3f} s", file=sys.stderr)
    found: dict[str, Any] = {"row": row, "first": times[0], "step_ms": 1e3 * statistics.median(times[3:] or times),
                             "losses": losses, "tokens": tokens, "torch": torch.__version__}  # fmt: skip
    if cuda:
        found |= {"peak": torch.cuda.max_memory_allocated() / 2**30, "device": torch.cuda.get_device_name()}
    if report is not None:
        found["sites"] = {name: count for name, count in report.counts.items() if count}
        found["misses"] = sorted({f"{m.pass_name}: {m.tag}: {m.reason}" for m in report.misses})
        stages = sorted({stage for frame in report.frames for stage in frame.seconds})
        found["compiling"] = {s: sum(f.seconds.get(s, 0.0) for f in report.frames) for s in stages}
        found["served"] = sorted({f"{s.pass_name} {s.effective}" for s in report.sites})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    exact = next((r["losses"] for r in rows if r["row"] == "float32"), None)
    lines = [f"{'':10}{'first s':>9}{'step ms':>9}{'peak GiB':>10}{'loss':>9}{'to':>9}{'max off':>9}{'mean off':>9}"]
    for r in rows:
        off = [abs(x - y) for x, y in zip(r["losses"], exact, strict=False)] if exact else []
        far = f"{max(off):9.4f}{statistics.mean(off):9.4f}" if off else f"{'':18}"
        lines.append(f"{r['row']:10}{r['first']:9.1f}{r['step_ms']:9.1f}{r.get('peak', float('nan')):10.2f}"
                     f"{r['losses'][0]:9.4f}{r['losses'][-1]:9.4f}{far}")  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    a = parse()
    if a.into is not None:
        with contextlib.ExitStack() as stack:
            a.into.write_text(json.dumps(train(a.rows[0], a, stack)))
        return 0
    if a.device == "cpu" and not a.quick or a.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU to measure on; the whole path at toy sizes: --device cpu --quick", file=sys.stderr)
        return 2
    rows, failed = [], False
    for row in a.rows:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "row.json"
            command = [sys.executable, "-m", "benchmarks.qwen3_next", *sys.argv[1:], "--rows", row, "--into", str(into)]
            try:
                subprocess.run(command, timeout=a.limit, check=True)
                rows.append(json.loads(into.read_text()))
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                failed = True
                print(f"{row}: {error}", file=sys.stderr)
        if a.out:
            a.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    for r in rows:
        if "sites" in r:
            print("seconds of compiling:", ", ".join(f"{k} {v:.1f}" for k, v in r["compiling"].items() if v >= 0.05))
            print("sites", r["sites"], "served by", ", ".join(r["served"]))
            print("\n".join(r["misses"]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
