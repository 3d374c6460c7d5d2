"""Mamba-2's scan, alone: plain einsums under each compiler, our kernels, other people's.

Inputs as a mixer has them: x, B and C are slices of one tensor in bfloat16, dt and A float32. FLOPs of the floor are
those of chunks of 256 with full score matrices, as the plain form computes them; kernels that leave out what is above
the diagonal, or take shorter chunks, need fewer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernels, models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Settings, reference, run_case
from benchmarks.peers import scans
from benchmarks.variants import contestants

CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    batch: int
    tokens: int
    heads: int
    p: int
    n: int
    groups: int


SIZES = (
    Size("64 heads in 8 groups", 4, 4096, 64, 64, 128, 8),
    Size("24 heads in 1 group", 4, 4096, 24, 64, 128, 1),
)
QUICK = (Size("2 heads in 1 group", 1, 512, 2, 16, 16, 1),)


def problem(size: Size, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """x, dt, A, B, C, and the gradient of y."""
    widths = [size.heads * size.p, size.groups * size.n, size.groups * size.n]
    mixed = torch.randn(size.batch, size.tokens, sum(widths), device=device).to(torch.bfloat16)
    x, B, C = mixed.split(widths, -1)
    dt = F.softplus(torch.randn(size.batch, size.tokens, size.heads, device=device) - 3)
    A = -0.5 - 8 * torch.rand(size.heads, device=device)
    x, B, C = x.unflatten(-1, (-1, size.p)), B.unflatten(-1, (-1, size.n)), C.unflatten(-1, (-1, size.n))
    inputs = tuple(t.detach().requires_grad_() for t in (x, dt, A, B, C))
    return inputs, torch.randn(x.shape, device=device).to(torch.bfloat16)


def work(size: Size, inputs: tuple[Tensor, ...]) -> dict[str, Work]:
    """Bytes: operands read and y written; again with y's gradient read, and theirs written."""
    tokens = size.batch * size.tokens * size.heads
    flops = 2.0 * tokens * (CHUNK * (size.n + size.p) + 2 * size.n * size.p)
    operands = sum(t.numel() * t.element_size() for t in inputs)
    y = inputs[0].numel() * inputs[0].element_size()
    return {FORWARD: Work(operands + y, flops), STEP: Work(3 * operands + 2 * y, 3 * flops)}


def own_kernels(inputs: tuple[Tensor, ...], grad: Tensor, chunk: int, times: float) -> Contestant:
    build = functools.partial(kernels.ssd_scan, inputs, grad, chunk, False)
    return Contestant(f"our kernels, states of {chunk} kept", "kernels", build, times_eager=times)


def cases(settings: Settings) -> Iterator[Case]:
    times = kernels.times_eager(settings.device)
    for size in QUICK if settings.quick else SIZES:
        inputs, grad = problem(size, settings.device)
        model = models.Scan(CHUNK)
        rows = contestants("ssd", model, inputs, inputs, [grad])
        rows += [own_kernels(inputs, grad, chunk, times) for chunk in (128, CHUNK)]
        rows += scans.scans(inputs, grad, CHUNK)
        names = ("y", "grad x", "grad dt", "grad A", "grad B", "grad C")

        def want(inputs: tuple[Tensor, ...] = inputs, grad: Tensor = grad) -> list[Tensor]:
            return reference(models.Scan(CHUNK), inputs, lambda wide: wide, [grad])

        sizes: dict[str, Any] = dataclasses.asdict(size) | {"chunk": CHUNK}
        yield Case("ssd", size.name, sizes, work(size, inputs), want, rows, torch.bfloat16, names)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
