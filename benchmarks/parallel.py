"""Parallel training by each compiler: losses, time and memory of a rank, and what fired there.

    torchrun --nproc-per-node 2 -m benchmarks.parallel                        # needs as many GPUs
    torchrun --nproc-per-node 2 -m benchmarks.parallel --device cpu --quick   # the whole path at toy sizes

Layers of plain latent attention (MLA) with a SwiGLU or with experts, cut over all ranks by PyTorch's own means and
compiled one by one, as trainers do, or as one model (`--whole`). Each compiler trains the same weights on the same
batches, then steps without an optimizer are timed in turns. Losses are held against eager's: bfloat16 scatters, and
Inductor's distance from eager says by how much. The exit code is 1 where losses are further off than twice that, where
a site of one device did not fire on some rank, or where there are more graphs than Inductor makes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import arguments, models, parallel_models
from benchmarks.conditions import conditions
from benchmarks.harness import order_of, say
from benchmarks.parallel_models import Sizes
from benchmarks.subjects.block import QUICK, Size

DENSE = Sizes(Size("mid", 4096, 32, 1536, 2), 11008, 4)
EXPERTS = Sizes(Size("lite", 2048, 16, 0, 2), 1408, 4, experts=64, choices=6, shared=2)
TOY = Sizes(QUICK[0], 96, 2)
TOY_EXPERTS = dataclasses.replace(TOY, hidden=32, experts=8, choices=2, shared=1)

HOW = {
    "tensor": "tensor parallel",
    "sequence": "tensor and sequence parallel",
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "fsdp_full": "FSDP2, layers recomputed",
    "fsdp_selective": "FSDP2, layers recomputed but for products and attention",
    "pipeline": "pipeline parallel (1F1B, two microbatches a rank)",
    "experts": "expert parallel, the rest replicated",
    "experts_fsdp": "expert parallel, the rest under FSDP2",
}
ROWS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "Inductor": None,
    "megacpp": {},
    "megacpp, policy none": {"policy": "none"},
    "megacpp, selective": {"policy": "selective"},
    "megacpp, fp8_delayed": {"precision": "fp8_delayed"},
    "Transformer Engine, fp8_delayed": {},
}
# Rows whose linears are Transformer Engine's, in a model of its own -> their recipe.
MODULES = {"Transformer Engine, fp8_delayed": "fp8_delayed"}
FLOAT8 = [name for name in ROWS if "fp8" in name]  # a GPU with float8 alone has them: named to be run
LEARNING_RATE, WARM_UP = 3e-5, 10  # steps; what is much larger diverges, by any compiler
SLACK = 1e-4  # relative, of losses that Inductor happens to get exactly
FLOAT8_OFF = 1e-3  # relative, of losses in float8, whose linears fire in the place of other sites


class Composition:
    """One way to cut the model, with a compiled form of every layer, or of the whole, for every row."""

    def __init__(self, how: str, sizes: Sizes, device: torch.device, rows: Sequence[str], whole: bool) -> None:
        self.how, self.device, self.names = how, device, rows
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh(device.type, (self.ranks,))
        group = mesh.get_group()
        a = sizes.attention
        self.others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        self.model: Any = parallel_models.build(sizes, device, group)
        if recipes := {MODULES[name] for name in rows if name in MODULES}:
            from megacpp_compile.precision.replace import replace_linears

            replace_linears(self.model, *recipes)
        self.tables = models.rotary_tables(a.tokens, a.rope, device, torch.bfloat16)
        self.whole: torch.nn.Module = self.model
        if how in ("tensor", "sequence"):
            plan = parallel_models.TENSOR if how == "tensor" else parallel_models.sequence()
            parallel_models.tensor_parallel(self.model, mesh, plan)
        if how.startswith("fsdp_"):
            parallel_models.checkpoint(self.model, how == "fsdp_selective")
        if how == "ddp":
            self.whole = torch.nn.parallel.DistributedDataParallel(self.model)
        if how == "pipeline":
            self.whole = self.model = stage = parallel_models.Stage(self.model.layers, self.tables, mesh)
            self.pipeline = parallel_models.Pipeline(stage, 2 * self.ranks, device, group)
        self.parts = [self.whole] if whole else list(self.model.layers)
        self.compiled: dict[str, list[Any]] = {}
        for name in rows:
            self.compiled[name] = [_compiled(part, name) for part in self.parts]
        if "fsdp" in how:
            parallel_models.shard(self.model, mesh)
        self.after = parallel_models.repairs(self.model, how, self.ranks, group)
        self.shape = (a.batch * (2 * self.ranks if how == "pipeline" else 1), a.tokens, a.dim)
        self.first = [_local(p).detach().clone().cpu() for p in self.model.parameters()]
        self.inputs = self.batch(0)

    def use(self, name: str) -> None:
        for part, call in zip(self.parts, self.compiled[name], strict=True):
            part._compiled_call_impl = call

    def begin_anew(self) -> None:
        with torch.no_grad():
            for p, first in zip(self.model.parameters(), self.first, strict=True):
                _local(p).copy_(first)
        self.model.zero_grad(set_to_none=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and what the model shall make of them. Under tensor parallelism all ranks have the same ones."""
        alike = self.how in ("tensor", "sequence", "pipeline")
        draw = torch.Generator(self.device).manual_seed(step * 100 + (0 if alike else self.rank))
        x = torch.randn(self.shape, device=self.device, dtype=torch.bfloat16, generator=draw)
        target = x.roll(1, 1).tanh()
        if self.how == "sequence":
            x, target = (t.chunk(self.ranks, 1)[self.rank].contiguous() for t in (x, target))
        return x, target

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        """Forward and backward. Gradients of each rank's mean: those of a part of the tokens are summed over ranks."""
        if self.how == "pipeline":
            return self.pipeline.step(x, target)
        loss = (self.whole(x, *self.tables) - target).float().pow(2).mean()
        (loss / self.ranks if self.how == "sequence" else loss).backward()
        self.after()
        return loss.detach()

    def train(self, name: str, steps: int) -> list[float]:
        self.begin_anew()
        self.use(name)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=False)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / WARM_UP))
        losses = []
        for number in range(steps):
            loss = self.step(*self.batch(number))
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad(set_to_none=True)
            dist.all_reduce(loss)
            losses.append(loss / self.ranks)
        return torch.stack(losses).tolist()

    def timed(self, name: str, calls: int) -> float:
        """Milliseconds of a step, of the slowest rank."""
        self.use(name)
        self.plain_step()
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            self.plain_step()
        self.wait()
        return (time.perf_counter() - began) * 1e3 / calls

    def plain_step(self) -> None:
        self.step(*self.inputs)
        self.model.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def peak(self, name: str) -> float | None:
        """MiB that this rank has allocated at the peak of a step, parameters and gradients included."""
        if self.device.type != "cuda":
            return None
        self.use(name)
        self.plain_step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.plain_step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - self.others) / 2**20


