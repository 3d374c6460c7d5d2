"""Megatron-core's Triton kernels for the RoPE of MLA (`megatron.core.fusions.fused_mla_yarn_rope_apply`).

They work in place on q and on its gradient, want tokens before batch, and read pairs that lie beside each other; with
the channels put in that order beforehand, outside what is timed, the results are those of the plain code.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import FORWARD, STEP, Contestant, Missing, Runner

MODULE = "megatron.core.fusions.fused_mla_yarn_rope_apply"


def functions(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """The functions for q and for kv, under the names of old and of new releases."""
    if device.type != "cuda":
        raise Missing("Megatron's kernels need CUDA")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = importlib.import_module(MODULE)
    except Exception as error:
        raise Missing(f"{MODULE}: {type(error).__name__}: {error}") from None
    for q, kv in (("fused_mla_rope_inplace", "fused_mla_rope_kv_split"),
                  ("fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv")):  # fmt: skip
        if hasattr(module, q) and hasattr(module, kv):
            return getattr(module, q), getattr(module, kv)
    raise Missing(f"{MODULE} has none of the functions known here")


def paired(rope: int, device: torch.device) -> Tensor:
    """Where each channel of an interleaved row comes from in a row of halves."""
    return torch.arange(rope, device=device).view(2, rope // 2).t().flatten()


def rope(
    layout: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], nope: int, rope: int, v: int
) -> list[Contestant]:
    if layout.heads_first or layout.packed or layout.style == "wide":
        return []  # they have no such layout
    return [Contestant("Megatron's kernels", "peer", lambda: _build(layout, inputs, grads, nope, rope, v))]


def _build(
    layout: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], nope: int, rope: int, v: int
) -> Runner:
    on_q, on_kv = functions(inputs[0].device)
    if layout.heads & (layout.heads - 1):
        # The mask of a block of heads counts from the block, not from head 0, so the last one runs into what follows.
        raise Missing(f"with {layout.heads} heads its kernels write beyond a token's heads; they need a power of 2")
    tokens = inputs[0].shape[1]
    cos, sin = (t.view(tokens, 1, 1, rope) for t in inputs[3:])
    halves = layout.style == "half"
    order = paired(rope, inputs[0].device)
    q_order = torch.cat((torch.arange(nope, device=order.device), nope + order))
    back, q_back = torch.argsort(order), torch.argsort(q_order)

    def leaves() -> list[Tensor]:
        q, kv, k_pe = (t.detach().transpose(0, 1) for t in inputs[:3])
        k_pe = k_pe.unsqueeze(2)
        if halves:
            q, k_pe = q[..., q_order], k_pe[..., order]
        return [t.contiguous().clone().requires_grad_() for t in (q, kv, k_pe)]

    def gradients() -> list[Tensor]:
        return [g.transpose(0, 1).contiguous().clone() for g in grads]

    def forward(q: Tensor, kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return on_q(q.view_as(q), cos, sin, nope, rope), *on_kv(kv, k_pe, cos, sin, rope, nope, v)

    def results() -> list[Tensor]:
        mine = leaves()
        out = forward(*mine)
        d_q, d_kv, d_pe = torch.autograd.grad(out, mine, gradients())
        if halves:
            d_q, d_pe = d_q[..., q_back], d_pe[..., back]
        return [t.detach().transpose(0, 1) for t in (*out, d_q, d_kv, d_pe.squeeze(2))]

    mine, given = leaves(), gradients()
    return Runner(
        {FORWARD: lambda: forward(*mine), STEP: lambda: torch.autograd.grad(forward(*mine), mine, given)}, results
    )
