"""The block with three kernels wired into it by hand and compiled by Inductor: what the passes have to match.

An expert who knows the one model writes this; `wired_kernels.py` has the kernels, for half-split channels only.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Contestant, Missing, Runner, training
from benchmarks.models import MLA


def block(model: MLA, inputs: Sequence[Tensor], grad: Tensor) -> list[Contestant]:
    return [Contestant("kernels wired by hand, Inductor", "peer", lambda: _build(model, inputs, grad))]


def _build(model: MLA, inputs: Sequence[Tensor], grad: Tensor) -> Runner:
    if inputs[0].device.type != "cuda":
        raise Missing("needs CUDA")
    try:
        kernels = importlib.import_module("benchmarks.peers.wired_kernels")
    except ImportError as error:
        raise Missing(f"needs triton: {error}") from None
    if model.heads % kernels.HEADS_A_PROGRAM:
        raise Missing(f"heads must be a multiple of {kernels.HEADS_A_PROGRAM}")
    leaves = [inputs[0], *model.parameters()]
    return training(torch.compile(Wired(model, kernels)), inputs, leaves, [grad])


class Wired(nn.Module):
    """The layers of `plain`, whose parameters it shares."""

    def __init__(self, plain: MLA, kernels: Any) -> None:
        super().__init__()
        self.plain, self.queries, self.keys = plain, *_functions(kernels)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        p = self.plain
        batch, tokens, _ = x.shape
        q = p.q_b(p.q_norm(p.q_a(x))) if p.q_lora else p.q(x)
        latent, k_pe = p.kv_a(x).split([p.kv_lora, p.rope], -1)
        kv = p.kv_b(p.kv_norm(latent)).view(batch, tokens, p.heads, p.nope + p.v)
        q = self.queries.apply(q.view(batch, tokens, p.heads, p.nope + p.rope), cos, sin, p.nope)
        k, v = self.keys.apply(kv, k_pe, cos, sin, p.nope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return p.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def _functions(kernels: Any) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    class Queries(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, cos: Tensor, sin: Tensor, nope: int) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(cos, sin)
            ctx.nope = nope
            return kernels.turned(q, cos, sin, nope, False)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            return kernels.turned(grad.contiguous(), *ctx.saved_tensors, ctx.nope, True), None, None, None

    class Keys(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, nope: int) -> Any:  # type: ignore[override]
            ctx.save_for_backward(cos, sin)
            ctx.nope = nope
            return kernels.keys(kv, k_pe, cos, sin, nope), kv[..., nope:]

        @staticmethod
        def backward(ctx: Any, d_k: Tensor, d_v: Tensor) -> Any:  # type: ignore[override]
            return *kernels.keys_backward(d_k, d_v, *ctx.saved_tensors, ctx.nope), None, None, None

    return Queries, Keys
