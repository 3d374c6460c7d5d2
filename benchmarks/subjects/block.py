"""A plain MLA block at three sizes, beside what its GEMMs and its attention take alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import limits, models
from benchmarks.harness import Case, Contestant, Settings, run_case
from benchmarks.modules import module_case
from benchmarks.peers import torchao, transformer_engine, wired


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    dim: int
    heads: int
    q_lora: int
    batch: int
    tokens: int = 4096
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128

    def attention(self) -> models.MLA:
        return models.MLA(self.dim, self.heads, self.q_lora, self.kv_lora, self.nope, self.rope, self.v)

    @property
    def gemms(self) -> list[tuple[int, int]]:
        """(in, out) of every linear layer."""
        q_out = self.heads * (self.nope + self.rope)
        q = [(self.dim, self.q_lora), (self.q_lora, q_out)] if self.q_lora else [(self.dim, q_out)]
        up = (self.kv_lora, self.heads * (self.nope + self.v))
        return [*q, (self.dim, self.kv_lora + self.rope), up, (self.heads * self.v, self.dim)]

    def attention_flops(self) -> float:
        """Forward, causal: half of the two GEMMs."""
        return self.batch * self.heads * self.tokens**2 * (self.nope + self.rope + self.v)


SIZES = (
    Size("small", 2048, 16, 0, 4),
    Size("mid", 4096, 32, 1536, 4),
    Size("v3", 7168, 128, 1536, 1),
)
QUICK = (Size("toy", 64, 2, 48, 1, tokens=32, kv_lora=32, nope=16, rope=8, v=16),)


def inputs(size: Size, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(size.batch, size.tokens, size.dim, device=settings.device, dtype=torch.bfloat16)
    return x.requires_grad_(), *models.rotary_tables(size.tokens, size.rope, settings.device, torch.bfloat16)


def cases(settings: Settings) -> Iterator[Case]:
    for size in QUICK if settings.quick else SIZES:
        model = size.attention().to(settings.device, torch.bfloat16)
        args = inputs(size, settings)
        rows = size.batch * size.tokens
        forward = limits.linear_flops(rows, size.gemms) + size.attention_flops()
        # Attention does two GEMMs forward and, as it keeps no scores, five backward.
        step = 3 * limits.linear_flops(rows, size.gemms) + 3.5 * size.attention_flops()


        def more(
            grad: Tensor, size: Size = size, model: models.MLA = model, args: tuple[Tensor, ...] = args
        ) -> list[Contestant]:
            limit = Contestant("GEMMs and attention alone", "limit", lambda: limits.mla(size, settings.device))
            expert = transformer_engine.block(model, args, grad, settings.with_te)
            return [limit, *wired.block(model, args, grad), *torchao.block(model, args, grad), *expert]

        yield module_case("block", size.name, dataclasses.asdict(size), model, args, forward, step, more, True)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
