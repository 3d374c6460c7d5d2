"""torchtitan's own Trainer on DeepSeek-V3's 16B shapes, with fewer layers: tokens a second and peak of each compiler.

    python -m benchmarks.titan --rows Inductor megacpp --ranks 2 --ep 2

needs a GPU for each rank and torchtitan 0.2.2, which is the release for torch 2.11: its parallelize function cuts the
model and compiles attention, norms, router and grouped GEMMs one by one, its train_step trains. Tokens are random, as
reading text costs nothing that is compared. The Trainer makes the process group, so each row is a run of torchrun by
itself. They compile one after the other, and then take turns of a few steps while the others wait: what else a host
does meets them alike. Rows are written to one JSON file, each with the losses, the time of every step and what fired.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.harness import order_of, profiled, progress
from benchmarks.variants import registered

# compiler's options (None: Inductor's own), torchtitan's checkpointing
ROWS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "Inductor": (None, "none"),
    "Inductor, SelectiveAC": (None, "selective"),
    "megacpp": ({}, "none"),
    "megacpp, policy none": ({"policy": "none"}, "none"),
    "megacpp, selective": ({"policy": "selective"}, "none"),
    "megacpp, SelectiveAC": ({}, "selective"),
}
# What torchrun's ranks are told by the environment: their row, and the folder where they wait for their turns.
ROW, TURNS = "TITAN_ROW", "TITAN_TURNS"
COMPILING = 15  # steps before the first turn: compile, and memory settles


class RandomTokens:
    """What torchtitan asks of a data loader."""

    def __init__(self, batch: int, length: int, words: int, seed: int) -> None:
        self.shape, self.words, self.seed = (batch, length + 1), words, seed

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            tokens = torch.randint(self.words, self.shape, generator=draw)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def trainer(a: Any, checkpoint: str, compiled: bool) -> Any:
    from torchtitan.config import JobConfig
    from torchtitan.models.deepseek_v3 import deepseekv3_args, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    known = deepseekv3_args["debugmodel" if a.quick else "16B"]
    shapes = dataclasses.replace(known, n_layers=a.layers, attn_type="sdpa", attn_mask_type="causal")

    def loader(dp_world_size: int, dp_rank: int, **_: Any) -> RandomTokens:
        return RandomTokens(a.batch, a.length, shapes.vocab_size, seed=dp_rank)

    spec = dataclasses.replace(
        get_train_spec(), model_args={"few_layers": shapes}, build_dataloader_fn=loader, build_tokenizer_fn=None,
        state_dict_adapter=None,
    )  # fmt: skip
    register_train_spec("measured", spec)
    job = JobConfig()
    job.job.dump_folder = tempfile.mkdtemp()
    job.model.name, job.model.flavor = "measured", "few_layers"
    job.metrics.log_freq = 1
    job.training.local_batch_size, job.training.seq_len = a.batch, a.length
    job.training.steps = COMPILING + a.turns * a.calls + 1
    job.parallelism.tensor_parallel_degree, job.parallelism.expert_parallel_degree = a.tp, a.ep
    job.parallelism.expert_tensor_parallel_degree = a.tp if a.ep == 1 else 1
    job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = checkpoint, "op"
    job.compile.enable = compiled
    job.debug.seed = 0
    return Trainer(job)


def run(a: Any, row: str, turns: Path) -> dict[str, Any]:
    """Of a rank: the steps that compile, then turns, each when the file that calls for it is there."""
    import megacpp_compile

    options, checkpoint = ROWS[row]
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(megacpp_compile.record())
        if options is not None:
            registered()
            stack.enter_context(megacpp_compile.enable(options))
        made = trainer(a, checkpoint, compiled=True)
        losses: list[float] = []
        made.metrics_processor.log = lambda step, loss, *_, **__: losses.append(float(loss))
        batches = made.batch_generator(made.dataloader)
        cuda, first = made.device.type == "cuda", dist.get_rank() == 0

        def steps(count: int) -> list[float]:
            seconds = []
            for _ in range(count):
                made.step += 1
                began = time.perf_counter()
                made.train_step(batches)
                if cuda:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            return seconds

        compiling = steps(COMPILING)
        of_turns = []
        for turn in range(a.turns):
            if first:
                (turns / f"waits {turn}").touch()
            while not (turns / f"go {turn}").exists():
                time.sleep(0.01)
            if not turn and cuda:
                torch.cuda.reset_peak_memory_stats()
            of_turns.append(steps(a.calls))
        own: dict[str, Any] = {
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "sites": {n: c for n, c in report.counts.items() if c},
            "misses": sorted({f"{m.pass_name}: {m.reason}" for m in report.misses}),
            "fell": sorted({str(f.reason) for f in report.frames if not f.captured}),
        }
        if a.profile:
            with profiled(row, a.out.parent) as own["profile"]:
                steps(1)
    step = statistics.median(statistics.median(turn) for turn in of_turns)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {"name": row, "step_s": step, "tokens_per_s_and_gpu": a.batch * a.length / a.tp / step,
            "first_s": compiling[0], "turns_s": of_turns, "losses": losses, "of_ranks": every}  # fmt: skip


def take_turns(a: Any, arguments_of_ranks: Sequence[str]) -> list[dict[str, Any]]:
    """A run of torchrun for each row, one of them at work at a time."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs: dict[str, subprocess.Popen[bytes]] = {}
        folders = {row: Path(folder, str(n)) for n, row in enumerate(a.rows)}

        def waited(row: str, name: str) -> None:
            while not (folders[row] / name).exists():
                if runs[row].poll() is not None:
                    raise SystemExit(f"benchmarks.titan: {row} ended with {runs[row].returncode} before {name!r}")
                time.sleep(0.05)

        for row in a.rows:
            folders[row].mkdir()
            progress(f"{row}: compiles")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(a.ranks),
                       "-m", "benchmarks.titan", *arguments_of_ranks]  # fmt: skip
            told = {**os.environ, ROW: row, TURNS: str(folders[row])}
            runs[row] = subprocess.Popen(command, env=told, stdout=sys.stderr)
            stack.callback(runs[row].terminate)
            waited(row, "waits 0")
        for turn in range(a.turns):
            for row in order_of(turn, a.rows):
                progress(f"turn {turn + 1} of {a.turns}: {row}")
                (folders[row] / f"go {turn}").touch()
                waited(row, "result" if turn + 1 == a.turns else f"waits {turn + 1}")
        for process in runs.values():
            process.wait(timeout=120)
        return [json.loads((folders[row] / "result").read_text()) for row in a.rows]


