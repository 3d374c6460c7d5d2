"""The hybrid language model of examples/ on the kernels behind Hugging Face's optimised paths.

Mamba-2 by `mamba_split_conv1d_scan_combined` (mamba_ssm, with causal_conv1d inside), as transformers' mixers call it in
training; experts by transformers' grouped_mm path over stacked weights; attention is torch's in both. Projections, the
norms of layers, router and shared expert stay the model's.

transformers hands that kernel the mixer's norm and output projection as well. It norms the channels of each group of
heads by themselves, this model all together, so here it stops at the gate and `rmsnorm_fn` of the same package follows.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Missing


@dataclasses.dataclass(frozen=True)
class Kernels:
    """mixer: mamba_ssm's `mamba_split_conv1d_scan_combined`. norm: its `rmsnorm_fn`. experts: transformers'
    `grouped_mm_experts_forward`."""

    mixer: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    experts: Callable[..., Tensor]


def kernels() -> Kernels:
    """Raises Missing where one of them cannot be had."""
    if not torch.cuda.is_available():
        raise Missing("mamba_ssm's kernels need CUDA")
    scan, norm = _module("mamba_ssm.ops.triton.ssd_combined"), _module("mamba_ssm.ops.triton.layernorm_gated")
    if scan.causal_conv1d_fwd_function is None:  # mamba_ssm imports without it
        _module("causal_conv1d.cpp_functions")
        raise Missing("mamba_ssm was imported before causal_conv1d could be")
    experts = _module("transformers.integrations.moe")
    return Kernels(scan.mamba_split_conv1d_scan_combined, norm.rmsnorm_fn, experts.grouped_mm_experts_forward)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Missing(f"{name}: {type(error).__name__}: {error}") from None


class Mixer(nn.Module):
    """A Mamba-2 layer of examples/plain_hybrid.py, whose parameters it shares: (batch, length, dim) to the same.

    Between its two projections it leaves compiled graphs. Dynamo would leave them there by itself, and go on to compile
    the frames inside: it traces no op that writes to what is not contiguous, as causal_conv1d's do (torch 2.11).
    """

    def __init__(self, plain: Any, kernels: Kernels) -> None:
        super().__init__()
        self.plain, self.scan, self.normed = plain, kernels.mixer, kernels.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.plain.out_proj(self.mixed(self.plain.in_proj(x)))

    @torch.compiler.disable
    def mixed(self, projected: Tensor) -> Tensor:
        """(batch, length, width of `in_proj`) -> (batch, length, channels), before the output projection."""
        p, c = self.plain, self.plain.c
        y = self.scan(
            projected, p.conv.weight.squeeze(1), p.conv.bias, p.dt_bias, -p.A_log.float().exp(), p.D, c.chunk,
            activation="silu", headdim=c.ssm_head_dim, ngroups=c.groups,
        )  # fmt: skip
        return self.normed(y, p.norm.weight, None, eps=p.norm.eps)


class Experts(nn.Module):
    """An expert layer of examples/plain_hybrid.py: (batch, length, dim) to the same.

    Of that layer, router and shared expert remain. The weights of its experts move, once, here, into two parameters, as
    transformers holds them: `gate_up_proj` (experts, 2 * hidden, dim) and `down_proj` (experts, dim, hidden).
    """

    # What transformers' function asks of a module.
    has_gate, has_bias, is_transposed = True, False, False
    act_fn = staticmethod(F.silu)

    def __init__(self, plain: Any, kernels: Kernels) -> None:
        super().__init__()
        self.plain, self.grouped, self.num_experts = plain, kernels.experts, len(plain.experts)
        with torch.no_grad():
            both = [torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in plain.experts]
            self.gate_up_proj = nn.Parameter(torch.stack(both))
            self.down_proj = nn.Parameter(torch.stack([e.down_proj.weight for e in plain.experts]))
        del plain.experts

    def _apply_gate(self, gemms: Tensor) -> Tensor:
        gate, up = gemms.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, gates = self.plain.routed(tokens)
        return (self.grouped(self, tokens, chosen, gates) + self.plain.shared(tokens)).view_as(x)


def wired(model: nn.Module, kernels: Kernels) -> nn.Module:
    """A HybridLM of examples/plain_hybrid.py, computed by `kernels`: its layers' blocks are exchanged in place."""
    replacements: dict[str, Any] = {"Mamba": Mixer, "Experts": Experts}
    for layer in model.get_submodule("layers").children():
        replacement = replacements.get(type(layer.block).__name__)
        if replacement is not None:
            layer.block = replacement(layer.block, kernels)
    return model
