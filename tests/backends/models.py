"""Small models of these tests, and training steps of those whose linears a plan has in float8."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacpp_compile.config.precision import PrecisionPlan
from tests.precision.models import equal  # noqa: F401

DIM, HIDDEN = 32, 48


class Layer(nn.Module):
    """One `down_norm_up`, in float32."""

    def __init__(self, dim: int = 16, latent: int = 8, out: int = 24):
        super().__init__()
        self.down, self.norm = nn.Linear(dim, latent, bias=False), nn.RMSNorm(latent)
        self.up = nn.Linear(latent, out, bias=False)

    def forward(self, x):
        return self.up(self.norm(self.down(x))).sin()


class Block(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        make = lambda i, o: nn.Linear(i, o, bias=False, dtype=dtype)  # noqa: E731
        self.gate, self.up, self.down = make(dim, hidden), make(dim, hidden), make(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    checkpointed = False

    def __init__(self, blocks: int = 2, dim: int = DIM, hidden: int = HIDDEN):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


def options(recipe: str = "fp8_delayed", **more: Any) -> dict[str, Any]:
    return {"precision": PrecisionPlan(rules=(("*", recipe),), gate=False), "strict": True, **more}


def compiled(model: nn.Module, recipe: str = "fp8_current", dynamic: bool | None = None, **more: Any) -> nn.Module:
    return torch.compile(model, backend="megacpp", options=options(recipe, **more), dynamic=dynamic)


def batch(rand, sequences: int = 2) -> tuple[Tensor, Tensor]:
    return rand(sequences, 16, DIM), rand(sequences, 16, DIM) * 1e-6


def step(run, model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """(output, gradients of x and of all weights)."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = run(x)
    y.backward(grad)
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in model.parameters()))]
