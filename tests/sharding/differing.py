"""Ranks of which one compiles a frame otherwise than the other, or not at all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from megacpp_compile import analysis, record
from megacpp_compile.backends import agreement, inductor
from megacpp_compile.config.warn_once import warn_once
from tests.sharding.ranks import around, feed_forwards, tables  # noqa: F401  # what `seen` calls


def refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this rank's own")


def on_rank(rank: int, what: Callable[[], Any]) -> Any:
    return what() if dist.get_rank() == rank else contextlib.nullcontext()


def refuses() -> Any:
    """Inductor's refusal of the rewritten graph."""
    return mock.patch.object(inductor, "compile_lowered", refused)


def has_defect() -> Any:
    return mock.patch.object(analysis, "run_passes", refused)


@contextlib.contextmanager
def waits(seconds: float) -> Any:
    """The store as of a group with this timeout."""
    store = agreement.shared_store()
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


@contextlib.contextmanager
def together() -> Any:
    """Ranks compile again at once: none is done before all have begun."""
    store, begin, settle = agreement.shared_store(), agreement.Meeting.begin, agreement.Meeting.settle
    begun = [f"begun/{rank}" for rank in range(dist.get_world_size())]

    def begin_and_tell(*args: Any) -> Any:
        meeting = begin(*args)
        store.set(begun[dist.get_rank()], "")
        return meeting

    def settle_with_others(*args: Any) -> Any:
        store.wait(begun)
        return settle(*args)

    with mock.patch.multiple(agreement.Meeting, begin=begin_and_tell, settle=settle_with_others):
        yield


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(32, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(self.down(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LowRank() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Mean(LowRank):
    """Scaled by what all ranks make of their rows, of which each may have another number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).sum(0)
        return y * collectives.all_reduce(y.detach().square().sum(), "sum", dist.group.WORLD)


def step(model: nn.Module, compiled: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output of a step and its gradients."""
    model.zero_grad()
    out = compiled(*inputs)
    out.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [out.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in grads)]


def one_frame(mesh: DeviceMesh, differs: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """A tensor-parallel model of attention and experts' linears, whose second rank `differs`."""
    torch.manual_seed(0)
    model = feed_forwards(mesh, attention=True)
    x = torch.randn(2, 6, 32)
    want = step(model, model, x, *tables())
    with on_rank(1, differs), record() as report:
        got = step(model, torch.compile(model, backend="megacpp", options=options), x, *tables())
    return _seen(report, want, got)


def assert_close(want: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    """Elements of a gradient are sums whose terms may cancel, and round as the largest ones do."""
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


def _seen(report: Any, want: list[torch.Tensor], got: list[torch.Tensor]) -> dict[str, Any]:
    assert_close(want, got)
    return {"frames": [[f.captured, f.reason] for f in report.frames], "sites": dict(report.counts)}


def one_is_refused(mesh: DeviceMesh) -> dict[str, Any]:
    return one_frame(mesh, refuses)


def one_has_a_defect(mesh: DeviceMesh) -> dict[str, Any]:
    return one_frame(mesh, has_defect)


def one_has_other_options(mesh: DeviceMesh) -> dict[str, Any]:
    passes = {"passes": {"mla_rope_kv": False}} if dist.get_rank() else {}
    return one_frame(mesh, contextlib.nullcontext, **passes)


def one_is_refused_the_second_time(mesh: DeviceMesh) -> dict[str, Any]:
    seen = [one_frame(mesh, contextlib.nullcontext)]
    torch._dynamo.reset()
    with together():
        return {"steps": [*seen, one_frame(mesh, refuses)]}


def one_is_strict_and_refused(mesh: DeviceMesh) -> dict[str, Any]:
    return {"error": _error(lambda: one_frame(mesh, refuses, strict=True))}


def one_does_not_come(mesh: DeviceMesh) -> dict[str, Any]:
    """The second rank runs in eager."""
    model = Mean()
    if dist.get_rank() == 1:
        error = ""
    else:
        with waits(1):
            error = _error(lambda: torch.compile(model, backend="megacpp")(torch.ones(4, 32)))
    dist.barrier()
    return {"error": error}


def one_is_refused_later(mesh: DeviceMesh) -> dict[str, Any]:
    """Both compile again for another number of rows."""
    torch.manual_seed(0)
    model, seen = Mean(), []
    compiled = torch.compile(model, backend="megacpp")
    for rows, differs, how in ((4, contextlib.nullcontext, contextlib.nullcontext), (6, refuses, together)):
        x = torch.randn(rows, 32)
        want = step(model, model, x)
        with on_rank(1, differs), how(), record() as report:
            got = step(model, compiled, x)
        seen.append(_seen(report, want, got))
    return {"steps": seen}


def one_is_refused_when_the_other_went_on(mesh: DeviceMesh) -> dict[str, Any]:
    """The first rank runs what it compiled again when the second one begins to; that catches up in eager."""
    torch.manual_seed(0)
    model = Mean()
    compiled, store, settle = torch.compile(model, backend="megacpp"), agreement.shared_store(), agreement.Meeting.settle
    step(model, compiled, torch.randn(4, 32))
    x, error = torch.randn(6, 32), ""
    want = step(model, model, x)

    def settle_and_tell(*args: Any) -> Any:
        found = settle(*args)
        store.set("went on", "")
        return found

    if dist.get_rank() == 0:
        with mock.patch.object(agreement.Meeting, "settle", settle_and_tell):
            got = step(model, compiled, x)
    else:
        store.wait(["went on"])
        with refuses():
            error = _error(lambda: step(model, compiled, x))
        got = step(model, model, x)
    assert_close(want, got)
    return {"error": error}


def one_compiles_again(mesh: DeviceMesh) -> dict[str, Any]:
    """The second rank alone has another number of rows in the second step, and a third in the third."""
    torch.manual_seed(0)
    model, seen = Mean(), []
    compiled = torch.compile(model, backend="megacpp")
    for rows in (4, 6, 7):
        x = torch.randn(rows if dist.get_rank() else 4, 32)
        want = step(model, model, x)
        with record() as report:
            got = step(model, compiled, x)
        seen.append(_seen(report, want, got))
    return {"steps": seen}


def under_ddp(mesh: DeviceMesh) -> dict[str, Any]:
    """Buckets of a product each, of which two are a site; ranks have different rows, and gradients are the mean."""
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(2, 5, 32)[dist.get_rank()]
    _, *want = step(model, model, x)
    for grad in want:
        dist.all_reduce(grad)
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1), record() as report:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
        out, *got = step(model, torch.compile(wrapped, backend="megacpp"), x)
    return _seen(report, [out, *(grad / 2 for grad in want)], [out, *got])


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


CASES = {
    f.__name__: f
    for f in (one_is_refused, one_has_a_defect, one_has_other_options, one_is_refused_the_second_time,
              one_is_strict_and_refused, one_does_not_come, one_is_refused_later, one_is_refused_when_the_other_went_on, one_compiles_again, under_ddp)
}  # fmt: skip


def run(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    torch._dynamo.reset()
    warn_once.cache_clear()
    logging.getLogger("megacpp_compile").setLevel(logging.ERROR)
    # Ranks that part in a case do not agree in the next one on how often a frame was called.
    agreement._meetings.clear()
    store = dist.PrefixStore(name, agreement.shared_store())
    store.set_timeout(timedelta(seconds=60))
    with mock.patch.object(agreement, "shared_store", lambda: store):
        return CASES[name](mesh)
