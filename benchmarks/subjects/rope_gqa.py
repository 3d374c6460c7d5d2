"""Ordinary RoPE of grouped-query attention: alone, and with the attention that makes queries and keys of it.

Alone stand Llama's function under each compiler, our kernel, and Liger's, beside the bytes of working in place. Which
rotated tensor is the query can only be known from the attention, so that megacpp has nothing to fuse there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import kernels, models
from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, STEP, Case, Contestant, Runner, Settings, reference, run_case
from benchmarks.peers import liger
from benchmarks.variants import contestants


def alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sizes: dict[str, Any]) -> Case:
    grads = [torch.randn_like(t.transpose(1, 2).contiguous()) for t in (q, k)]
    inputs = (q, k, cos, sin)
    rows = contestants("rope_gqa", models.LlamaRope(), inputs, (q, k), grads)

    def ours(tuned: bool) -> Callable[[], Runner]:
        return lambda: kernels.rope_qk(inputs, grads, tuned)

    times = kernels.times_eager(q.device)
    rows.append(Contestant("our kernel, in place", "kernels", ours(False), times_eager=times))
    rows.append(Contestant("our kernel, in place, tuned", "kernels", ours(True), times_eager=times))
    rows += liger.rope(inputs, grads)
    moved = 2 * (q.numel() + k.numel()) * q.element_size() + 2 * cos.numel() * cos.element_size()
    work = {FORWARD: Work(bytes=moved), STEP: Work(bytes=2 * moved)}
    names = ("q", "k", "grad q", "grad k")

    def wide() -> list[Tensor]:
        return reference(models.LlamaRope(), inputs, lambda args: args[:2], grads)

    return Case("rope_gqa", "RoPE alone", sizes, work, wide, rows, q.dtype, names)


def with_attention(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sizes: dict[str, Any]) -> Case:
    v = torch.randn_like(k).requires_grad_()
    model: nn.Module = models.LlamaAttention()
    batch, tokens, heads, dim = q.shape
    grads = [torch.randn(batch, tokens, heads * dim, device=q.device, dtype=q.dtype)]
    inputs = (q, k, v, cos, sin)
    flops = 2.0 * batch * heads * tokens**2 * dim
    work = {FORWARD: Work(flops=flops), STEP: Work(flops=3.5 * flops)}
    rows = contestants("rope_gqa", model, inputs, (q, k, v), grads)
    names = ("output", "grad q", "grad k", "grad v")

    def wide() -> list[Tensor]:
        """One sequence at a time: attention in float32 may write out its scores."""
        parts = []
        for i in range(batch):
            own = [t[i : i + 1] for t in inputs[:3]]
            parts.append(reference(model, [*own, cos, sin], lambda args: args[:3], [grads[0][i : i + 1]]))
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    return Case("rope_gqa", "RoPE and attention", sizes, work, wide, rows, q.dtype, names, attention=True)


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    batch, tokens, heads, kv_heads, dim = (1, 16, 4, 2, 32) if settings.quick else (4, 8192, 32, 8, 128)
    device, dtype = settings.device, torch.bfloat16
    q, k = (torch.randn(batch, tokens, h, dim, device=device, dtype=dtype) for h in (heads, kv_heads))
    cos, sin = models.rotary_tables(tokens, dim, device, dtype)
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    for case in (alone, with_attention):
        made = case(q.clone().requires_grad_(), k.clone().requires_grad_(), cos, sin, sizes)
        yield from run_case(made, settings)
