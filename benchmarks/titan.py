"""torchtitan's own Trainer on DeepSeek-V3's 16B shapes, with fewer layers: tokens a second and peak of each compiler.

    torchrun --nproc-per-node 2 -m benchmarks.titan --row megacpp --ep 2

needs a GPU for each rank and torchtitan 0.2.2, which is the release for torch 2.11: its parallelize function cuts the
model and compiles attention, norms, router and grouped GEMMs one by one, its train_step trains. Tokens are random, as
reading text costs nothing that is compared. One row a call: the Trainer makes the process group. Rows are written to
one JSON file, each with the losses, the time of every step and what fired.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
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
from benchmarks.harness import profiled
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
    job.training.local_batch_size, job.training.seq_len, job.training.steps = a.batch, a.length, a.steps
    job.parallelism.tensor_parallel_degree, job.parallelism.expert_parallel_degree = a.tp, a.ep
    job.parallelism.expert_tensor_parallel_degree = a.tp if a.ep == 1 else 1
    job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = checkpoint, "op"
    job.compile.enable = compiled
    job.debug.seed = 0
    return Trainer(job)


def run(a: Any) -> dict[str, Any]:
    import megacpp_compile

    options, checkpoint = ROWS[a.row]
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(megacpp_compile.record())
        if options is not None:
            registered()
            stack.enter_context(megacpp_compile.enable(options))
        made = trainer(a, checkpoint, compiled=True)
        losses: list[float] = []
        made.metrics_processor.log = lambda step, loss, *_, **__: losses.append(float(loss))
        batches = made.batch_generator(made.dataloader)
        seconds = []
        cuda = made.device.type == "cuda"
        for made.step in range(1, a.steps + 1):
            if made.step == 4 and cuda:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            with profiled(a.row, a.out.parent) if a.profile and made.step == a.steps else contextlib.nullcontext():
                made.train_step(batches)
                if cuda:
                    torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            if dist.get_rank() == 0:
                said = f"{a.row}: step {made.step}, loss {losses[-1]:.4f}, {seconds[-1]:.2f} s"
                print(said, file=sys.stderr, flush=True)
        own = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
               "sites": {n: c for n, c in report.counts.items() if c},
               "misses": sorted({f"{m.pass_name}: {m.reason}" for m in report.misses}),
               "fell": sorted({str(f.reason) for f in report.frames if not f.captured})}  # fmt: skip
        step = statistics.median(seconds[3:])
        tokens = a.batch * a.length * dist.get_world_size() // a.tp
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {"name": a.row, "step_s": step, "tokens_per_s_and_gpu": tokens / step / dist.get_world_size(),
            "seconds": seconds, "losses": losses, "of_ranks": every}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.titan", __doc__)
    parser.add_argument("--row", required=True, choices=[*ROWS], help="compiler and checkpointing")
    parser.add_argument("--layers", type=int, default=8, help="the first is dense")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=15, help="the first three compile and warm up")
    parser.add_argument("--tp", type=int, default=1, help="ranks that heads are cut over")
    parser.add_argument("--ep", type=int, default=1, help="ranks that experts are cut over")
    parser.add_argument("--profile", action="store_true",
                        help="print where the time of the last step goes, and write timelines beside OUT")
    parser.add_argument("--quick", action="store_true", help="the shapes of torchtitan's debug model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "titan.json", help="added to")
    a = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks.titan --row megacpp")
    try:
        import torchtitan.train  # noqa: F401
    except ImportError as error:
        parser.error(f"needs torchtitan 0.2.2 and what it imports: pip install torchtitan==0.2.2 ({error})")
    row = run(a)
    if dist.get_rank() == 0:
        sizes = {k: v for k, v in vars(a).items() if k not in ("row", "out", "profile")}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = [*(json.loads(a.out.read_text())["rows"] if a.out.exists() else []), row]
        document = {"format": 1, "conditions": conditions(device, 0), "sizes": sizes, "ranks": dist.get_world_size(),
                    "rows": rows}  # fmt: skip
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(document, indent=1))
        peak = max(r["peak_gib"] or 0.0 for r in row["of_ranks"])
        print(f"{row['name']:<24}{row['step_s'] * 1e3:>9.1f} ms{row['tokens_per_s_and_gpu']:>9.0f} tokens/s a GPU"
              f"{peak:>8.2f} GiB  loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}  {row['of_ranks'][0]['sites']}"
              f" fell {row['of_ranks'][0]['fell']}", flush=True)  # fmt: skip
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
