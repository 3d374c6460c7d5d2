"""Parallel models, each run by two ranks eagerly and compiled."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megacpp_compile import record
from megacpp_compile.backends import automatic
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.passes import sparse_mla
from megacpp_compile.targets.rates import Rates
from tests.ranks import DEVICE
from tests.sharding.expert_parallel import expert_parallel
from tests.sharding.seen import RANKS

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
PLAN = {"q_up": ColwiseParallel(), "kv_up": ColwiseParallel(), "o": RowwiseParallel()}


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class MLA(nn.Module):
    """Plain multi-head latent attention, with as many heads as its projections make."""

    last_alone = False

    def __init__(self, dim=32, heads=4, nope=8, rope=4, v=8, latent=16):
        super().__init__()
        self.nope, self.rope, self.v, self.latent = nope, rope, v, latent
        self.q_down, self.q_norm = nn.Linear(dim, latent, bias=False), nn.RMSNorm(latent, eps=1e-6)
        self.q_up = nn.Linear(latent, heads * (nope + rope), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(dim, latent + rope, bias=False), nn.RMSNorm(latent, eps=1e-6)
        self.kv_up = nn.Linear(latent, heads * (nope + v), bias=False)
        self.o = nn.Linear(heads * v, dim, bias=False)

    def forward(self, x, cos, sin):
        queries, angles = (x[:, -1:], (cos[-1:], sin[-1:])) if self.last_alone else (x, (cos, sin))
        batch, tokens, _ = queries.shape
        q = self.q_up(self.q_norm(self.q_down(queries))).view(batch, tokens, -1, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_down(x).split([self.latent, self.rope], -1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, x.shape[1], -1, self.nope + self.v).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v], -1)
        k_rope = rotated(k_rope.view(batch, x.shape[1], 1, self.rope).transpose(1, 2), cos, sin)
        q = torch.cat([q_nope, rotated(q_rope, *angles)], -1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class HeadsOfARank(MLA):
    """Its queries, keys and values are DTensors, sharded by heads, and attention is local."""

    def attend(self, q, k, v):
        out = super().attend(*(t.to_local() for t in (q, k, v)))
        return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


class WrittenOut(MLA):
    """Its attention is products and a softmax."""

    def attend(self, q, k, v):
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(later, float("-inf")).softmax(-1) @ v


class Decoding(MLA):
    """The last token attends to the latents of all, which it expands."""

    last_alone = True

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Sparse(MLA):
    """Each token attends to itself and to one other, by a mask of a list. The gradient of the latents that ranks share is
    a part of that of the rows."""

    def attend(self, q, k, v):
        places = torch.arange(q.shape[-2], device=q.device)
        scores = (places[:, None] * 7 + places * 3).float().cos() + 9 * torch.eye(len(places), device=q.device)
        scores = scores.expand(q.shape[0], -1, -1)
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.LayerNorm(32), nn.Linear(64, 32, bias=False)
        self.up, self.gate = (nn.Linear(32, 64, bias=False) for _ in range(2))

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class FeedForwards(nn.Module):
    """Behind layers of attention, in which passes fire, or by themselves."""

    def __init__(self, layers, attention=False):
        super().__init__()
        self.attention = nn.ModuleList(MLA() for _ in range(layers if attention else 0))
        self.layers = nn.ModuleList(FeedForward() for _ in range(layers))

    def forward(self, x, cos, sin):
        for i, layer in enumerate(self.layers):
            x = layer(x + self.attention[i](x, cos, sin) if self.attention else x)
        return x


class Around(nn.Module):
    """MLA with something before or behind it, or as a residual's branch behind a norm."""

    def __init__(self, before=None, behind=None, residual=False):
        super().__init__()
        self.mla, self.before, self.behind, self.residual = MLA(), before, behind, residual
        self.norm, self.gain = nn.RMSNorm(32, eps=1e-6), nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x, cos, sin):
        x = self.before(self, x) if self.before else x
        x = x + self.mla(self.norm(x), cos, sin) if self.residual else self.mla(x, cos, sin)
        return self.behind(self, x) if self.behind else x


def keep_products(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.mm.default


class Checkpointed(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.mla, self.how = MLA(), how

    def forward(self, x, cos, sin):
        return x + checkpoint(self.mla, x, cos, sin, use_reentrant=False, **self.how)


def in_a_region(mesh: DeviceMesh, **how: Any) -> nn.Module:
    return tensor_parallel(mesh, Checkpointed(**how), {f"mla.{name}": style for name, style in PLAN.items()})


def in_a_selective_region(mesh: DeviceMesh) -> nn.Module:
    return in_a_region(mesh, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products))


@dataclasses.dataclass(frozen=True)
class Case:
    """make: the model for a mesh. grad, dynamic, options, around: how it is run. estimated: ends of the names of
    parameters whose gradients are estimates, which are not compared."""

    make: Callable[[DeviceMesh], nn.Module]
    mode: Callable[[], Any] | None = None
    dynamic: bool | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[], Any] = nullcontext
    batches: tuple[int, ...] = (2,)
    tokens: int = 6
    count_graphs: bool = False
    tolerance: float = 1e-5
    estimated: tuple[str, ...] = ()


