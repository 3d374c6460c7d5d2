"""A small language model of twelve layers and 131072 words with its loss: what never storing logits is worth.

Times are of a step over the tokens that the name gives, without an optimizer; the peak is what it needs beyond weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import limits, models
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, run_case
from benchmarks.modules import module_case
from benchmarks.subjects import stack
from benchmarks.subjects.block import Size, inputs


@dataclasses.dataclass(frozen=True)
class Shape:
    size: Size
    hidden: int
    layers: int
    words: int


SHAPE = Shape(Size("", 1024, 8, 0, 4, 4096, 256, 128, 64, 128), 2816, 12, 131072)
QUICK = Shape(Size("", 32, 2, 0, 2, 16, 16, 8, 4, 8), 48, 2, 100)


class LanguageModel(nn.Module):
    """Layers, norm, head and mean cross entropy with the token that comes next. x: embedded tokens."""

    def __init__(self, layers: models.Stack, dim: int, words: int, tokens: Tensor) -> None:
        super().__init__()
        self.layers, self.norm, self.head = layers, models.RMSNorm(dim), nn.Linear(dim, words, bias=False)
        self.tokens = tokens

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        logits = self.head(self.norm(self.layers(x, cos, sin)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten())

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> LanguageModel:
        tokens = torch.randint(shape.words, (shape.size.batch, shape.size.tokens), device=device)
        layers = stack.stack(shape.size, shape.hidden, shape.layers)
        return cls(layers, shape.size.dim, shape.words, tokens).to(device, torch.bfloat16)


def gemms_and_attention(shape: Shape, device: torch.device) -> Runner:
    size = shape.size
    below = limits.mla(size, device, mlp(shape), shape.layers).measures
    forward, backward = limits.gemms(size.batch * size.tokens, [(size.dim, shape.words)], device)
    calls = {FORWARD: (below[FORWARD], forward), STEP: (below[STEP], forward, backward)}
    return Runner({name: lambda parts=parts: [call() for call in parts] for name, parts in calls.items()})  # type: ignore[misc]


def mlp(shape: Shape) -> list[tuple[int, int]]:
    dim, hidden = shape.size.dim, shape.hidden
    return [(dim, hidden), (dim, hidden), (hidden, dim)]


def cases(settings: Settings) -> Iterator[Case]:
    shape = QUICK if settings.quick else SHAPE
    size, rows = shape.size, shape.size.batch * shape.size.tokens
    layer = limits.linear_flops(rows, [*size.gemms, *mlp(shape)])
    last = limits.linear_flops(rows, [(size.dim, shape.words)])
    forward = shape.layers * (layer + size.attention_flops()) + last
    step = shape.layers * (3 * layer + 3.5 * size.attention_flops()) + 3 * last
    limit = Contestant("GEMMs and attention alone", "limit", lambda: gemms_and_attention(shape, settings.device))
    model = LanguageModel.of(shape, settings.device)
    sizes = {**dataclasses.asdict(shape), "tokens of a step": rows}
    name = f"{shape.layers} layers of width {size.dim}, {shape.words} words, {rows} tokens"
    given = inputs(size, settings)
    yield module_case("language_model", name, sizes, model, given, forward, step, lambda grad: [limit], True)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
