"""The gated delta rule, alone: chunks in eager PyTorch, our kernels, fla's where they run.

Inputs as a Gated DeltaNet layer has them: q, k, v and beta in bfloat16, gates float32, queries and keys normed inside.
FLOPs of the floor are those of chunks of 64, without the inverse; bytes are operands read and o written, once more of
both in backward. What backward takes is what the step takes less forward.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ceilings import Work
from benchmarks.harness import (
    FORWARD,
    STEP,
    Case,
    Contestant,
    Missing,
    Runner,
    Settings,
    reference,
    run_case,
    training,
)

CHUNK, EPS = 64, 1e-6


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    tokens: int
    key_heads: int
    heads: int
    channels: int
    per_channel: bool = False


SIZES = (
    Size("8192 tokens", 8192, 16, 32, 128),
    Size("32768 tokens", 32768, 16, 32, 128),
    Size("8192 tokens, gates a channel", 8192, 32, 32, 128, True),
)
QUICK = (Size("128 tokens", 128, 1, 2, 16), Size("128 tokens, gates a channel", 128, 2, 2, 16, True))


class Chunks(nn.Module):
    """The rule over chunks as models write it: GEMMs in the operands' dtype, states and inverse in float32.

    Gates a channel are taken token by token, as factors of a chunk's keys would overflow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k = (F.normalize(x.to(g.dtype), dim=-1, eps=EPS).to(x.dtype) for x in (q, k))
        shared = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(shared, 2).transpose(1, 2) for x in (q, k))
        v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.to(g.dtype).transpose(1, 2).unsqueeze(-1)
        g = g if g.dim() == 4 else g.unsqueeze(-1)
        size = CHUNK if g.shape[-1] == 1 else 1
        state, rows = g.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
        for keys, queries, values, gates, step in zip(*(x.split(size, 2) for x in (k, q, v, g, beta)), strict=True):
            G = gates.cumsum(2)
            one = G[..., :1]
            decay = (one - one.transpose(-1, -2)).tril().exp().tril()
            keys_in, queries_in = ((x * G.exp()).to(k.dtype) for x in (keys, queries))
            lower = step * (keys @ keys.transpose(-1, -2)) * decay
            eye = torch.eye(lower.shape[-1], dtype=g.dtype, device=g.device)
            missing = step * (values - keys_in @ state.to(k.dtype))
            written = torch.linalg.solve_triangular(lower.tril(-1) + eye, missing, upper=False).to(k.dtype)
            scores = ((queries @ keys.transpose(-1, -2)) * decay).to(k.dtype)
            rows.append(queries_in @ state.to(k.dtype) + scores @ written)
            keys_out = (keys * (G[:, :, -1:] - G).exp()).to(k.dtype)
            state = G[:, :, -1].exp().unsqueeze(-1) * state + keys_out.transpose(-1, -2) @ written
        return torch.cat(rows, 2).transpose(1, 2) * k.shape[-1] ** -0.5


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from megacpp_compile.lowerings.gated_delta_rule import gated_delta_rule

    scale = k.shape[-1] ** -0.5
    return gated_delta_rule(q, k, v, g, beta, None, None, scale, EPS, CHUNK, v.dtype)[0]


def fla(size: Size) -> Callable[..., Tensor]:
    """fla's function of the same meaning."""
    module, name = ("kda", "chunk_kda") if size.per_channel else ("gated_delta_rule", "chunk_gated_delta_rule")
    try:
        run = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    except Exception as error:
        raise Missing(f"fla: {type(error).__name__}: {error}") from None
    return lambda q, k, v, g, beta: run(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def problem(size: Size, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k, v, g, beta, and the gradient of o."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, size.tokens, *shape, device=device)

    q, k = (normal(size.key_heads, size.channels).to(torch.bfloat16) for _ in range(2))
    v, do = (normal(size.heads, size.channels).to(torch.bfloat16) for _ in range(2))
    g = -F.softplus(normal(size.heads, *[size.channels] * size.per_channel) - 2)
    beta = normal(size.heads).sigmoid().to(torch.bfloat16)
    return tuple(t.requires_grad_() for t in (q, k, v, g, beta)), do


def work(size: Size, inputs: tuple[Tensor, ...]) -> dict[str, Work]:
    o = inputs[2].numel() * inputs[2].element_size()
    operands = sum(t.numel() * t.element_size() for t in inputs)
    flops = 2.0 * size.tokens * size.heads * size.channels * (4 * CHUNK + 3 * size.channels)
    return {FORWARD: Work(operands + o, flops), STEP: Work(3 * operands + 2 * o, 3 * flops)}


def cases(settings: Settings) -> Iterator[Case]:
    for size in QUICK if settings.quick else SIZES:
        inputs, grad = problem(size, settings.device)

        def build(
            make: Callable[[], Callable[..., Tensor]], inputs: tuple[Tensor, ...] = inputs, grad: Tensor = grad
        ) -> Callable[[], Runner]:
            return lambda: training(make(), inputs, inputs, [grad])

        def want(inputs: tuple[Tensor, ...] = inputs, grad: Tensor = grad) -> list[Tensor]:
            return reference(Chunks(), inputs, lambda wide: wide, [grad])

        rows = [
            Contestant("eager, by chunks", "eager", build(Chunks)),
            Contestant("our kernels", "kernels", build(lambda: ours), times_eager=1.5),
            Contestant("fla's kernels", "peer", build(lambda size=size: fla(size)), 2e-2),  # type: ignore[misc]
        ]
        names = ("o", *(f"grad {name}" for name in ("q", "k", "v", "g", "beta")))
        sizes = dataclasses.asdict(size) | {"chunk": CHUNK}
        yield Case("gated_delta_rule", size.name, sizes, work(size, inputs), want, rows, torch.bfloat16, names)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
