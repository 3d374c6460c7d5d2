"""Heads whose words are sharded over ranks, with their losses, run by two ranks compiled and by each alone in eager."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from tests.ranks import see_cases, start

RANKS = 2
DIM, WORDS, IGNORED = 12, 22, -100


class Head(nn.Module):
    """`body(head, hidden, labels)`; `first` stands before what ranks do not share."""

    def __init__(self, body, bias=False):
        super().__init__()
        self.body, self.first, self.proj = body, nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS, bias=bias)

    def forward(self, x, labels):
        return self.body(self, torch.tanh(self.first(x)), labels)


def flattened(m, x, labels):
    return F.cross_entropy(m.proj(x).flatten(0, 1), labels.flatten())


def labels_on(logits, labels):
    """As `F.cross_entropy` takes them outside of `loss_parallel`."""
    if not isinstance(logits, DTensor):
        return labels
    return DTensor.from_local(labels, logits.device_mesh, [Replicate()], run_check=False)


def whole(m, x, labels):
    """Without `loss_parallel`, where eager gathers all logits."""
    logits = m.proj(x).flatten(0, 1)
    return F.cross_entropy(logits, labels_on(logits, labels.flatten()))


def smoothed(m, x, labels):
    logits = m.proj(x).flatten(0, 1)
    return F.cross_entropy(logits, labels_on(logits, labels.flatten()), label_smoothing=0.1, reduction="sum")


def shifted(m, x, labels):
    logits = m.proj(x)[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def scaled(m, x, labels):
    """A softcap, too."""
    logits = torch.tanh(m.proj(x) * 0.5) * 3.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def each_row(m, x, labels):
    return F.cross_entropy(m.proj(x).flatten(0, 1), labels.flatten(), reduction="none")


def z_loss(m, x, labels):
    """Log-sum-exps of all ranks' words, beside their loss."""
    logits = m.proj(x).flatten(0, 1)
    penalty = torch.logsumexp(logits, -1).square().mean()
    penalty = penalty.to_local() if isinstance(penalty, DTensor) else penalty
    loss = F.cross_entropy(logits, labels_on(logits, labels.flatten()), label_smoothing=0.1)
    return (loss.to_local() if isinstance(loss, DTensor) else loss) + 0.1 * penalty


def logsumexp_alone(m, x, labels):
    """No loss of targets: no head, and still no rank has all logits."""
    found = m.proj(x).logsumexp(dim=(2,), keepdim=True)
    return found.to_local() if isinstance(found, DTensor) else found


def gathered(m, x, labels):
    """Every rank has all words for the time of the loss."""
    weight = m.proj.weight
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten())


def words_second(m, x, labels):
    return F.cross_entropy(m.proj(x).transpose(1, 2), labels)


def kept(m, x, labels):
    """Logits that something else reads: the loss alone is of all ranks' words."""
    logits = m.proj(x)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if not isinstance(logits, DTensor):
        return loss + 1e-2 * logits.square().mean()
    return loss.to_local() + 1e-2 * logits.full_tensor().square().mean()


def columns(mesh, model):
    """The head of a model whose other layers are local."""
    return parallelize_module(model, mesh, {"proj": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})


def on_dtensors(mesh, model):
    """Weights that are DTensors, and hidden states made one by hand."""
    for name, parameter in list(model.proj.named_parameters()):
        model.proj.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    model.proj.register_forward_pre_hook(
        lambda module, args: (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),)
    )
    return model


@dataclasses.dataclass(frozen=True)
class Case:
    """body: of a `Head`. parallel: cuts it. around: of the call and of backward. all_ignored: no label is a word."""

    body: Callable[..., Any]
    parallel: Callable[..., Any] = columns
    bias: bool = False
    around: Callable[[], Any] = loss_parallel
    dynamic: bool | None = None
    all_ignored: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    fires: int = 1


