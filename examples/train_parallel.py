"""Train attention and experts on several ranks: tensor, expert and data parallelism, eager and compiled, and compare.

The model is plain PyTorch: latent attention (MLA) of `plain_hybrid.py`, and experts that rows reach sorted, between
grouped GEMMs. Ranks are split by PyTorch's own means: `parallelize_module` for attention, an all-to-all for experts,
FSDP2 for parameters. The text is Python's own standard library. On GPUs ranks talk by NCCL, on CPU by Gloo.

    torchrun --nproc-per-node 2 examples/train_parallel.py --tp 2                        # on CPU in some minutes
    torchrun --nproc-per-node 2 examples/train_parallel.py --ep 2 --policy selective     # likewise
    python examples/train_parallel.py --compare inductor                                 # one rank, likewise

Ranks are `--tp` times `--fsdp`: batches and parameters are cut over the `--fsdp` ranks, and experts over `--ep` of
these. Losses are those of one rank with the same batch.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_hybrid import Experts, HybridConfig, HybridLM, SwiGLU
from runs import Run, found, largest_difference
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_mla import Help, batches, progress, standard_library_text

# The largest difference allowed between the loss curves. Experts round to bfloat16 in both.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 1e-1}
Meshes = dict[str, DeviceMesh]  # "data", "tp"; of "data" the "ep" ranks that share experts, and the "copies" of these

# ---------------------------------------------------------------------------------------------------------- model


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows, those of the first expert first, each times its own expert's weight (experts, out, in)."""
    return torch._grouped_mm(rows.bfloat16(), weights.bfloat16().transpose(-2, -1), offs=ends)


class GroupedExperts(nn.Module):
    """SwiGLU experts over rows that come sorted. The weights may be DTensors that are cut by expert."""

    def __init__(self, c: HybridConfig):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(c.experts, c.expert_dim, c.dim) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(c.experts, c.dim, c.expert_dim) * 0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(grouped(rows, gate, ends)) * grouped(rows, up, ends)
        return grouped(hidden, down, ends).to(rows.dtype)