def _compiled(part: torch.nn.Module, name: str) -> Any:
    if name == "eager":
        return None
    import megacpp_compile

    options = ROWS[name]
    part.compile(**({} if options is None else {"backend": megacpp_compile.backend, "options": options or None}))
    return part._compiled_call_impl


def _local(p: Any) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def of_one_device(sizes: Sizes, device: torch.device) -> dict[str, int]:
    """The sites of a layer that is not cut, compiled for a single rank."""
    import megacpp_compile

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    one = parallel_models.build(dataclasses.replace(sizes, layers=1), device, alone)
    a = sizes.attention
    x = torch.randn(a.batch, a.tokens, a.dim, device=device, dtype=torch.bfloat16)
    with megacpp_compile.record() as report:
        one.layers[0].compile(backend=megacpp_compile.backend)
        one(x, *models.rotary_tables(a.tokens, a.rope, device, torch.bfloat16)).float().sum().backward()
    return {name: n for name, n in report.counts.items() if n}


def measure(how: str, sizes: Sizes, device: torch.device, a: Any) -> dict[str, Any]:
    import megacpp_compile

    say(f"{how}: the sites of one device")
    torch._dynamo.reset()  # it compiles the code of layers that were compiled before
    alone = of_one_device(sizes, device)
    torch._dynamo.reset()
    plain = [name for name in a.rows if name not in MODULES]
    compositions: dict[str, Composition] = {}
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in a.rows}
    for name, row in rows.items():
        if name not in compositions:
            alike = [name] if name in MODULES else plain
            compositions |= dict.fromkeys(alike, Composition(how, sizes, device, alike, a.whole))
        composition = compositions[name]
        torch._dynamo.utils.counters.clear()
        began = time.perf_counter()
        with megacpp_compile.record() as report:
            composition.use(name)
            composition.begin_anew()
            composition.plain_step()
            composition.wait()
        row["first_s"] = time.perf_counter() - began
        row["losses"] = composition.train(name, a.steps)
        row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        own = {"sites": {n: c for n, c in report.counts.items() if c}, "peak_mib": composition.peak(name),
               "fell": [f.reason for f in report.frames if not f.captured],
               "misses": sorted({f"{m.pass_name}: {m.reason}" for m in report.misses})}  # fmt: skip
        every: list[Any] = [None] * composition.ranks
        dist.all_gather_object(every, own)
        row["of_ranks"] = every
        first, last = row["losses"][0], row["losses"][-1]
        say(f"{how}: {name}: first step {row['first_s']:.0f} s, losses {first:.4f} to {last:.4f}")
        composition.begin_anew()
    turns: dict[str, list[float]] = {name: [] for name in a.rows}
    for turn in range(a.turns):
        for name in order_of(turn, a.rows):
            turns[name].append(compositions[name].timed(name, a.calls))
        say(f"{how}: turn {turn + 1} of {a.turns}")
    for name, row in rows.items():
        row["ms"] = {"median": statistics.median(turns[name]), "turns": turns[name]}
    found = {"how": how, "what": HOW[how] + ", as one frame" * a.whole, "sizes": dataclasses.asdict(sizes),
             "ranks": composition.ranks, "sites_of_one_device": alone, "rows": list(rows.values())}  # fmt: skip
    judge(found)
    return found


