"""Models under "fp8_delayed" whose weights are shared out over ranks, run by two of them; what each saw, as plain numbers.

A CPU multiplies no float8; the question is answered for it, and the reference computes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

import megacpp_compile
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.passes import linear
from tests.lowerings import relative_error
from tests.precision.models import equal
from tests.ranks import DEVICE
from tests.sharding.seen import RANKS

DIM, HIDDEN, STEPS = 32, 64, 4


class Block(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False, dtype=dtype)
        self.down = nn.Linear(HIDDEN, DIM, bias=False, dtype=dtype)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)  # parts of a weight have other largest magnitudes

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, {f"blocks.{i}.{k}": style for i in range(2) for k, style in plan.items()})


def by_blocks(model: nn.Module, mesh: DeviceMesh, **how: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def both(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    axes = init_device_mesh(DEVICE, (1, RANKS), mesh_dim_names=("data", "model"))
    return fully_shard(tensor_parallel(model, axes["model"]), mesh=axes["data"])


class Gathered(nn.Module):
    """A weight cut by rows, gathered in the graph, as FSDP written as a parametrisation has it."""

    def forward(self, weight):
        return weight.redistribute(placements=[Replicate()]).to_local()


class GatheredByHand(nn.Module):
    def forward(self, part):
        return all_gather_tensor_autograd(part, 0, dist.group.WORLD)


def traced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        for each in (block.up, block.down):
            each.weight = nn.Parameter(distribute_tensor(each.weight.detach(), mesh, [Shard(0)]))
            parametrize.register_parametrization(each, "weight", Gathered(), unsafe=True)
    return model


def by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        for each in (block.up, block.down):
            each.weight = nn.Parameter(each.weight.detach().chunk(RANKS)[mesh.get_local_rank()].clone())
            parametrize.register_parametrization(each, "weight", GatheredByHand(), unsafe=True)
    return model


# Case -> (the model over a mesh, the dtype of its parameters, whether ranks have the same input).
CASES: dict[str, tuple[Callable[[nn.Module, DeviceMesh], nn.Module], torch.dtype, bool]] = {
    "tensor_parallel": (tensor_parallel, torch.bfloat16, True),
    "fsdp2": (by_blocks, torch.bfloat16, False),
    "fsdp2_mixed": (
        functools.partial(by_blocks, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), torch.float32, False,
    ),
    "fsdp2_tensor_parallel": (both, torch.bfloat16, True),
    "traced_fsdp": (traced, torch.bfloat16, False),
    "by_hand": (by_hand, torch.bfloat16, False),
}  # fmt: skip

# Those that are trained with weights cast once for all microbatches, too.
CACHED = ("tensor_parallel", "fsdp2_tensor_parallel", "traced_fsdp")


@contextlib.contextmanager
def around() -> Iterator[None]:
    from tests.fixtures import kernels_left_out

    with kernels_left_out(), mock.patch.object(linear, "no_float8", lambda device: ""):
        yield


def batches(rank: int, same: bool) -> list[torch.Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(1 if same else 1 + rank)
    return [torch.randn(2, 16, DIM, generator=draw).bfloat16() * 2**i for i in range(2 * STEPS)]


def compiled(model: nn.Module, recipe: str, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    plan = PrecisionPlan(rules=(("*", recipe),), gate=False)
    return torch.compile(model, backend="megacpp", options={"precision": plan, **options})


def cached(
    make: Callable[[], nn.Module], xs: list[torch.Tensor], want: list[list[torch.Tensor]]
) -> tuple[bool, set[str]]:
    """(whether microbatches whose weights were cast once are bit for bit `want`; the notes of the sites)"""
    model = make()
    with megacpp_compile.record() as report, megacpp_compile.cached_weight_casts():
        got = train(compiled(model, "fp8_current", cache_weight_casts=True), model, xs)
    return all(map(equal, got, want)), {site.note for site in report.sites}


def train(run: Callable[..., torch.Tensor], model: nn.Module, xs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of each step (output, gradients of x and of all weights), whole ones."""
    steps = []
    for x in xs:
        x = x.clone().requires_grad_()
        model.zero_grad()
        y = run(x)
        y.backward(torch.cos(x.detach().float()).bfloat16() * 1e-3)
        grads = [p.grad for p in model.parameters()]
        steps.append([y.detach(), x.grad, *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)])
    return steps


def run(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    over, dtype, same = CASES[name]
    xs = batches(mesh.get_local_rank(), same)
    make = lambda: over(Model(dtype), mesh)  # noqa: E731
    eager = make()
    want = train(eager, eager, xs[:STEPS])
    seen: dict[str, Any] = {"errors": {}}
    for recipe in ("fp8_current", "fp8_delayed"):
        model = make()
        call = compiled(model, recipe)
        with megacpp_compile.record() as report:
            got = train(call, model, xs[:STEPS])
        errors = [relative_error(g, w) for gs, ws in zip(got, want, strict=True) for g, w in zip(gs, ws, strict=True)]
        seen["errors"][recipe] = max(errors)
        if recipe == "fp8_current":
            seen["cached"] = cached(make, xs[:2], got[:2]) if name in CACHED else None
    seen["last"] = got[-1]
    rows = [row for frame in report.frames for row in frame.precision]
    seen["rows"] = [[row["fqn"], row["effective"], row["reason"]] for row in rows]
    seen["state"] = state = megacpp_compile.scaling_state(model)
    seen["x"] = [float(x.abs().max()) for x in xs[:STEPS]]
    parts = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    seen["own"] = {n: float(p.detach().abs().max()) for n, p in parts.items()}
    seen["largest"] = {n: float(p.detach().abs().max()) for n, p in Model(dtype).named_parameters()}

    goes_on = train(call, model, xs[STEPS:])
    again = make()
    megacpp_compile.load_scaling_state(again, state)
    restarted = train(compiled(again, "fp8_delayed"), again, xs[STEPS:])
    return seen | {"restarted": all(map(equal, restarted, goes_on))}
