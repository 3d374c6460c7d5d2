"""Model TFLOP/s of a GPU in whole training steps: transformers' code as it is, released widths, FSDP2, fewer layers.

    torchrun --nproc-per-node 2 -m benchmarks.rates qwen3_moe nemotron_h gpt_oss   # needs transformers, as many GPUs
    torchrun --nproc-per-node 2 -m benchmarks.rates --device cpu --quick           # the whole path at toy sizes

A model has the widths, experts and vocabulary of a released one, the first of its layers and random weights, with
embeddings as wide as what layers add, so that tokens differ and experts get about as many of them each. Weights and
AdamW's state are float32 and sharded, each decoder layer by itself and what is left as the root; layers compute in
bfloat16, gradients are summed in float32. How transformers runs attention and experts is its own default. A step is
forward with the model's own loss, backward and fused AdamW, of `--accumulate` batches; rows take turns, medians of the
slowest rank. Every row begins with the same weights and batches, and its losses are held against the first row's.

Model FLOPs of a token are 6 for each active parameter (experts by how many of them a token takes; the head counts, the
lookup of embeddings does not), and 12 x keys x heads x head_dim for each layer of attention, where a token sees half of
the sequence or its window. Neither scans nor what is recomputed count. Transformers 5.17 has expert parallelism in
`from_pretrained` alone, and not beside FSDP: every rank has all experts here. A row that fails is left out, and the
others begin anew; the exit code is 1 then, and where losses are further off than `SLACK`.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks import arguments, rates_models
from benchmarks.conditions import conditions
from benchmarks.harness import order_of, profiled, say
from benchmarks.rates_models import MODELS, Released
from benchmarks.variants import registered

# What is compiled, and the options of this package (None: Inductor's).
ROWS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "eager": ("nothing", None),
    "inductor": ("model", None),
    "megacpp": ("model", {}),
    "megacpp_no_logits": ("model", {"drop_outputs": ("logits",)}),
    "inductor_layers": ("layers", None),
    "megacpp_layers": ("layers", {}),
    "blocks": ("blocks", {}),
    "blocks_no_logits": ("blocks", {"drop_outputs": ("logits",)}),
}
LEARNING_RATE, SLACK = 1e-5, 2e-3  # SLACK: relative, of losses; bfloat16 sends some tokens to other experts
PIECE = 1024  # tokens that routing is counted in eager at a time, where scans take much memory
TOY_TOKENS = 64


class Trainer:
    """A sharded model and its optimizer; `rows` are compiled forms of it, of which one at a time is in use."""

    def __init__(self, released: Released, device: torch.device, a: Any) -> None:
        import transformers

        self.device, self.tokens, self.accumulate = device, TOY_TOKENS if a.quick else a.tokens, a.accumulate
        self.sequences = a.batch or released.batch
        layers = a.layers or released.layers
        self.kinds = [rates_models.KINDS[letter] for letter in released.pattern[:layers]]
        config = rates_models.configuration(released, layers, a.quick)
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model: Any = model.to(device).train()
        # Of what transformers begins with, attention gives all tokens of a sequence the same experts.
        nn.init.normal_(self.model.get_input_embeddings().weight)
        self.flops = rates_models.flops_a_token(self.model, self.kinds, self.tokens)
        self.words, self.count = config.vocab_size, sum(p.numel() for p in self.model.parameters())
        self.parts = list(self.model.model.layers)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in [*self.parts, self.model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        if device.type == "cpu":  # gloo knows no scaled sum
            for part in self.model.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        self.first = [p.to_local().detach().cpu().clone() for p in self.model.parameters()]
        self.inputs = [self.batch(number) for number in range(self.accumulate)]
        self.plain = self._calls()
        self.rows = {"eager": (self.plain, self.model)}
        self.load = self._load()

    def about(self) -> dict[str, Any]:
        config = self.model.config
        return {"layers": len(self.parts), "kinds": self.kinds, "hidden": config.hidden_size, "parameters": self.count,
                "tokens": [self.sequences, self.tokens], "accumulate": self.accumulate, "load": self.load,
                "experts_implementation": config._experts_implementation, "flops_a_token": self.flops,
                "attention_implementation": config._attn_implementation}  # fmt: skip

    # Compiled forms: `compile` and its hooks stand in each module's own fields, which a row has for itself.

    def _calls(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        names = "_compiled_call_impl", "_forward_pre_hooks", "_forward_hooks"
        return [(module, {name: getattr(module, name) for name in names}) for module in self.model.modules()]

    def compile(self, row: str) -> None:
        what, options = ROWS[row]
        if row in self.rows:
            return
        for module, fields in self.plain:
            vars(module).update({name: hooks.copy() for name, hooks in fields.items() if hooks is not None})
            module._compiled_call_impl = None
        given: dict[str, Any] = {} if options is None else {"backend": "megacpp", "options": options or None}
        call = self.model
        if what == "blocks":
            import megacpp_compile

            megacpp_compile.compile(self.model, options=options)
        elif what == "layers":
            for part in self.parts:
                part.compile(**given)
        else:
            call = torch.compile(self.model, **given)
        self.rows[row] = self._calls(), call

    def use(self, row: str) -> None:
        calls, self.call = self.rows[row]
        for module, fields in calls:
            vars(module).update(fields)

    # Steps.

    def begin_anew(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for p, first in zip(self.model.parameters(), self.first, strict=True):
                p.to_local().copy_(first)
        self.optimizer: Any = None  # its state goes before there is another
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def batch(self, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number * 100 + dist.get_rank())
        return torch.randint(3, self.words, (self.sequences, self.tokens), generator=draw).to(self.device)

    def gradients(self, batches: Sequence[Tensor]) -> Tensor:
        """The mean loss of this rank, behind backward."""
        total = torch.zeros((), device=self.device)
        for ids in batches:
            loss = self.call(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, batches: Sequence[Tensor] | None = None) -> Tensor:
        loss = self.gradients(batches or self.inputs)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss

    def losses(self, steps: int) -> tuple[float, list[float]]:
        """(seconds of the first step, losses of the first steps, the mean of all ranks)"""
        self.begin_anew()
        found: list[Tensor] = []
        first = self.timed(lambda: found.append(self.step([self.batch(0)])), 1)
        found += [self.step([self.batch(number)]) for number in range(1, steps)]
        mean = torch.stack(found) / dist.get_world_size()
        dist.all_reduce(mean)
        return first / 1e3, mean.tolist()

    def timed(self, what: Callable[[], Any], calls: int) -> float:
        """Milliseconds of a call, of the slowest rank."""
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            what()
        self.wait()
        return (time.perf_counter() - began) * 1e3 / calls

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def peak(self) -> float | None:
        """MiB that this rank has allocated at the peak of a step, weights and the optimizer's state included."""
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20

    def _load(self) -> list[float]:
        """Of each layer of experts, the rows of the one that has the most, over the mean; in eager, over this rank's
        first batch, in pieces."""
        experts = self.model.config.num_local_experts
        found = [m for m in self.model.modules() if type(m).__name__.endswith("Router")]
        routers = {m: torch.zeros(experts, dtype=torch.long, device=self.device) for m in found}

        def count(module: nn.Module, inputs: Any, output: Any) -> None:
            routers[module] += torch.bincount(output[-1].flatten(), minlength=experts)

        hooks = [module.register_forward_hook(count) for module in routers]
        with torch.no_grad():
            for piece in self.inputs[0].flatten().split(PIECE):
                self.model(input_ids=piece[None], use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        self.model.reshard()
        return [round(float(rows.max() / rows.float().mean()), 3) for rows in routers.values()]


@contextlib.contextmanager
def counted(row: dict[str, Any]) -> Iterator[None]:
    """What is compiled inside has empty caches; graphs, sites and their like go into `row`."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    import megacpp_compile

    counters.clear()
    with fresh_cache(), megacpp_compile.record() as report:
        yield
    row |= {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    left = [f for f in report.frames if not f.captured and f.left_to == "eager"]
    row["own"] = {"sites": {name: n for name, n in report.counts.items() if n},
                  "fell": sorted({str(f.reason)[:160] for f in left}),
                  "misses": sorted({f"{m.pass_name}: {m.reason}" for m in report.misses})}  # fmt: skip


def measure(released: Released, rows: Sequence[str], device: torch.device, a: Any) -> dict[str, Any]:
    """A model, with what is known of each row; one that fails has its error, and the others begin anew."""
    failed: dict[str, str] = {}
    while True:
        left, row = [name for name in rows if name not in failed], ""
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            say(f"{released.name}: building it")
            trainer = Trainer(released, device, a)
            found = {"name": released.name, "published": released.published, "of_layers": len(released.pattern),
                     "ranks": dist.get_world_size(), **trainer.about(), "rows": []}  # fmt: skip
            say(f"{trainer.count / 1e9:.2f} B parameters, the most loaded expert {max(trainer.load):.2f} of the mean")
            for row in left:
                found["rows"].append(one_row(trainer, row, a))
            in_turns(trainer, found, a)
            return judged(found | {"failed": failed})
        except Exception as error:  # what a backend fails with is its row's
            if not row:
                raise
            failed[row] = f"{type(error).__name__}: {str(error)[:300]}"
        trainer = None  # type: ignore[assignment]
        say(f"{released.name}: {row} FAILED: {failed[row]}")


def one_row(trainer: Trainer, name: str, a: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name}
    trainer.compile(name)
    trainer.use(name)
    say(f"{name}: its first step begins")
    with counted(row):
        row["first_s"], row["losses"] = trainer.losses(a.steps)
    own = row.pop("own") | {"peak_mib": trainer.peak()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    row["of_ranks"] = every
    losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
    say(f"{name}: first step {row['first_s']:.1f} s, losses {losses}, sites {own['sites']}")
    return row


def in_turns(trainer: Trainer, found: dict[str, Any], a: Any) -> None:
    names = [row["name"] for row in found["rows"]]
    turns: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(a.turns):
        for name in order_of(turn, names):
            trainer.use(name)
            trainer.step()
            turns[name].append(trainer.timed(trainer.step, a.calls))
        say(f"turn {turn + 1} of {a.turns}: " + ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in turns.items()))
    if names:
        trainer.gradients(trainer.inputs)
        found["optimizer_ms"] = trainer.timed(trainer.optimizer.step, a.calls)
    for name in names if a.profile else ():
        trainer.use(name)
        trainer.step()
        trainer.wait()
        with profiled(f"{found['name']}, {name}", a.out.parent):
            trainer.step()
            trainer.wait()
    for row in found["rows"]:
        row["ms"] = {"median": statistics.median(turns[row["name"]]), "turns": turns[row["name"]]}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Adds rates, ratios to the first row, the distance from its losses, and what is wrong."""
    tokens = found["tokens"][0] * found["tokens"][1] * found["accumulate"]
    for row in found["rows"]:
        first = found["rows"][0]
        row["tokens_per_s_and_gpu"] = tokens / row["ms"]["median"] * 1e3
        row["tflops_per_gpu"] = row["tokens_per_s_and_gpu"] * found["flops_a_token"]["all"] / 1e12
        row["per_first"] = row["ms"]["median"] / first["ms"]["median"]
        row["peak_mib"] = max(own["peak_mib"] or 0.0 for own in row["of_ranks"])
        pairs = zip(row["losses"], first["losses"], strict=True)
        row["off"] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        row["wrong"] = [f"losses are {row['off']:.1e} from {first['name']}'s"] * (not row["off"] <= SLACK)
    return found


def shown(found: dict[str, Any]) -> str:
    columns = {"TFLOP/s": 9, "tokens/s": 10, "ms": 9, "/ first": 9, "peak MiB": 10, "first s": 9, "graphs": 8, "off": 9}
    sequences, tokens = found["tokens"]
    flops = found["flops_a_token"]
    of_a_token = ", ".join(f"{name} {of / 1e9:.2f}" for name, of in flops.items() if name != "all")
    lines = [
        f"{found['name']}, {found['layers']} of {found['of_layers']} layers, {found['parameters'] / 1e9:.2f} B "
        f"parameters, {found['ranks']} ranks of {found['accumulate']} x {sequences} x {tokens} tokens a step",
        f"attention {found['attention_implementation']}, experts {found['experts_implementation']}, the most loaded "
        f"{max(found['load']):.2f} of the mean; optimizer {found.get('optimizer_ms', 0):.1f} ms of a step",
        f"{flops['all'] / 1e9:.2f} GFLOP a token: {of_a_token}; published for all layers on 8 H100s: "
        f"{found['published']} TFLOP/s",
        " " * 18 + "".join(f"{name:>{width}}" for name, width in columns.items()) + "  sites",
    ]  # fmt: skip
    for row in found["rows"]:
        sites = sorted({", ".join(f"{n} {c}" for n, c in sorted(r["sites"].items())) or "-" for r in row["of_ranks"]})
        lines.append(
            f"{row['name']:<18}{row['tflops_per_gpu']:>9.2f}{row['tokens_per_s_and_gpu']:>10.0f}{row['ms']['median']:>9.1f}"
            f"{row['per_first']:>9.3f}{row['peak_mib']:>10.0f}{row['first_s']:>9.1f}{row['graphs']:>8}{row['off']:>9.1e}"
            f"  {' | '.join(sites)}"
        )
        lines += [f"  WRONG: {what}" for what in row["wrong"]]
        for key, says in (("misses", "near miss"), ("fell", "in eager")):
            lines += [f"  {says}: {what}" for what in sorted({what for r in row["of_ranks"] for what in r[key]})]
    return "\n".join([*lines, *(f"{name} FAILED: {why}" for name, why in found["failed"].items())]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.parser("benchmarks.rates", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=["inductor", "megacpp"], help="compilers")
    parser.add_argument("--layers", type=int, help="in place of each model's own number")
    parser.add_argument("--batch", type=int, help="sequences of a rank, likewise")
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step of the optimizer")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps whose losses are compared")
    parser.add_argument("--turns", type=int, default=5, help="how often every row is timed")
    parser.add_argument("--calls", type=int, default=4, help="steps of a turn")
    parser.add_argument("--profile", action="store_true",
                        help="print where the time of a step goes, and write timelines beside OUT")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick alone")
    parser.add_argument("--quick", action="store_true", help="toy widths, 64 tokens")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "rates.json", help="JSON")
    a = parser.parse_args(argv)
    if unknown := sorted({*a.models} - {*MODELS}):
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks.rates")
    if a.device == "cpu" and not a.quick:
        parser.error("--device cpu is for trying this: it needs --quick")
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it has no kernels from the hub, and says so
    device = torch.device(a.device)
    if a.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    cuda = device.type == "cuda"
    patience = datetime.timedelta(minutes=5)  # one rank that fails alone leaves the others waiting
    dist.init_process_group("nccl" if cuda else "gloo", timeout=patience, device_id=device if cuda else None)
    registered()
    torch._dynamo.config.recompile_limit = 64  # one code object serves all rows
    torch.compile(lambda x: (x * 2).sin())(torch.ones(8, device=device))  # what a process compiles once
    document = {"format": 1, "conditions": conditions(device, 0), "quick": a.quick, "measured": []}
    measured: list[dict[str, Any]] = []
    for name in a.models or MODELS:
        measured.append(measure(MODELS[name], a.rows, device, a))
        if dist.get_rank() == 0:
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(document | {"measured": measured}, indent=1))
            print(shown(measured[-1]), flush=True)
    dist.destroy_process_group()
    return int(any(row["wrong"] for found in measured for row in found["rows"]) or any(f["failed"] for f in measured))


if __name__ == "__main__":
    sys.exit(main())