def judge(found: dict[str, Any]) -> None:
    """Adds each row's distance from eager's losses, its ratios to Inductor, and what is wrong with it."""
    rows = {row["name"]: row for row in found["rows"]}
    inductor, eager = rows.get("Inductor"), rows.get("eager")
    for name, row in rows.items():
        row["wrong"] = []
        if eager:
            pairs = zip(row["losses"], eager["losses"], strict=True)
            row["off"] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        if not inductor:
            continue
        row["per_inductor"] = row["ms"]["median"] / inductor["ms"]["median"]
        peaks = [max((r["peak_mib"] or 0.0) for r in one["of_ranks"]) for one in (row, inductor)]
        row["peak_mib"], row["peak_per_inductor"] = peaks[0], peaks[0] / peaks[1] if peaks[1] else None
        if not name.startswith("megacpp"):
            continue
        if eager and row["off"] > (FLOAT8_OFF if name in FLOAT8 else 2 * inductor["off"] + SLACK):
            row["wrong"].append(f"losses are {row['off']:.1e} from eager's, Inductor's {inductor['off']:.1e}")
        if name not in FLOAT8 and any(not _fired(r["sites"], found["sites_of_one_device"]) for r in row["of_ranks"]):
            row["wrong"].append("the sites of one device did not fire on every rank")
        if row["graphs"] > inductor["graphs"]:
            row["wrong"].append(f"{row['graphs']} graphs, where Inductor has {inductor['graphs']}")


def _fired(sites: dict[str, int], of_a_layer: dict[str, int]) -> bool:
    """Whether they are a layer's, once for each layer that was compiled: torch may compile one for all of them."""
    times = {sites.get(name, 0) / n for name, n in of_a_layer.items()}
    return sites.keys() == of_a_layer.keys() and len(times) == 1


def shown(found: dict[str, Any]) -> str:
    columns = {"ms": 9, "/ Inductor": 11, "peak MiB": 10, "/ Ind.": 8, "graphs": 8, "off eager": 11, "first s": 9}
    lines = [f"{found['what']}, {found['ranks']} ranks; one device fires {_sites(found['sites_of_one_device'])}",
             " " * 24 + "".join(f"{name:>{width}}" for name, width in columns.items()) + "  sites"]  # fmt: skip
    for row in found["rows"]:
        sites = sorted({_sites(r["sites"]) for r in row["of_ranks"]})
        ratio, peak = row.get("per_inductor"), row.get("peak_per_inductor")
        lines.append(
            f"{row['name']:<24}{row['ms']['median']:>9.2f}{ratio or 0:>11.3f}{row.get('peak_mib') or 0:>10.0f}"
            f"{peak or 0:>8.3f}{row['graphs']:>8}{row.get('off', 0):>11.1e}{row['first_s']:>9.1f}  {' | '.join(sites)}"
        )
        lines += [f"  WRONG: {what}" for what in row["wrong"]]
        fell = sorted({reason for r in row["of_ranks"] for reason in r["fell"] if reason})
        lines += [f"  compiled by Inductor alone: {reason}" for reason in fell]
    return "\n".join(lines) + "\n"


def _sites(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.parallel", __doc__)
    parser.add_argument("--how", nargs="+", choices=[*HOW], default=[*HOW], help="how the model is cut over ranks")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS],
                        default=[name for name in ROWS if name not in FLOAT8], help="compilers")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps whose losses are compared")
    parser.add_argument("--turns", type=int, default=6, help="how often every row is timed")
    parser.add_argument("--calls", type=int, default=5, help="steps of a turn")
    parser.add_argument("--whole", action="store_true", help="compile the model as one frame, not layer by layer")
    parser.add_argument("--layers", type=int, help="in place of 4, or of 2 toys")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick alone")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "parallel.json", help="JSON")
    a = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks.parallel")
    if a.device == "cpu" and not a.quick:
        parser.error("--device cpu is for trying this: it needs --quick")
    device = torch.device(a.device)
    if a.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if a.device == "cuda" else "gloo", device_id=device if a.device == "cuda" else None)
    torch._dynamo.config.recompile_limit = 64  # one code object serves all rows
    torch._dynamo.config.capture_scalar_outputs = True  # how many rows go where
    document = {"format": 1, "conditions": conditions(device, 0), "quick": a.quick, "measured": []}
    measured: list[dict[str, Any]] = []
    for how in a.how:
        dense, experts = (TOY, TOY_EXPERTS) if a.quick else (DENSE, EXPERTS)
        sizes = experts if how.startswith("experts") else dense
        if a.layers:
            sizes = dataclasses.replace(sizes, layers=a.layers)
        measured.append(measure(how, sizes, device, a))
        if dist.get_rank() == 0:
            print(shown(measured[-1]), flush=True)
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(document | {"measured": measured}, indent=1))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return int(any(row["wrong"] for found in measured for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
