"""The grouped GEMMs that routed experts are computed by, and the gradients of experts' weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

import megacpp_compile.lowerings._kernels.grouped  # noqa: F401  registers them


class Grouped(Protocol):
    """How a target does the GEMMs; `_kernels/grouped.py` says what each one is."""

    def rows(
        self,
        xs: list[Tensor],
        weights: list[Tensor],
        offsets: Tensor,
        transposed: bool,
        take: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor: ...
    def weights(
        self,
        grad: Tensor,
        x: Tensor,
        offsets: Tensor,
        take_grad: Tensor | None = None,
        take_x: Tensor | None = None,
    ) -> Tensor: ...
    def sums(
        self, rows: Tensor, offsets: Tensor, take: Tensor | None = None, factors: Tensor | None = None
    ) -> Tensor: ...


class GroupedGemms:
    """The grouped GEMMs as opaque ops."""

    rows = torch.ops.grouped_gemms.rows
    weights = torch.ops.grouped_gemms.weights
    sums = torch.ops.grouped_gemms.sums


def experts_of(weights: Sequence[Tensor]) -> int:
    return weights[0].shape[0] if weights[0].dim() == 3 else len(weights)


def empty_weight_gradients(
    x: Tensor, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """What the gradients of w_gate and w_up, side by side, and of w_down will be, as they will lie."""
    return _empty_gradient(x, [w for w in (w_gate, w_up) if w]), _empty_gradient(x, [w_down])


def _empty_gradient(x: Tensor, parts: list[list[Tensor]]) -> Tensor:
    experts, (n, k) = experts_of(parts[0]), (sum(w[0].shape[-2] for w in parts), parts[0][0].shape[-1])
    return x.new_empty((experts, k, n)).transpose(1, 2) if _across(parts) else x.new_empty((experts, n, k))


def _across(parts: list[list[Tensor]]) -> bool:
    """Whether all these weights [n, k] lie as [k, n]. So will their gradient: autograd would copy any other into one
    that lies as its parameter does."""
    return all(statically_known_true(w.stride(-2) == 1) and w.stride(-1) != 1 for part in parts for w in part)


def weights_gradient(
    grouped: Grouped,
    parts: list[list[Tensor]],
    grad: tuple[Tensor, Tensor | None],
    x: tuple[Tensor, Tensor | None],
    offsets: Tensor,
) -> Tensor:
    """[E, n, k], of rows and what numbers them; of `parts` side by side."""
    if _across(parts):
        return grouped.weights(x[0], grad[0], offsets, x[1], grad[1]).transpose(1, 2)
    return grouped.weights(grad[0], x[0], offsets, grad[1], x[1])
