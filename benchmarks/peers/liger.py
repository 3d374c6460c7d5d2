"""Liger's Triton kernels: RoPE of Llama in place on q and k (`liger_kernel.transformers.rope`), and the fused linear
cross entropy (`liger_kernel.transformers.functional`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import FORWARD, STEP, Contestant, Missing, Runner


def rope(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Contestant]:
    return [Contestant("Liger's kernel", "peer", lambda: _build(inputs, grads))]


def _build(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Runner:
    module = _module("rope", inputs[0])
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


def linear_cross_entropy(target: Tensor, ignore_index: int) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, w) -> the mean loss."""
    run = _module("functional", target).liger_fused_linear_cross_entropy

    def mean(x: Tensor, w: Tensor) -> Tensor:
        loss = run(x, w, target, ignore_index=ignore_index)
        return loss[0] if isinstance(loss, tuple) else loss  # beside a z loss, in later releases

    return mean


def _module(name: str, on: Tensor) -> Any:
    if on.device.type != "cuda":
        raise Missing("Liger's kernels need CUDA")
    try:
        return importlib.import_module(f"liger_kernel.transformers.{name}")
    except Exception as error:
        raise Missing(f"liger_kernel: {type(error).__name__}: {error}") from None
