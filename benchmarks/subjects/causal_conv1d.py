"""A mixer's convolution over time and its SiLU: alone, beside the bytes it has to move, and between the projections of
a Mamba-2 mixer without its scan, where no copy should be left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels, models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, reference, run_case, wider
from benchmarks.modules import leaves_of, module_case
from benchmarks.variants import contestants

TAPS = 4


def alone(settings: Settings) -> Case:
    batch, tokens, channels, width = (2, 24, 40, 64) if settings.quick else (4, 4096, 6144, 10304)
    model = models.CausalConv(channels, TAPS).to(settings.device, torch.bfloat16)
    whole = torch.randn(batch, tokens, width, device=settings.device, dtype=torch.bfloat16)
    x = whole[..., width - channels :].requires_grad_()  # some channels of a projection
    grad = torch.randn(batch, tokens, channels, device=settings.device, dtype=torch.bfloat16)
    leaves = leaves_of(model, x)
    rows = contestants("causal_conv1d", model, (x,), leaves, [grad])

    def ours() -> Runner:
        module = kernels.lowering("causal_conv1d", x.device)
        operands = x.detach(), model.conv.weight.detach().squeeze(1), model.conv.bias.detach(), "silu"  # type: ignore[union-attr]

        def forward() -> Tensor:
            return module.causal_conv1d(*operands, x.dtype)

        def step() -> list[Tensor]:
            out = forward()
            dx, dw, db = module.causal_conv1d_backward(grad, *operands)
            return [out, dx, dw.unsqueeze(1), db]

        return Runner({FORWARD: forward, STEP: step}, step)

    rows.append(Contestant("our kernels", "kernels", ours, times_eager=kernels.times_eager(x.device)))

    def wide() -> list[Tensor]:
        made = models.CausalConv(channels, TAPS).to(x.device, wider(x.dtype))
        made.load_state_dict(model.state_dict())
        return reference(made, (x,), lambda args: leaves_of(made, args[0]), [grad])

    one = grad.numel() * grad.element_size()
    work = {FORWARD: Work(bytes=2 * one), STEP: Work(bytes=5 * one)}
    sizes = {"batch": batch, "tokens": tokens, "channels": channels, "taps": TAPS}
    names = ["output", "grad x", *(f"grad {name}" for name, _ in model.named_parameters())]
    return Case("causal_conv1d", "alone", sizes, work, wide, rows, x.dtype, names)


def between_projections(settings: Settings) -> Case:
    dim, inner, states, groups, tokens = (64, 96, 16, 2, 48) if settings.quick else (2048, 4096, 1024, 8, 16384)
    batch = 4
    model = models.MixerEnds(dim, inner, states, groups, TAPS).to(settings.device, torch.bfloat16)
    x = torch.randn(batch, tokens // batch, dim, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
    sizes: dict[str, Any] = {"tokens": tokens, "dim": dim, "inner": inner, "states": states, "groups": groups}
    flops = 2.0 * tokens * dim * (3 * inner + 2 * states)
    return module_case("causal_conv1d", "mixer without its scan", sizes, model, (x,), flops)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    for case in (alone, between_projections):
        yield from run_case(case(settings), settings)