def tensor_parallel(mesh, model=None, plan=PLAN):
    return parallelize_module(model or MLA(), mesh, plan)


def feed_forwards(mesh, layers=1, attention=False):
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    whole = {f"layers.{i}.{name}": style for i in range(layers) for name, style in plan.items()}
    whole |= {f"attention.{i}.{name}": style for i in range(layers if attention else 0) for name, style in PLAN.items()}
    return tensor_parallel(mesh, FeedForwards(layers, attention), whole)


def frames_of_any_size():
    """Are planned under `policy="auto"`, at rates by which GEMMs take nearly all of the time; a plan is taken wherever it
    saves less, whatever the peak, which in layers as small as these is attention's."""
    slow = Rates(1e9, 1e13, "slow gemms")
    taken = {"worth_taking": lambda plan, none: plan.saved < none.saved}
    return mock.patch.multiple(automatic, LEAST_READ=0, rates=lambda target: slow, **taken)


def uneven(mesh):
    """Of an up-projection of 17 channels one rank has nine."""
    return tensor_parallel(mesh, MLA(heads=1, v=9), {"kv_up": ColwiseParallel(output_layouts=Replicate())})


def replicated(mesh, placed=Replicate(), **parts):  # noqa: B008
    """MLA as on one device, with one gain alone that is a DTensor."""
    model = Around(**parts)
    model.gain = nn.Parameter(distribute_tensor(model.gain.detach(), mesh, [placed]))
    return model


def on_dtensors(mesh, model=None, sequence=False):
    """A model that computes on DTensors throughout, as torchtitan's do; only its attention and its result are local."""
    places = {"q_up": Shard(0), "kv_up": Shard(0), "o": Shard(1)}

    def distribute(name, module, mesh):
        for key, weight in module.named_parameters(recurse=False):
            placed = distribute_tensor(weight.detach(), mesh, [places.get(name.rpartition(".")[2], Replicate())])
            module.register_parameter(key, nn.Parameter(placed))

    def enter(module, inputs):
        first = Shard(1) if sequence else Replicate()
        x, *tables = (DTensor.from_local(t, mesh, [p], run_check=False) for t, p in zip(
            inputs, (first, Replicate(), Replicate()), strict=True))  # fmt: skip
        return (x.redistribute(placements=[Replicate()]) if sequence else x, *tables)

    def leave(module, inputs, out):
        return out.redistribute(placements=[Shard(1) if sequence else Replicate()]).to_local()

    model = model or HeadsOfARank()
    distribute_module(model, mesh, distribute)
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    return model


def sequence_parallel(mesh):
    whole = parallel.PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None), use_local_output=True
    )
    plan = {f"mla.{name}": style for name, style in PLAN.items()}
    plan |= {"norm": parallel.SequenceParallel(), "mla": whole, "mla.o": RowwiseParallel(output_layouts=Shard(1))}
    model = Around(residual=True)
    del model.gain
    return parallelize_module(model, mesh, plan)


def frozen_region(model, x):
    """A call that takes DTensors alone, under a grad mode of its own, between plain calls. What is written to before a
    DTensor shares it is no hindrance."""
    x = (x * 2).add_(1.0)
    x = DTensor.from_local(x, model.gain.device_mesh, [Replicate()], run_check=False).to_local() * 0.5
    with torch.no_grad():
        gain = model.gain * 3
    return x * gain.to_local()


def as_dtensor(model, x):
    mesh = model.gain.device_mesh
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False) * model.gain


def assorted(model, x):
    """Calls on DTensors of which a rank computes its own part, and others between them."""
    mesh, batch, tokens = model.gain.device_mesh, *x.shape[:2]
    rows = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    same = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    weight = model.gain.unsqueeze(1) * model.gain.cos()
    normed = F.rms_norm(same.sin(), (32,), model.gain)
    column = F.linear(normed, weight.redistribute(placements=[Shard(0)]))
    heads = column.view(batch, tokens, 4, 8).transpose(1, 2)
    shared = same[..., :8].cos().unsqueeze(1).mul(2.0)
    keys = torch.cat([heads, shared.expand(-1, 4, -1, -1)], -1)
    summed = F.linear(column.tanh(), weight.redistribute(placements=[Shard(1)]))
    with torch.no_grad():
        frozen = normed * 3
    found = [
        F.silu(rows * model.gain).softmax(-1), rows.softmax(0), rows[: batch + 1], rows.sum(0), normed, frozen * normed,
        keys, summed.unsqueeze(0), column + summed,
    ]  # fmt: skip
    return torch.cat([t.full_tensor().flatten() for t in found])


