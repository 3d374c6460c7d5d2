"""Our kernels called directly, without a compiler around them: what stands beside the byte floor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import FORWARD, MORE_THAN_EAGER, STEP, Missing, Runner


def lowering(op: str, device: torch.device) -> Any:
    """The Triton lowering of `op`, or why it cannot run here."""
    import importlib

    try:
        module = importlib.import_module(f"megacpp_compile.lowerings.{op}.cuda_triton")
        import triton
    except ImportError as error:
        raise Missing(f"no Triton lowering here: {error}") from None
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise Missing("Triton kernels run on a CPU with TRITON_INTERPRET=1 only")
    return module


def times_eager(device: torch.device) -> float:
    """How many times eager's error is right: Triton's interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    return MORE_THAN_EAGER if device.type == "cuda" else 2.5


def tuning(on: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
    if not on:
        return contextlib.nullcontext
    from megacpp_compile.lowerings._kernels.trace_options import autotune

    return lambda: autotune(True)


def own(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, for kernels that overwrite what they are given."""
    return [t.detach().clone() for t in tensors]


def mla_rope(
    layout: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], nope: int, rope: int, tuned: bool
) -> Runner:
    """`mla_rope_q` and `mla_rope_kv` forward, their inverse and their gradient backward."""
    on_q, on_kv = (lowering(op, inputs[0].device) for op in ("mla_rope_q", "mla_rope_kv"))
    context = tuning(tuned)
    interleaved, dtype = layout.style == "interleaved", inputs[0].dtype
    flags = (nope, interleaved, False, False)

    def arranged(q: Tensor, kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k_pe = k_pe.unsqueeze(-2)
        return (q.transpose(1, 2), kv.transpose(1, 2), k_pe.transpose(1, 2)) if layout.heads_first else (q, kv, k_pe)

    def table(t: Tensor) -> Tensor:
        t = t if layout.heads_first else t.unsqueeze(-2)
        return t[(None,) * (inputs[0].dim() - t.dim())]

    cos, sin = table(inputs[3]), table(inputs[4])
    heads_at = 1 if layout.heads_first else inputs[0].dim() - 2

    def forward(q: Tensor, kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with context():
            k, v = on_kv.mla_rope_kv(kv, k_pe, cos, sin, *flags, dtype)
            return on_q.mla_rope_q(q, cos, sin, *flags, False, dtype, in_place=True), k, v

    def backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, ...]:
        with context():
            d_kv, d_row = on_kv.mla_rope_kv_backward(
                grad_k, grad_v, cos, sin, *flags, [heads_at] if layout.heads > 1 else [], dtype, dtype
            )
            return on_q.mla_rope_q(grad_q, cos, sin, *flags, True, dtype, in_place=True), d_kv, d_row

    def results() -> list[Tensor]:
        out = forward(*arranged(*own(inputs[:3])))
        d_q, d_kv, d_row = backward(*own(grads))
        if layout.heads_first:
            d_q, d_kv, d_row = (t.transpose(1, 2) for t in (d_q, d_kv, d_row))
        return [*out, d_q, d_kv, d_row.squeeze(-2)]

    mine, gradients = arranged(*own(inputs[:3])), own(grads)

    def step() -> None:
        forward(*mine)
        backward(*gradients)

    return Runner({FORWARD: lambda: forward(*mine), STEP: step}, results)


def rope_qk(inputs: Sequence[Tensor], grads: Sequence[Tensor], tuned: bool) -> Runner:
    """`rope_qk`, in place on queries and keys forward and on their gradients backward; tokens before heads."""
    op = lowering("rope_qk", inputs[0].device)
    context = tuning(tuned)
    cos, sin = (t[None, :, None] for t in inputs[2:])
    dtype = inputs[0].dtype

    def turn(q: Tensor, k: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        with context():
            return op.rope_qk(q, k, cos, sin, 0, False, False, False, inverse, dtype, in_place=True)

    def rows(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients arrive heads first; in place means in the layout the queries have."""
        q, k = (t.detach().transpose(1, 2).contiguous().clone() for t in tensors)
        return q, k

    def results() -> list[Tensor]:
        q, k = own(inputs[:2])
        out = [t.transpose(1, 2) for t in turn(q, k, False)]
        return [*out, *turn(*rows(grads), True)]

    q, k = own(inputs[:2])
    d_q, d_k = rows(grads)

    def step() -> None:
        turn(q, k, False)
        turn(d_q, d_k, True)

    return Runner({FORWARD: lambda: turn(q, k, False), STEP: step}, results)


def ssd_scan(inputs: Sequence[Tensor], grad: Tensor, chunk: int, tuned: bool) -> Runner:
    """`ssd_scan` without skip and first state, and its gradient."""
    op = lowering("ssd_scan", inputs[0].device)
    context = tuning(tuned)
    operands = *(t.detach() for t in inputs), None, None
    if why := op.supports("ssd_scan", (*operands, chunk, grad.dtype)):
        raise Missing(why)

    def forward() -> Tensor:
        with context():
            return op.ssd_scan(*operands, chunk, grad.dtype)[0]

    def step() -> list[Tensor]:
        with context():
            y, _, states = op.ssd_scan(*operands, chunk, grad.dtype)
            return [y, *op.ssd_scan_backward(grad, None, *operands, states, chunk)[:5]]

    return Runner({FORWARD: forward, STEP: step}, step)