CASES = {
    "flattened": Case(flattened),
    "bias": Case(flattened, bias=True),
    "weights_on_dtensors": Case(flattened, on_dtensors, bias=True),
    "without_loss_parallel": Case(whole, around=contextlib.nullcontext),
    "smoothed": Case(smoothed, around=contextlib.nullcontext),
    "shifted": Case(shifted),
    "scaled": Case(scaled, bias=True),
    "each_row": Case(each_row),
    "words_second": Case(words_second),
    "dynamic": Case(flattened, dynamic=True),
    "verified": Case(flattened, options={"verify": "each", "strict": True}),
    "ignored": Case(smoothed, all_ignored=True, around=contextlib.nullcontext),
    "log_sum_exps": Case(z_loss, bias=True, around=contextlib.nullcontext),
    "logsumexp_alone": Case(logsumexp_alone, fires=0),
    "gathered": Case(gathered, on_dtensors, around=contextlib.nullcontext),
    "kept": Case(kept, fires=0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Op:
    """A call of `megacpp::linear_cross_entropy` on ranks that have `parts` of the words."""

    parts: tuple[int, ...] = (11, 11)
    bias: bool = True
    weighted: bool = False
    ignored: int = 3
    smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    reduction: str = "sum"
    chunk: int = 64
    dtype: torch.dtype = torch.float64


OPS = {
    "sum": Op(),
    "no_bias": Op(bias=False),
    "uneven": Op((5, 17), smoothing=0.1),
    "chunks": Op(chunk=4, smoothing=0.1, softcap=2.0),
    "uneven_chunks": Op((3, 19), chunk=4),
    "z_loss": Op(z_loss=0.1),
    "all": Op(weighted=True, smoothing=0.2, softcap=1.5, z_loss=0.05),
    "all_ignored": Op(ignored=10, z_loss=0.1),
    "rows": Op(reduction="none"),
    "all_of_rows": Op((9, 13), weighted=True, smoothing=0.2, softcap=1.5, z_loss=0.05, reduction="none", chunk=4),
    "float32": Op(dtype=torch.float32, smoothing=0.1),
}


def _run_op(op: Op, rank: int) -> dict[str, Any]:
    """Errors of the loss, the log-sum-exps and all gradients, relative to the largest value of each."""
    from megacpp_compile.lowerings.linear_cross_entropy import chunks, linear_cross_entropy

    torch.manual_seed(5)
    words, tokens = sum(op.parts), 10
    x, w, b = torch.randn(tokens, DIM), torch.randn(words, DIM), torch.randn(words)
    target = torch.randint(0, words, (tokens,))
    target[torch.randperm(tokens)[: op.ignored]] = IGNORED
    weight = torch.rand(tokens, dtype=op.dtype) + 0.5 if op.weighted else None
    seeds = (torch.rand(tokens, dtype=op.dtype), torch.rand(tokens, dtype=op.dtype))
    first = sum(op.parts[:rank])
    own = slice(first, first + op.parts[rank])
    settings = IGNORED, op.smoothing, 0.7, op.softcap, op.z_loss, op.reduction
    kept = chunks.CPU_BYTES, chunks.TILE
    found = []
    try:
        for part in (False, True):
            chunks.CPU_BYTES = op.chunk * (op.parts[rank] if part else words) * op.dtype.itemsize
            chunks.TILE = 1
            leaves = [t.to(op.dtype).clone() for t in (x, w[own] if part else w, b[own] if part else b)]
            leaves = [t.requires_grad_() for t in (leaves if op.bias else leaves[:2])]
            operands = leaves if op.bias else [*leaves, None]
            grads = ("xwb" if op.bias else "xw") if op.reduction == "sum" else ""
            more = (first, words, dist.group.WORLD.group_name) if part else ()
            loss, lse, *_ = linear_cross_entropy(*operands, target, weight, *settings, grads, *more)
            outputs, by = ((loss,), None) if op.reduction == "sum" else ((loss, lse), seeds)
            dx, *of_words = torch.autograd.grad(outputs, leaves, by)
            if part:
                dist.all_reduce(dx)
            else:
                of_words = [t[own] for t in of_words]
            found.append({"loss": loss.detach(), "lse": lse.detach(), "x": dx, **dict(zip("wb", of_words, strict=False))})
    finally:
        chunks.CPU_BYTES, chunks.TILE = kept
    whole, parts = found
    errors = {n: float((parts[n] - t).abs().max() / t.abs().max().clamp_min(1e-6)) for n, t in whole.items()}
    return {"error": max(errors.values()), "errors": errors, "loss": parts["loss"].sum().item()}


def outcomes(names: tuple[str, ...] = (*CASES, *OPS)) -> dict[str, list[dict[str, Any]]]:
    """Case, or call of the op, -> what each rank saw. A rank that fails says so in place of what it saw."""
    with tempfile.TemporaryDirectory() as folder:
        start(_rank, (folder, names), RANKS)
        seen = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [of_rank[name] for of_rank in seen] for name in names}


def _rank(rank: int, folder: str, names: tuple[str, ...]) -> None:
    from tests.conftest import kernels_left_out

    seen = see_cases(
        rank, RANKS, folder, names,
        lambda name, mesh: _run(CASES[name], mesh) if name in CASES else _run_op(OPS[name], rank),
        lambda: kernels_left_out(lambda gm: None), seconds=60,
    )  # fmt: skip
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


def _run(case: Case, mesh: Any) -> dict[str, Any]:
    from megacpp_compile import record

    torch._dynamo.reset()
    values = []
    for parallel in (False, True):
        torch.manual_seed(3)
        model = Head(case.body, case.bias)
        x, labels = torch.randn(2, 6, DIM, requires_grad=True), torch.randint(0, WORDS, (2, 6))
        labels[0, 1] = labels[1, -1] = IGNORED
        labels = torch.full_like(labels, IGNORED) if case.all_ignored else labels
        run = model
        if parallel:
            run = torch.compile(case.parallel(mesh, model), backend="megacpp", dynamic=case.dynamic,
                                options=case.options or None)  # fmt: skip
        with record() as report, case.around() if parallel else contextlib.nullcontext():
            loss = run(x, labels)
            loss = loss.to_local() if isinstance(loss, DTensor) else loss
            loss.square().sum().backward()
        found = {"loss": loss.detach(), "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
        values.append({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()})
    alone, ranks = values
    errors = {n: float((ranks[n] - t).abs().max() / t.abs().max().clamp_min(1e-6)) for n, t in alone.items()}
    ops = [site.op for site in report.sites if site.pass_name == "linear_cross_entropy"]
    return {"error": max(errors.values()), "errors": errors, "ops": ops,
            "misses": [[m.pass_name, m.tag, m.reason] for m in report.misses],
            "frames": [[f.captured, f.reason] for f in report.frames]}  # fmt: skip
