"""The kernels a model cannot do without, run alone: GEMMs by cuBLAS and attention by SDPA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import FORWARD, STEP, Runner


def linear_flops(rows: int, gemms: Sequence[tuple[int, int]]) -> float:
    return 2.0 * rows * sum(i * o for i, o in gemms)


def mla(
    size: Any, device: torch.device, more: Sequence[tuple[int, int]] = (), layers: int = 1
) -> Runner:
    """GEMMs and attention of `layers` blocks of that size, each with `more` GEMMs; nothing in between."""
    forward, backward = gemms(size.batch * size.tokens, [*size.gemms, *more], device)
    attend, attend_both = attention(size, device)

    def forward_all() -> None:
        for _ in range(layers):
            forward()
            attend()

    def step() -> None:
        for _ in range(layers):
            forward()
            attend_both()
            backward()

    return Runner({FORWARD: forward_all, STEP: step})


def gemms(
    rows: int, shapes: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    operands = [(random(rows, i), random(o, i), random(rows, o)) for i, o in shapes]

    def forward() -> None:
        for x, w, _ in operands:
            x @ w.t()

    def backward() -> None:
        for x, w, g in operands:
            g @ w
            g.t() @ x

    return forward, backward


def of_gemms(rows: int, shapes: Sequence[tuple[int, int]], device: torch.device) -> Runner:
    """GEMMs of so many rows by weights of these shapes, and the two that each one's backward takes."""
    forward, backward = gemms(rows, shapes, device)

    def step() -> None:
        forward()
        backward()

    return Runner({FORWARD: forward, STEP: step})


def attention(size: Any, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Laid out as a model leaves them: heads first in shape, tokens first in memory, V a part of kv."""

    def random(channels: int) -> torch.Tensor:
        shape = (size.batch, size.tokens, size.heads, channels)
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k = (random(size.nope + size.rope).requires_grad_() for _ in range(2))
    v = random(size.nope + size.v)[..., size.nope :].requires_grad_()
    grad = random(size.v)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return forward, lambda: torch.autograd.grad(forward(), (q, k, v), grad)