def of_a_rank(a: Any) -> None:
    row = run(a, os.environ[ROW], Path(os.environ[TURNS]))
    if dist.get_rank() == 0:
        said = Path(os.environ[TURNS], "said")
        said.write_text(json.dumps(row))
        said.rename(said.with_name("result"))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.titan", __doc__)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=["Inductor", "megacpp"],
                        help="compilers and checkpointing")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of this host")
    parser.add_argument("--layers", type=int, default=6, help="the first is dense")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--turns", type=int, default=5, help="how often every row is timed")
    parser.add_argument("--calls", type=int, default=5, help="steps of a turn")
    parser.add_argument("--tp", type=int, default=1, help="ranks that heads are cut over")
    parser.add_argument("--ep", type=int, default=1, help="ranks that experts are cut over")
    parser.add_argument("--profile", action="store_true",
                        help="print where the time of one more step goes, and write timelines beside OUT")
    parser.add_argument("--quick", action="store_true", help="the shapes of torchtitan's debug model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "titan.json", help="JSON")
    a = parser.parse_args(argv)
    try:
        import torchtitan.train  # noqa: F401
    except ImportError as error:
        parser.error(f"needs torchtitan 0.2.2 and what it imports: pip install torchtitan==0.2.2 ({error})")
    if ROW in os.environ:
        of_a_rank(a)
        return 0
    rows = take_turns(a, sys.argv[1:] if argv is None else argv)
    sizes = {k: v for k, v in vars(a).items() if k not in ("rows", "out", "profile")}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"format": 1, "conditions": conditions(device, 0), "sizes": sizes, "rows": rows}
    a.out.write_text(json.dumps(found, indent=1))
    for row in rows:
        peak = max(r["peak_gib"] or 0.0 for r in row["of_ranks"])
        print(f"{row['name']:<24}{row['step_s'] * 1e3:>9.1f} ms ({row['step_s'] / rows[0]['step_s']:.3f})  first"
              f" {row['first_s']:.1f} s {row['tokens_per_s_and_gpu']:>9.0f} tokens/s a GPU{peak:>8.2f} GiB  loss"
              f" {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}  {row['of_ranks'][0]['sites']}"
              f" fell {row['of_ranks'][0]['fell']}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
