"""Top-k sparse MLA (DeepSeek-V3.2), alone: latent rows in bfloat16, forward and backward, and in fp8, forward.

The plain form gathers the rows of every query and multiplies; it is judged, as ours is, against the op's reference in
float32. Each query sees as many rows as there are before it, at most `topk`, in no order. FLOPs of the floor are those
of valid rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, run_case, training
from benchmarks.variants import inductor


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    tokens: int
    heads: int
    topk: int
    d_qk: int = 576
    d_v: int = 512


SIZES = (Size("128 heads, 4096 queries", 4096, 128, 2048), Size("64 heads, 8192 queries", 8192, 64, 2048))
# Queries and probabilities rounded to e4m3, of three bits: 2.5 % of each number, or so.
ROUNDED = 0.05
QUICK = (Size("3 heads, 24 queries", 24, 3, 8, 24, 16),)


@dataclasses.dataclass
class Problem:
    size: Size
    q: Tensor
    kv: Tensor
    indices: Tensor
    grad: Tensor

    @property
    def settings(self) -> tuple[float, int, bool, int]:
        return self.size.d_qk**-0.5, self.size.d_v, True, 0

    def pairs(self) -> int:
        """Queries' rows that are valid."""
        return int((self.indices >= 0).sum())


def problem(size: Size, device: torch.device) -> Problem:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    order = torch.rand(size.tokens, size.tokens, device=device)
    seen = torch.ones_like(order, dtype=torch.bool).tril()
    best, indices = order.masked_fill(~seen, -1).topk(size.topk)
    indices = indices.masked_fill(best < 0, -1).to(torch.int32)[None, :, None]
    q, kv = random(1, size.tokens, size.heads, size.d_qk), random(1, size.tokens, 1, size.d_qk)
    return Problem(size, q.requires_grad_(), kv.requires_grad_(), indices, random(*q.shape[:-1], size.d_v))


def work(p: Problem, bytes_per_channel: int = 2) -> dict[str, Work]:
    """Bytes: operands read and results written once, as the rows that queries share lie in the cache."""
    flops_per_channel = 2.0 * p.pairs() * p.size.heads
    q, out = (2 * t.numel() for t in (p.q, p.grad))
    kv, indices = bytes_per_channel * p.kv.numel(), p.indices.numel() * 4
    forward = Work(q + kv + indices + out, flops_per_channel * (p.size.d_qk + p.size.d_v))
    step = Work(3 * q + 3 * kv + 2 * indices + 3 * out, flops_per_channel * (4 * p.size.d_qk + 3 * p.size.d_v))
    return {FORWARD: forward, STEP: step}


def wide(p: Problem, kv: Tensor) -> list[Tensor]:
    """out and the gradients of q and kv in float32, some queries at a time."""
    from megacpp_compile.lowerings.sparse_mla import reference

    q, kv, grad = (t.detach().float() for t in (p.q, kv, p.grad))
    out, lse = reference.sparse_mla(q, kv, p.indices, None, *p.settings)
    return [out, *reference.sparse_mla_backward(grad, None, q, kv, p.indices, out, lse, *p.settings)]


def ours(p: Problem, scale: Tensor | None = None, fp8_gemms: bool = False) -> Callable[..., Tensor]:
    import megacpp_compile

    def call(q: Tensor, kv: Tensor) -> Tensor:
        how = {"d_v": p.size.d_v, "kv_scale": scale, "fp8_gemms": fp8_gemms}
        return megacpp_compile.sparse_mla(q, kv, p.indices, **how)[0]  # type: ignore[arg-type]

    return call


def bfloat16(size: Size, device: torch.device) -> Case:
    p = problem(size, device)
    model, pair = models.GatheredMLA(*p.settings[:2]), (p.q, p.kv)

    def row(name: str, kind: str, make: Callable[[], Callable[..., Any]]) -> Contestant:
        return Contestant(name, kind, lambda: training(make(), pair, pair, [p.grad]))

    rows = [
        row("eager", "eager", lambda: lambda q, kv: model(q, kv, p.indices)),
        row("Inductor", "inductor", lambda: functools.partial(_third, inductor(model), p.indices)),
        row("megacpp_compile.sparse_mla", "ours", lambda: ours(p)),
    ]
    return Case("sparse_mla", size.name, dataclasses.asdict(size), work(p), lambda: wide(p, p.kv), rows, torch.bfloat16,
                ("output", "grad q", "grad kv"))  # fmt: skip


def _third(call: Callable[..., Any], indices: Tensor, q: Tensor, kv: Tensor) -> Any:
    return call(q, kv, indices)


def fp8(size: Size, device: torch.device) -> Case:
    """The same rows as a payload with a scale each, and wide as what the payload stands for."""
    p = problem(size, device)
    scale = p.kv.detach().abs().amax(-1, keepdim=True).float() / 448
    payload = (p.kv.detach() / scale).to(torch.float8_e4m3fn)
    kv, q = (payload.float() * scale).to(torch.bfloat16), p.q.detach()
    model = models.GatheredMLA(*p.settings[:2])

    def row(name: str, kind: str, call: Callable[[], Any], bound: float | None = None) -> Contestant:
        return Contestant(name, kind, lambda: Runner({FORWARD: call}, lambda: [call()]), bound)

    rows = [
        row("eager, rows in bfloat16", "eager", lambda: model(q, kv, p.indices)),
        row("megacpp_compile.sparse_mla, rows in bfloat16", "ours", lambda: ours(p)(q, kv)),
        row("megacpp_compile.sparse_mla, rows in fp8", "ours", lambda: ours(p, scale)(q, payload)),
        row("megacpp_compile.sparse_mla, GEMMs in fp8", "ours", lambda: ours(p, scale, True)(q, payload), ROUNDED),
    ]
    floor, sizes = {FORWARD: work(p, 1)[FORWARD]}, dataclasses.asdict(size)
    return Case("sparse_mla", f"{size.name}, rows in fp8", sizes, floor, lambda: wide(p, kv)[:1], rows, torch.bfloat16,
                ("output",))  # fmt: skip


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for size in QUICK if settings.quick else SIZES:
        for case in (bfloat16, fp8):
            yield from run_case(case(size, settings.device), settings)