class SortedExperts(nn.Module):
    """Top-k experts and a shared one; tokens are sorted by expert, and sent to those of `ranks` that have theirs."""

    def __init__(self, c: HybridConfig):
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.experts = GroupedExperts(c)
        self.shared = SwiGLU(c.dim, c.shared_dim)
        self.ranks: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens, active = x.reshape(-1, x.shape[-1]), self.c.active
        gates, chosen = F.softmax(self.router(tokens).float(), dim=-1).topk(active, dim=-1)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        counts = torch.histc(chosen.flatten().float(), bins=self.c.experts, min=0, max=self.c.experts).long()
        order = torch.argsort(chosen.flatten(), stable=True)
        rows = tokens[order // active]
        if self.ranks is None:
            out = self.experts(rows, counts)
        else:
            out = self.elsewhere(rows, counts, self.ranks)
        out = out * gates.flatten()[order, None]
        y = torch.zeros_like(tokens).index_add(0, order // active, out)
        return (y + self.shared(tokens)).view_as(x)

    def elsewhere(self, rows: Tensor, counts: Tensor, ranks: DeviceMesh) -> Tensor:
        """`self.experts` of the rows, each on the rank that has its expert."""
        group = ranks.get_group()
        with torch.no_grad():  # what every rank has for each of this rank's experts
            received = all_to_all_single(counts, None, None, group)
            give = counts.view(ranks.size(), -1).sum(1).tolist()
            take = received.view(ranks.size(), -1).sum(1).tolist()
        rows = all_to_all_single_autograd(rows, take, give, group)
        own = torch.arange(self.c.experts // ranks.size(), device=rows.device).repeat(ranks.size())
        order = torch.argsort(own.repeat_interleave(received, output_size=rows.shape[0]), stable=True)
        out = self.experts(rows[order], received.view(ranks.size(), -1).sum(0))
        return all_to_all_single_autograd(torch.empty_like(out).index_copy(0, order, out), give, take, group)


def model_of(args: argparse.Namespace) -> HybridLM:
    """The model on one rank, the same on each: `--layers` times attention and experts."""
    torch.manual_seed(args.seed)
    model = HybridLM(args.config)
    for layer in model.layers:
        if isinstance(layer.block, Experts):
            layer.block = SortedExperts(args.config)
            for linear in (m for m in layer.block.modules() if isinstance(m, nn.Linear)):
                nn.init.normal_(linear.weight, std=0.02)
    return model.to(args.device, args.dtype)


# ------------------------------------------------------------------------------------------------------- parallel

ATTENTION = {"q_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
SHARED = {"shared.gate_proj": ColwiseParallel(), "shared.up_proj": ColwiseParallel(),
          "shared.down_proj": RowwiseParallel()}  # fmt: skip


def split(model: HybridLM, mesh: Meshes, args: argparse.Namespace) -> None:
    """Cut `model`: heads over `--tp` ranks, experts over `--ep`, and what is left of all over `--fsdp`."""
    for layer in model.layers:
        block: Any = layer.block
        attention = not isinstance(block, SortedExperts)
        if args.tp > 1:
            parallelize_module(block, mesh["tp"], ATTENTION if attention else SHARED)
        if attention:
            block.c = dataclasses.replace(args.config, heads=args.config.heads // args.tp)
        elif args.ep > 1:
            block.ranks = mesh["ep"]
            for name, weight in list(block.experts.named_parameters()):
                own = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])
                setattr(block.experts, name, nn.Parameter(own))
            fully_shard(block.experts, mesh=mesh["copies"])
        if args.fsdp > 1:
            fully_shard(layer, mesh=mesh["data"])
    if args.fsdp > 1:
        fully_shard(model, mesh=mesh["data"])


def meshes_of(args: argparse.Namespace) -> Meshes:
    if args.world == 1:
        return {}
    shape, names = (args.fsdp // args.ep, args.ep, args.tp), ("copies", "ep", "tp")
    mesh = init_device_mesh(args.device.partition(":")[0], shape, mesh_dim_names=names)
    return {name: mesh[name] for name in names} | {"data": mesh["copies", "ep"]._flatten("data")}


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters, those together that are cut over the same ranks: PyTorch computes with no others at once."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in model.parameters():
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def clip(groups: list[list[nn.Parameter]], most: float) -> None:
    """`clip_grad_norm_` for parameters that are cut over several meshes."""
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
    norms = [nn.utils.get_total_norm(group) for group in gradients if group]
    total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for gradient in (g for group in gradients for g in group):
        gradient.mul_((most / (total + 1e-6)).clamp(max=1.0))


# ------------------------------------------------------------------------------------------------------- training


def train(name: str, mesh: Meshes, text: Tensor, args: argparse.Namespace) -> tuple[Run, Any]:
    """A run, and the report of what was compiled, None where the backend is not megacpp."""
    run, cuda = Run(name), args.device.startswith("cuda")
    recording: Any = nullcontext()
    model = model_of(args)
    if mesh:
        split(model, mesh, args)
    groups = by_mesh(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=args.lr, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    step_model: Any = model
    if name != "eager":
        torch._dynamo.reset()
        torch._dynamo.config.capture_scalar_outputs = True  # how many rows go where, without a graph break
        options = None
        if name == "megacpp":
            import megacpp_compile

            recording = megacpp_compile.record()
            options = {"policy": args.policy} if args.policy else None
        step_model = torch.compile(model, backend=found(name), options=options)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    share = args.batch // args.fsdp
    mine = mesh["data"].get_local_rank() * share if mesh else 0
    seconds: list[float] = []
    show_progress(args, name, 0, "" if name == "eager" else "compiling")
    with recording as report:
        for tokens, targets in batches(text, args.steps, args.batch, args.length, args.seed):
            start = time.perf_counter()
            tokens, targets = (t[mine : mine + share].to(args.device) for t in (tokens, targets))
            loss = F.cross_entropy(step_model(tokens).flatten(0, 1).float(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            if args.ep > 1:  # FSDP2 took the mean over ranks with the same experts; each has rows of `ep` ranks
                for gradient in (p.grad for n, p in model.named_parameters() if ".experts." in n):
                    if gradient is not None:
                        gradient.div_(args.ep)
            clip(groups, 1.0)
            optimizer.step()
            warm_up.step()
            run.losses.append(mean(loss.detach(), mesh, args))  # waits for the device
            seconds.append(time.perf_counter() - start)
            show_progress(args, name, len(run.losses), f"loss {run.losses[-1]:.4f}")
    run.step_ms = statistics.median(seconds[1:]) * 1e3
    run.compile_seconds = 0.0 if name == "eager" else seconds[0] - run.step_ms / 1e3
    run.peak_mib = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    return run, report


def mean(loss: Tensor, mesh: Meshes, args: argparse.Namespace) -> float:
    """The loss over all that ranks have of a batch."""
    if mesh:
        dist.all_reduce(loss, group=mesh["data"].get_group())
    return loss.item() / args.fsdp


def show_progress(args: argparse.Namespace, name: str, step: int, note: str) -> None:
    if args.rank == 0:
        progress(name, step, args.steps, note)


# --------------------------------------------------------------------------------------------------------- report


def seen(run: Run, report: Any) -> dict[str, Any]:
    """What this rank has to say of a run."""
    sites = {name: count for name, count in report.counts.items() if count} if report is not None else {}
    known = [s for s in report.sites if s.saved_before is not None and s.saved_after is not None] if sites else []
    saved = [sum(getattr(s, name) for s in known) / 2**20 for name in ("saved_before", "saved_after")]
    return {"run": run, "sites": sites, "saved": saved}


def everywhere(own: Any, args: argparse.Namespace) -> list[Any]:
    """What each rank has."""
    if args.world == 1:
        return [own]
    every = [None] * args.world
    dist.all_gather_object(every, own)
    return every


def show(runs: list[list[dict[str, Any]]]) -> None:
    """runs: what every rank saw of each."""
    print(f"\n{'':<10}{'loss first':>12}{'last':>10}{'step ms':>10}{'compile s':>11}{'peak MiB':>10}   saved at sites")
    for ranks in runs:
        run = ranks[0]["run"]
        peak = max(of_rank["run"].peak_mib for of_rank in ranks)
        before, after = ranks[0]["saved"]
        saved = f"{before:.2f} -> {after:.2f} MiB" if before else "-"
        print(
            f"{run.backend:<10}{run.losses[0]:>12.4f}{run.losses[-1]:>10.4f}{run.step_ms:>10.1f}"
            f"{run.compile_seconds:>11.1f}{f'{peak:,.0f}' if peak else '-':>10}   {saved}"
        )
    for alike, count in Counter(sites_of(of_rank) for of_rank in runs[-1]).items():
        numbers = [str(i) for i, of_rank in enumerate(runs[-1]) if sites_of(of_rank) == alike]
        who = "every rank" if count == len(runs[-1]) else f"rank {', '.join(numbers)}"
        print(f"fused on {who}: {alike}")


def sites_of(of_rank: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in of_rank["sites"].items()) or "nothing"


# ----------------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--tp", type=int, default=1, help="ranks that heads are cut over")
    parser.add_argument("--ep", type=int, default=1, help="ranks, of --fsdp, that experts are cut over")
    parser.add_argument("--fsdp", type=int, help="ranks that batches and parameters are cut over (default: all / --tp)")
    parser.add_argument("--compare", default="eager", choices=["eager", "inductor"], help="what to run before megacpp")
    parser.add_argument("--policy", choices=["selective", "full"], help="what megacpp keeps for backward")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run, at least 2")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--layers", type=int, default=2, help="pairs of attention and experts")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer, of which 2 take a token")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and activations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    args = parser.parse_args()
    args.rank, args.world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))

    def refuse(why: str) -> NoReturn:
        if args.rank == 0:
            parser.error(why)
        sys.exit(2)

    if args.world % args.tp:
        refuse(f"--tp {args.tp} does not divide {args.world} ranks: start with torchrun --nproc-per-node {args.tp}")
    args.fsdp = args.fsdp or args.world // args.tp
    if args.tp * args.fsdp != args.world:
        refuse(
            f"--tp {args.tp} times --fsdp {args.fsdp} is not the number of ranks, {args.world}: start with torchrun "
            f"--nproc-per-node {args.tp * args.fsdp}, or leave out --fsdp"
        )
    width = {"--heads": args.heads, "--dim, which is the shared expert's too,": args.dim}
    for what, number, by, ranks in (
        *((name, number, "--tp", args.tp) for name, number in width.items()),
        ("--experts", args.experts, "--ep", args.ep),
        ("--fsdp", args.fsdp, "--ep", args.ep),
        ("--batch", args.batch, "--fsdp", args.fsdp),
    ):
        if number % ranks:
            refuse(f"{by} {ranks} does not divide {what} {number}")
    if args.steps < 2:
        refuse("--steps must be at least 2: the first step is the one that compiles")
    if args.dim % 16:
        refuse(f"--dim {args.dim} is no multiple of 16, which grouped GEMMs ask for")
    if args.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            refuse(f"{torch.cuda.device_count()} GPUs are too few for these ranks: --nproc-per-node has one each")
        args.device = f"cuda:{local}"
    args.dtype = getattr(torch, args.dtype)
    args.config = HybridConfig(
        pattern="AE" * args.layers, dim=args.dim, heads=args.heads, experts=args.experts, expert_dim=args.dim,
        shared_dim=args.dim,
    )  # fmt: skip
    return args


def main() -> int:
    args = parse_arguments()
    text = standard_library_text()
    if args.device.startswith("cuda"):
        torch.cuda.set_device(args.device)
    if args.world > 1:
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        mesh = meshes_of(args)
        if args.rank == 0:
            print(f"{len(text):,} bytes of text, {args.device}, {args.dtype}, torch {torch.__version__}")
            print(f"ranks: --tp {args.tp} x --fsdp {args.fsdp}, experts over {args.ep} of these")
        runs = [everywhere(seen(*train(name, mesh, text, args)), args) for name in (args.compare, "megacpp")]
    finally:
        if args.world > 1:
            dist.destroy_process_group()
    if args.rank:
        return 0
    show(runs)
    if not all(of_rank["sites"] for of_rank in runs[-1]):
        print("FAILED: on some rank nothing was fused")
        return 1
    difference = largest_difference(runs[0][0]["run"], runs[1][0]["run"])
    tolerance = TOLERANCE[args.dtype]
    if not difference <= tolerance:  # written so that NaN fails too
        print(f"FAILED: the loss curves differ by {difference:.2e}, more than {tolerance:.0e}")
        return 1
    print(f"OK: the loss curves agree within {tolerance:.0e}; they differ by {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
