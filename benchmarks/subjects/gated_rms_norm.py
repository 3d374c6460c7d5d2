"""The gated norm behind a mixer's scan, alone, beside the bytes it has to move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels, models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, reference, run_case, wider
from benchmarks.variants import contestants


def case(settings: Settings, name: str, groups: int) -> Case:
    batch, tokens, dim = (2, 24, 64) if settings.quick else (4, 4096, 4096)
    device, dtype = settings.device, torch.bfloat16
    model = models.GatedRMSNorm(dim, groups).to(device, dtype)
    y = torch.randn(batch, tokens, dim, device=device, dtype=dtype, requires_grad=True)
    z = torch.randn(batch, tokens, 2 * dim, device=device, dtype=dtype)[..., :dim].requires_grad_()
    grad = torch.randn_like(y)
    leaves = [y, z, model.weight]
    rows = contestants("gated_rms_norm", model, (y, z), leaves, [grad])

    def ours() -> Runner:
        module = kernels.lowering("gated_rms_norm", device)
        operands = [t.detach() for t in leaves]

        def forward() -> tuple[Tensor, Tensor]:
            return module.gated_rms_norm(*operands, model.eps, dim // groups, False, dtype)

        def step() -> list[Tensor]:
            out, rrms = forward()
            return [out, *module.gated_rms_norm_backward(grad, *operands, rrms, dim // groups, False)]

        return Runner({FORWARD: forward, STEP: step}, step)

    rows.append(Contestant("our kernels", "kernels", ours, times_eager=kernels.times_eager(device)))

    def wide() -> list[Tensor]:
        made = models.GatedRMSNorm(dim, groups).to(device, wider(dtype))
        made.load_state_dict(model.state_dict())
        return reference(made, (y, z), lambda args: [*args, made.weight], [grad])

    one = grad.numel() * grad.element_size()
    work = {FORWARD: Work(bytes=3 * one), STEP: Work(bytes=8 * one)}
    sizes = {"batch": batch, "tokens": tokens, "dim": dim, "groups": groups}
    names = ("output", "grad y", "grad z", "grad weight")
    return Case("gated_rms_norm", name, sizes, work, wide, rows, dtype, names)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for name, groups in (("one group", 1), ("eight groups", 8)):
        yield from run_case(case(settings, name, groups), settings)
