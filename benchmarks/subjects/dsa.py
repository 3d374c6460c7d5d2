"""DeepSeek Sparse Attention in plain PyTorch, a top-k mask on latent attention, under every compiler.

The widths are DeepSeek-V3.2's and GLM-5's, with a narrow residual stream. An indexer's scores are given, so that the
choice of rows, the mask, the attention and its projections are timed. FLOPs of the floor are those of the rows that are
chosen, without the choice. No kernel skips a row for such a mask: the plain form multiplies all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, run_case
from benchmarks.modules import module_case


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    tokens: int
    topk: int
    dim: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int


SIZES = (
    Size("32768 tokens, 128 heads of 192 and 128", 32768, 2048, 2048, 128, 1536, 512, 128, 64, 128),
    Size("32768 tokens, 64 heads of 256 and 256", 32768, 2048, 2048, 64, 2048, 512, 192, 64, 256),
)
QUICK = (Size("48 tokens, 3 heads", 48, 4, 40, 3, 24, 16, 8, 4, 6),)


def inputs(size: Size, device: torch.device) -> tuple[Tensor, ...]:
    """x, cos, sin and an indexer's scores, -inf behind the query."""
    x = torch.randn(1, size.tokens, size.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    tables = models.rotary_tables(size.tokens, size.rope, device, torch.bfloat16)
    scores = torch.randn(1, size.tokens, size.tokens, device=device)
    behind = torch.ones(size.tokens, size.tokens, dtype=torch.bool, device=device).triu_(1)
    return x, *tables, scores.masked_fill_(behind, float("-inf"))


def choice_alone(topk: int, scores: Tensor) -> Callable[[Tensor], list[Contestant]]:
    """What every form does alike."""

    def choose() -> Tensor:
        return scores.topk(topk, sorted=False).indices

    row = Contestant("its choice of rows alone", "limit", lambda: Runner({FORWARD: choose, STEP: choose}))
    return lambda grad: [row]


def cases(settings: Settings) -> Iterator[Case]:
    for size in QUICK if settings.quick else SIZES:
        widths = (size.dim, size.heads, size.q_lora, size.kv_lora, size.nope, size.rope, size.v)
        model = models.SparseMLA(size.topk, *widths).to(settings.device, torch.bfloat16)
        weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        chosen = size.tokens * size.topk - size.topk * (size.topk - 1) // 2
        flops = 2.0 * size.tokens * weights
        attended = 2.0 * chosen * size.heads
        given, numbers = inputs(size, settings.device), dataclasses.asdict(size)
        forward = flops + attended * (2 * size.kv_lora + size.rope)
        step = 3 * flops + attended * (7 * size.kv_lora + 4 * size.rope)
        alone = choice_alone(size.topk, given[-1])
        yield module_case("dsa", size.name, numbers, model, given, forward, step, alone, attention=True)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
