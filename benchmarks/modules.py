"""Cases whose subject is a module with parameters: gradients of the input and of every parameter are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, wider
from benchmarks.harness import reference as widely
from benchmarks.variants import contestants


def leaves_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [x, *model.parameters()]


def module_case(
    subject: str,
    name: str,
    sizes: dict[str, Any],
    model: nn.Module,
    inputs: Sequence[Tensor],
    forward_flops: float,
    step_flops: float | None = None,
    more: Callable[[Tensor], Sequence[Contestant]] = lambda grad: (),
    attention: bool = False,
    anew: Callable[[], nn.Module] | None = None,
) -> Case:
    """The model under every compiler, and `more`, which is told the gradient of the output.

    Of the inputs the first one has a gradient.
    `anew`: the model with the same parameters and code of its own, for models that break the graph: Dynamo gives up on
    such code for every compiler, once one has met it.
    `step_flops`: forward and backward; by default the three GEMMs that each one of the forward needs.
    """
    x = inputs[0]
    with torch.no_grad():
        grad = torch.randn_like(model(*inputs))

    def reference() -> list[Tensor]:
        wide = copy.deepcopy(model).to(wider(x.dtype))
        return widely(wide, inputs, lambda args: leaves_of(wide, args[0]), [grad])

    rows = [*contestants(subject, anew or model, inputs, leaves_of(model, x), [grad]), *more(grad)]
    work = {FORWARD: Work(flops=forward_flops), STEP: Work(flops=step_flops or 3 * forward_flops)}
    names = ["output", "grad x", *(f"grad {name}" for name, _ in model.named_parameters())]
    return Case(subject, name, sizes, work, reference, rows, x.dtype, names, attention)
