"""Layers that are cut over ranks by PyTorch's own means: TP, SP, EP, FSDP2, DDP, pipelines.

What is cut is plain: `models.Layer` and experts that rows reach by an all-to-all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks import models
from benchmarks.subjects.block import Size


class GroupedExperts(nn.Module):
    """SwiGLU experts over rows that come sorted, in grouped GEMMs."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(experts, hidden, dim)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(torch._grouped_mm(rows, self.gate.transpose(-2, -1), offs=ends))
        hidden = hidden * torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)


class ExchangedMoE(nn.Module):
    """Top-k experts, of which each rank of `group` has as many, and experts that all tokens share."""

    def __init__(self, dim: int, hidden: int, experts: int, choices: int, shared: int, group: Any) -> None:
        super().__init__()
        self.number, self.choices, self.group, self.ranks = experts, choices, group, dist.get_world_size(group)
        self.router, self.shared = nn.Linear(dim, experts, bias=False), models.SwiGLU(dim, shared * hidden)
        self.experts = GroupedExperts(experts // self.ranks, dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        gates, chosen = self.router(tokens).float().softmax(-1).topk(self.choices, -1)
        counts = torch.histc(chosen.flatten().float(), bins=self.number, min=0, max=self.number).long()
        order = torch.argsort(chosen.flatten(), stable=True)
        out = self.elsewhere(tokens[order // self.choices], counts)
        out = out * gates.to(x.dtype).flatten()[order, None]
        y = torch.zeros_like(tokens).index_add(0, order // self.choices, out)
        return (y + self.shared(tokens)).view_as(x)

    def elsewhere(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts of the rows, each on the rank that has it."""
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, self.group)
            give = counts.view(self.ranks, -1).sum(1).tolist()
            take = received.view(self.ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(rows, take, give, self.group)
        own = torch.arange(self.number // self.ranks, device=rows.device).repeat(self.ranks)
        order = torch.argsort(own.repeat_interleave(received, output_size=rows.shape[0]), stable=True)
        out = self.experts(rows[order], received.view(self.ranks, -1).sum(0))
        return all_to_all_single_autograd(torch.empty_like(out).index_copy(0, order, out), give, take, self.group)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A stack of layers; `experts` 0: a SwiGLU of width `hidden` in each, else experts of that width."""

    attention: Size
    hidden: int
    layers: int
    experts: int = 0
    choices: int = 0
    shared: int = 0


def build(sizes: Sizes, device: torch.device, group: Any) -> models.Stack:
    """The whole model, the same on every rank but for its experts, which are this rank's."""
    a = sizes.attention
    with torch.device("meta"):
        layers = []
        for _ in range(sizes.layers):
            layer = models.Layer(a.attention(), a.dim, sizes.hidden)
            if sizes.experts:
                layer.mlp = ExchangedMoE(a.dim, sizes.hidden, sizes.experts, sizes.choices, sizes.shared, group)  # type: ignore[assignment]
            layers.append(layer)
    model = models.Stack(layers).to(torch.bfloat16).to_empty(device=device)
    rank = dist.get_rank(group)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        seed = 1000 * i + (rank + 1 if ".experts." in name else 0)
        draw = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5, generator=draw)
    return model


HEADS = {"attention.q": ColwiseParallel(), "attention.q_b": ColwiseParallel(), "attention.kv_b": ColwiseParallel(),
         "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}  # fmt: skip
TENSOR = HEADS | {"attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}


def sequence() -> dict[str, Any]:
    """Between attention and feed-forward each rank has its part of the tokens."""

    def gathered(inputs: int, local: bool) -> PrepareModuleInput:
        rest = (None,) * (inputs - 1)
        return PrepareModuleInput(
            input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest), use_local_output=local
        )

    parted = {"attention.o": RowwiseParallel(output_layouts=Shard(1)), "attention": gathered(3, local=True),
              "mlp.down": RowwiseParallel(output_layouts=Shard(1)), "mlp": gathered(1, local=False),
              "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}  # fmt: skip
    return HEADS | parted


def tensor_parallel(model: models.Stack, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    for layer in model.layers:
        names = {name for name, _ in layer.named_modules()}
        parallelize_module(layer, mesh, {name: style for name, style in plan.items() if name in names})
        layer.attention.heads //= mesh.size()  # type: ignore[union-attr, operator]


def shard(model: models.Stack, mesh: DeviceMesh) -> None:
    """FSDP2 over `mesh`; experts, which differ by rank, stay as they are."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    own = {p for name, p in model.named_parameters() if ".experts." in name}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=own & set(layer.parameters()))
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=own)


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_cudnn_attention.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(model: models.Stack, selective: bool) -> None:
    """Each layer recomputes what it has computed in backward; products and attention are kept where `selective`."""
    kept = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    how: dict[str, Any] = {"context_fn": kept} if selective else {}
    model.layers = nn.ModuleList(checkpoint_wrapper(layer, **how) for layer in model.layers)


class Stage(models.Stack):
    """The layers of a pipeline that this rank has. The tables are its own: what goes from stage to stage is x alone."""

    def __init__(self, layers: nn.ModuleList, tables: tuple[Tensor, Tensor], mesh: DeviceMesh) -> None:
        own = slice(*(len(layers) * rank // mesh.size() for rank in (mesh.get_local_rank(), mesh.get_local_rank() + 1)))
        super().__init__(list(layers)[own])  # type: ignore[arg-type]
        self.tables = tables

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, *self.tables)


class Pipeline:
    """1F1B over as many stages as ranks."""

    def __init__(self, stage: Stage, microbatches: int, device: torch.device, group: Any) -> None:
        self.last = dist.get_rank(group) == dist.get_world_size(group) - 1
        place = PipelineStage(stage, dist.get_rank(group), dist.get_world_size(group), device, group=group)
        self.schedule = Schedule1F1B(place, microbatches, loss_fn=lambda out, y: (out - y).float().pow(2).mean())

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        """Forward and backward of a batch that all ranks have; the mean loss, on all ranks."""
        losses: list[Tensor] = []
        first = (x,) if not dist.get_rank() else ()
        given: dict[str, Any] = {"target": target, "losses": losses} if self.last else {}
        self.schedule.step(*first, **given)
        loss = torch.stack(losses).mean() if self.last else x.new_zeros((), dtype=torch.float32)
        dist.all_reduce(loss)
        return loss.detach()


def repairs(model: models.Stack, how: str, ranks: int, group: Any) -> Callable[[], None]:
    """What a step does to gradients that ranks have in part, behind its backward.

    Heads of a rank alone read the rope key, whose projection every rank has; replicated parameters see a rank's batch.
    """
    rope_rows: list[Any] = [(layer.attention.kv_a.weight, layer.attention.rope) for layer in model.layers]  # type: ignore[union-attr]
    replicated = [p for name, p in model.named_parameters() if ".experts." not in name]
    own = [p for name, p in model.named_parameters() if ".experts." in name]

    def local(gradient: Any) -> Tensor:
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def after() -> None:
        if how in ("tensor", "sequence"):
            for weight, rope in rope_rows:
                dist.all_reduce(local(weight.grad)[-rope:], group=group)
        if how == "experts":
            flat = torch.cat([p.grad.flatten() for p in replicated if p.grad is not None])
            dist.all_reduce(flat, group=group)
            parts = flat.div_(ranks).split([p.numel() for p in replicated])
            for p, part in zip(replicated, parts, strict=True):
                p.grad = part.view_as(p)
        for p in own:  # the loss is the mean over ranks, whose rows this one's experts had
            if p.grad is not None:
                p.grad.div_(ranks)

    return after