def written(model, x):
    local = x * 1.0
    given = DTensor.from_local(local, model.gain.device_mesh, [Replicate()], run_check=False)
    local.add_(1.0)
    return (given * model.gain).to_local()


def sharded_tensor_parallel(mesh):
    """Parameters cut over one axis of a mesh by FSDP2, and over the other by layers."""
    axes = init_device_mesh(DEVICE, (1, RANKS), mesh_dim_names=("data", "model"))
    model = tensor_parallel(axes["model"], Around(), {f"mla.{name}": style for name, style in PLAN.items()})
    fully_shard(model.mla, mesh=axes["data"])
    return fully_shard(model, mesh=axes["data"])


def sharded_experts(mesh):
    """What is no expert's is cut over all ranks by FSDP2, and experts over the ranks that have the same ones."""
    axes = init_device_mesh(DEVICE, (1, RANKS), mesh_dim_names=("data", "experts"))
    model = expert_parallel(axes["experts"], mla=MLA())
    fully_shard(model.moe.experts, mesh=axes["data"])
    return fully_shard(model, mesh=mesh)


class Convolving(nn.Module):
    """A causal convolution over the tokens of a rank: what it reads was a part of a DTensor."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.mixer = nn.ModuleDict({"inward": nn.Linear(32, 32), "conv": nn.Conv1d(32, 32, 4, groups=32, padding=3)})
        self.mixer.forward = self.mix

    def mix(self, x):
        h = self.mixer["conv"](self.mixer["inward"](x).transpose(1, 2))[..., : x.shape[1]]
        return F.silu(h).transpose(1, 2)

    def forward(self, x, cos, sin):
        x = DTensor.from_local(x.sin(), self.mesh, [Shard(1)], run_check=False).to_local()
        return x + self.mixer(x)


def reads_counts():
    """How many rows go where is read as numbers, within a graph."""
    return torch._dynamo.config.patch(capture_scalar_outputs=True)


CASES: dict[str, Case] = {
    "tensor_parallel": Case(tensor_parallel, batches=(2, 3), count_graphs=True),
    "tensor_parallel_inference": Case(tensor_parallel, torch.inference_mode),
    "tensor_parallel_autocast": Case(
        tensor_parallel, around=lambda: torch.autocast(DEVICE, torch.bfloat16), tolerance=2e-2
    ),
    "tensor_parallel_policy": Case(tensor_parallel, options={"policy": "selective", "verify": "each", "strict": True}),
    "tensor_parallel_no_grad": Case(tensor_parallel, torch.no_grad),
    "tensor_parallel_dynamic": Case(tensor_parallel, dynamic=True, batches=(2, 3)),  # a RecursionError in Inductor
    "written_out": Case(lambda mesh: tensor_parallel(mesh, WrittenOut())),
    "decoding": Case(lambda mesh: tensor_parallel(mesh, Decoding()), torch.no_grad),
    "compressed": Case(
        feed_forwards, options={"compress": {"names": ("*",), "ratio": 0.5}, "verify": "each", "strict": True},
        estimated=("up.weight", "gate.weight", "down.weight"),
    ),  # fmt: skip
    "planned": Case(
        lambda mesh: feed_forwards(mesh, 2, attention=True), options={"policy": "auto", "strict": True},
        around=frames_of_any_size, tokens=256,
    ),  # fmt: skip
    "sparse": Case(
        lambda mesh: tensor_parallel(mesh, Sparse(nope=16, v=16, latent=8)),
        around=lambda: mock.patch.object(sparse_mla, "LEAST_ROWS", 0),
    ),
    "uneven": Case(uneven),
    "assorted": Case(lambda mesh: replicated(mesh, behind=assorted)),
    "on_dtensors": Case(on_dtensors, count_graphs=True),
    "on_dtensors_sequence": Case(lambda mesh: on_dtensors(mesh, sequence=True), tokens=3),
    "checkpointed": Case(in_a_region),
    "checkpointed_selectively": Case(in_a_selective_region),
    "sequence_parallel": Case(sequence_parallel, tokens=3),
    "gathered_gain": Case(
        lambda mesh: replicated(mesh, Shard(0), behind=lambda model, x: x * model.gain.full_tensor()),
        dynamic=True, batches=(2, 3),
    ),  # fmt: skip
    "frozen_region": Case(lambda mesh: replicated(mesh, before=frozen_region)),
    "dtensor_out": Case(lambda mesh: replicated(mesh, behind=as_dtensor)),
    "written": Case(lambda mesh: replicated(mesh, before=written)),
    "experts": Case(
        lambda mesh: expert_parallel(mesh, mla=MLA()), around=reads_counts, count_graphs=True, tolerance=2e-2
    ),
    "local_experts": Case(
        lambda mesh: expert_parallel(mesh, dtensors=False), around=reads_counts, dynamic=True, batches=(2, 3),
        options={"policy": {"eblock": "full", "last_layer": "full"}}, tolerance=2e-2,
    ),  # fmt: skip
    "experts_in_parts": Case(expert_parallel, tolerance=2e-2),
    "sharded_tensor_parallel": Case(sharded_tensor_parallel, count_graphs=True),
    "tokens_by_hand": Case(Convolving),
    "sharded_experts": Case(sharded_experts, around=reads_counts, count_graphs=True, tolerance=2e-2),
}


def around() -> Any:
    from tests.fixtures import kernels_left_out

    return kernels_left_out(lambda gm: [_note(node.target) for node in gm.graph.nodes])


def run(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    return _run(CASES[name], mesh)


def _run(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    warn_once.cache_clear()
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda r: said.append(r.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megacpp_compile").addHandler(handler)
    want = _step(case, mesh, lambda model: model)
    graphs = {}
    # "eager" is Dynamo alone, whose count is the least that any backend has.
    for backend in ("eager", "megacpp") if case.count_graphs else ("megacpp",):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = {"options": case.options} if backend == "megacpp" and case.options else {}
        compiled = functools.partial(torch.compile, backend=backend, dynamic=case.dynamic, **options)
        with record() as report:
            got = _step(case, mesh, compiled)
        graphs[backend] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    logging.getLogger("megacpp_compile").removeHandler(handler)
    errors = {}
    assert want["values"].keys() == got["values"].keys()
    for name, tensor in want["values"].items():
        if name.endswith(case.estimated):
            continue
        other = got["values"][name]
        assert tensor.shape == other.shape and tensor.dtype == other.dtype, name
        errors[name] = float((tensor - other).double().norm() / tensor.double().norm().clamp_min(1e-12))
    return {
        "error": max(errors.values()), "worst": max(errors, key=errors.__getitem__), "kinds": [want["kind"], got["kind"]],
        "eager": want["collectives"], "compiled": got["collectives"], "graphs": graphs, "said": said,
        "placed": [want["placed"], got["placed"]], "sites": dict(report.counts),
        "frames": [[f.captured, f.reason] for f in report.frames], "auto": [f.auto for f in report.frames],
        "misses": [[m.pass_name, m.reason] for m in report.misses], "ops": [site.op for site in report.sites],
    }  # fmt: skip


def tables(tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(tokens).float(), torch.tensor([1.0, 0.1])).repeat(1, 2)
    return angles.cos(), angles.sin()


def _step(case: Case, mesh: DeviceMesh, compiled: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """A step of the case's model on each of its batches; what is seen is the last one's."""
    torch.manual_seed(0)
    model = case.make(mesh)
    run = compiled(model)
    angles = tables(max(case.tokens, 6))
    for batch in case.batches:
        model.zero_grad()
        x = torch.randn(batch, case.tokens, 32, requires_grad=True)
        collectives = []
        with (case.mode or nullcontext)(), case.around():
            if run is not model:  # compiling runs collectives
                float(run(x, *angles).detach().sum())
            out, kinds = _counted(lambda x=x: run(x, *angles), run is model)
            if not isinstance(out, DTensor):
                float(out.detach().sum())  # nothing is freed with a collective under way
        collectives.append(kinds)
        values = {"output": out, "x": None}
        if case.mode is None:
            local = out.to_local() if isinstance(out, DTensor) else out
            _, kinds = _counted(lambda local=local: local.float().square().sum().backward(), run is model)
            collectives.append(kinds)
            values = {"output": out, "x": x.grad} | {n: p.grad for n, p in model.named_parameters()}
    placed = {n: str(p.grad.placements) for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    # Eager may leave a gradient as partial sums.
    values = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in values.items() if t is not None}
    values = {n: t.detach() for n, t in values.items()}
    return {"values": values, "collectives": collectives, "placed": placed, "kind": isinstance(out, DTensor)}


# Collectives since `_counted` looked last: each call in eager, and each node of a graph that ran. Torch's profiler would
# name both, and corrupts memory where it stops with one under way.
_ran: Counter[str] = Counter()


class _Eager(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it makes of the call comes by
        _note(func)
        return func(*args, **(kwargs or {}))


def _note(target: Any) -> None:
    name = str(target).removeprefix("_c10d_functional.").partition(".")[0].rstrip("_")
    if name in COLLECTIVES:
        _ran[name] += 1


def _counted(call: Callable[[], Any], eager: bool) -> tuple[Any, dict[str, int]]:
    """What `call` returns, and how many collectives of each kind ran."""
    _ran.clear()
    with _Eager() if eager else nullcontext():
        result = call()
    return result, dict(_ran)
