"""Liger's Triton kernel for the RoPE of Llama (`liger_kernel.transformers.rope`), in place on q and k."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import FORWARD, STEP, Contestant, Missing, Runner


def rope(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Contestant]:
    return [Contestant("Liger's kernel", "peer", lambda: _build(inputs, grads))]


def _build(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Runner:
    if inputs[0].device.type != "cuda":
        raise Missing("Liger's kernels need CUDA")
    try:
        module: Any = importlib.import_module("liger_kernel.transformers.rope")
    except Exception as error:
        raise Missing(f"liger_kernel: {type(error).__name__}: {error}") from None
    cos, sin = (t[None] for t in inputs[2:])

    def leaves() -> list[Tensor]:
        return [t.detach().clone().requires_grad_() for t in inputs[:2]]

    def forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return module.liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def results() -> list[Tensor]:
        mine = leaves()
        out = forward(*mine)
        return [t.detach() for t in (*out, *torch.autograd.grad(out, mine, [g.clone() for g in grads]))]

    mine, given = leaves(), [g.clone() for g in grads]
    return Runner(
        {FORWARD: lambda: forward(*mine), STEP: lambda: torch.autograd.grad(forward(*mine), mine, given)}, results
    )
