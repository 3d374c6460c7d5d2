"""How far rounding alone moves a result: the condition of an op on the very inputs of a test.

A sum whose terms cancel keeps their rounding errors and loses its size, so a bound on its relative error holds or fails
with the draw. What rounding amounts to is measured instead, by Monte Carlo arithmetic (Parker, 1997): the formula runs
in float64, and every number that goes in or comes out of a step is moved at random by up to half a unit in the last
place of the dtype in question. The partial sums inside a sum or a GEMM, of whatever order, are moved with its result:
those of n terms added one by one are a random walk, off by units of the root of n / 2 times the terms' squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

RUNS = 8
aten = torch.ops.aten
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mm.default, aten.bmm.default}


class _Rounded(TorchDispatchMode):
    """Results are off by up to half of `eps`, relative to themselves, as if each had been rounded."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def moved(self, t: Tensor) -> Tensor:
        if t.dtype not in (torch.float32, torch.float64):
            return t
        return t * (1 + self.drawn(t))  # infinities stay

    def drawn(self, t: Tensor) -> Tensor:
        return self.eps * (torch.rand(t.shape, generator=self.generator, dtype=t.dtype) - 0.5)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return out
        if func in SUMS and out.is_floating_point() and out.numel():
            terms = args[0].shape[-1] if func in (aten.mm.default, aten.bmm.default) else args[0].numel() // out.numel()
            squares = func(*(a.square() if isinstance(a, Tensor) else a for a in args), **(kwargs or {}))
            out = out + (squares * terms / 2).sqrt() * self.drawn(out)
        return tree_map_only(Tensor, self.moved, out)


def moved_by_rounding(function: Callable[..., Any], args: Sequence[Any], eps: float) -> list[float]:
    """The norm, by output of `function(*args)`, of what rounding every step to a dtype of `eps` changes: the root mean
    square of a few runs. `args` are in float64."""

    def results(of: Sequence[Any]) -> list[Tensor]:
        return [t.detach().double() for t in tree_flatten(function(*of))[0] if isinstance(t, Tensor)]

    exact = results(args)
    squares = [0.0] * len(exact)
    for seed in range(RUNS):
        with _Rounded(eps, seed) as rounded:
            given = tree_map_only(Tensor, lambda t: rounded.moved(t.detach()).requires_grad_(t.requires_grad), args)
            found = results(given)
        for i, (a, b) in enumerate(zip(found, exact, strict=True)):
            off = (a - b)[b.isfinite()]
            assert off.isfinite().all(), f"output {i} is no number once it is rounded"
            squares[i] += float(off.square().sum()) / RUNS
    return [s**0.5 for s in squares]
