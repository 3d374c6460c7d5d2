"""A projection through a normed latent, as in MLA's low-rank queries and keys: time, and what it keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import models
from benchmarks.harness import Case, Settings, run_case
from benchmarks.modules import module_case

# name, tokens, width, latent, width behind it
SIZES = (("kv, 4096 → 512 → 8192", 65536, 4096, 512, 8192), ("q, 4096 → 1536 → 6144", 16384, 4096, 1536, 6144))
QUICK = (("kv, 64 → 16 → 128", 96, 64, 16, 128),)


def cases(settings: Settings) -> Iterator[Case]:
    for name, tokens, dim, latent, out in QUICK if settings.quick else SIZES:
        model = models.LowRank(dim, latent, out).to(settings.device, torch.bfloat16)
        x = torch.randn(1, tokens, dim, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
        sizes = {"tokens": tokens, "dim": dim, "latent": latent, "out": out}
        yield module_case("down_norm_up", name, sizes, model, (x,), 2 * tokens * (dim * latent + latent * out))


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases(settings):
        yield from run_case(case, settings)
