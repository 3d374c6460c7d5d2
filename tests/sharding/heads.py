"""Heads whose words are sharded over ranks, with their losses, run by two ranks compiled and by each alone in eager."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from megacpp_compile import record
from megacpp_compile.lowerings.linear_cross_entropy import chunks, linear_cross_entropy
from megacpp_compile.passes import linear_cross_entropy as linear_cross_entropy_pass

DIM, WORDS, IGNORED = 12, 22, -100


class Head(nn.Module):
    """`body(head, hidden, labels)`; `first` stands before what ranks do not share."""

    def __init__(self, body, bias=False):
        super().__init__()
        self.body, self.first, self.proj = body, nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS, bias=bias)

    def forward(self, x, labels):
        return self.body(self, torch.tanh(self.first(x)), labels)


def flattened(m, x, labels, **how):
    return F.cross_entropy(m.proj(x).flatten(0, 1), labels.flatten(), **how)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def labels_on(logits, labels):
    """As `F.cross_entropy` takes them outside of `loss_parallel`."""
    if not isinstance(logits, DTensor):
        return labels
    return DTensor.from_local(labels, logits.device_mesh, [Replicate()], run_check=False)


def whole(m, x, labels, **how):
    """Without `loss_parallel`, where eager gathers all logits."""
    logits = m.proj(x).flatten(0, 1)
    return F.cross_entropy(logits, labels_on(logits, labels.flatten()), **how)


smoothed = functools.partial(whole, label_smoothing=0.1, reduction="sum")


def shifted(m, x, labels):
    logits = m.proj(x)[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def scaled(m, x, labels):
    """A softcap, too."""
    logits = torch.tanh(m.proj(x) * 0.5) * 3.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def z_loss(m, x, labels):
    """Log-sum-exps of all ranks' words, beside their loss."""
    logits = m.proj(x).flatten(0, 1)
    loss = F.cross_entropy(logits, labels_on(logits, labels.flatten()), label_smoothing=0.1)
    return local(loss) + 0.1 * local(torch.logsumexp(logits, -1).square().mean())


def logsumexp_alone(m, x, labels):
    """No loss of targets: no head, and still no rank has all logits."""
    return local(m.proj(x).logsumexp(dim=(2,), keepdim=True))


def gathered(m, x, labels):
    """Every rank has all words for the time of the loss."""
    return F.cross_entropy(F.linear(x, full(m.proj.weight)).flatten(0, 1), labels.flatten())


def kept(m, x, labels):
    """Logits that something else reads: the loss alone is of all ranks' words."""
    logits = m.proj(x)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return local(loss) + 1e-2 * full(logits).square().mean()


def columns(mesh, model):
    """The head of a model whose other layers are local."""
    return parallelize_module(model, mesh, {"proj": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})


def on_dtensors(mesh, model):
    """Weights that are DTensors, and hidden states made one by hand."""
    for name, parameter in list(model.proj.named_parameters()):
        model.proj.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    enter = lambda module, args: (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),)  # noqa: E731
    model.proj.register_forward_pre_hook(enter)
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
    "flattened": Case(flattened), "bias": Case(flattened, bias=True),
    "weights_on_dtensors": Case(flattened, on_dtensors, bias=True),
    "without_loss_parallel": Case(whole, around=contextlib.nullcontext),
    "smoothed": Case(smoothed, around=contextlib.nullcontext), "shifted": Case(shifted),
    "scaled": Case(scaled, bias=True), "each_row": Case(functools.partial(flattened, reduction="none")),
    "words_second": Case(lambda m, x, labels: F.cross_entropy(m.proj(x).transpose(1, 2), labels)),
    "dynamic": Case(flattened, dynamic=True), "verified": Case(flattened, options={"verify": "each", "strict": True}),
    "ignored": Case(smoothed, all_ignored=True, around=contextlib.nullcontext),
    "log_sum_exps": Case(z_loss, bias=True, around=contextlib.nullcontext),
    "logsumexp_alone": Case(logsumexp_alone, fires=0),
    "gathered": Case(gathered, on_dtensors, around=contextlib.nullcontext), "kept": Case(kept, fires=0),
}


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
    "sum": Op(), "no_bias": Op(bias=False), "uneven": Op((5, 17), smoothing=0.1),
    "chunks": Op(chunk=4, smoothing=0.1, softcap=2.0), "uneven_chunks": Op((3, 19), chunk=4), "z_loss": Op(z_loss=0.1),
    "all": Op(weighted=True, smoothing=0.2, softcap=1.5, z_loss=0.05), "all_ignored": Op(ignored=10, z_loss=0.1),
    "rows": Op(reduction="none"),
    "all_of_rows": Op((9, 13), weighted=True, smoothing=0.2, softcap=1.5, z_loss=0.05, reduction="none", chunk=4),
    "float32": Op(dtype=torch.float32, smoothing=0.1),
}


def _run_op(op: Op, rank: int) -> dict[str, Any]:
    """Errors of the loss, the log-sum-exps and all gradients, relative to the largest value of each."""
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


@contextlib.contextmanager
def around() -> Iterator[None]:
    from tests.fixtures import kernels_left_out

    # On a GPU, too, heads as small as these.
    with kernels_left_out(), mock.patch.multiple(linear_cross_entropy_pass, MIN_BYTES=0, SMALL_ON="none"):
        yield


def run(name: str, mesh: Any) -> dict[str, Any]:
    return _run(CASES[name], mesh) if name in CASES else _run_op(OPS[name], mesh.get_local_rank())


def _run(case: Case, mesh: Any) -> dict[str, Any]:
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
            loss = local(run(x, labels))
            loss.square().sum().backward()
        found = {"loss": loss.detach(), "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
        values.append({n: full(t) for n, t in found.items()})
    alone, ranks = values
    errors = {n: float((ranks[n] - t).abs().max() / t.abs().max().clamp_min(1e-6)) for n, t in alone.items()}
    ops = [site.op for site in report.sites if site.pass_name == "linear_cross_entropy"]
    return {"error": max(errors.values()), "errors": errors, "ops": ops,
            "misses": [[m.pass_name, m.tag, m.reason] for m in report.misses],
            "frames": [[f.captured, f.reason] for f in report.frames]}  # fmt: skip
