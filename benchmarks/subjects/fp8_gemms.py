"""GEMMs in float8 alone, one scale a tensor: `torch._scaled_mm`, as `fp8_linear` calls it, and Transformer Engine's.

For each linear of the MLA blocks in `block.py` and of a language model's SwiGLU: forward, and the gradients of input
and weight. Both are given the same payloads, already laid out as Hopper wants them (the summed dimension adjacent in
both operands), so neither casts nor transposes are in these times. All is in e4m3, as in the recipe "fp8_current"; in
Transformer Engine's own, gradients are in e5m2. The forward accumulates fast, gradients exactly.
Transformer Engine's rows come with `--with-te`; see peers/transformer_engine.py for what that can do to attention.

The floor counts the tensor cores' rate in float8 as twice that measured in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.ceilings import Work
from benchmarks.harness import FORWARD, Case, Contestant, Runner, Settings, run_case
from benchmarks.peers import transformer_engine
from benchmarks.subjects import block

GRAD_X, GRAD_W = "gradient of the input", "gradient of the weight"
# Accumulated fast, a sum keeps some 14 bits between additions to the wide one: more than a rounding to bfloat16.
BOUND = 2e-2
# The whole of it in a minute: a GEMM takes less than a millisecond.
BUDGET_MS = 20.0


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    tokens: int
    n: int
    k: int


# Gate and up alike, and down, of the language model in examples/train_fp8.py.
SWIGLU = (Size("SwiGLU", 8192, 5632, 2048), Size("SwiGLU", 8192, 2048, 5632))
QUICK = (Size("toy", 32, 48, 64),)


def sizes() -> Iterator[Size]:
    for one in block.SIZES:
        for k, n in one.gemms:
            yield Size(f"MLA {one.name}", one.batch * one.tokens, n, k)
    yield from SWIGLU


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix as payload [rows, channels] and transposed payload [channels, rows], both contiguous, with their scale,
    one number in float32."""

    payload: Tensor
    transposed: Tensor
    scale: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self.payload.to(dtype) * self.scale.to(dtype)


def operand(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Operand:
    from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8

    payload, scale = round_to_fp8(torch.randn(rows, channels, device=device), dtype, whole=True)
    return Operand(payload, payload.t().contiguous(), scale)


@dataclasses.dataclass(frozen=True)
class Problem:
    """x [tokens, k], w [n, k] and grad [tokens, n], in the formats of the recipe "fp8_current"."""

    x: Operand
    w: Operand
    grad: Operand


Calls = dict[str, Callable[[], Tensor]]


def runner(calls: Calls) -> Runner:
    return Runner(dict(calls), lambda: [call() for call in calls.values()])


def plain(p: Problem, dtype: torch.dtype) -> Calls:
    """The three GEMMs of what the payloads stand for."""
    x, w, grad = (o.wide(dtype) for o in (p.x, p.w, p.grad))
    return {FORWARD: lambda: x @ w.t(), GRAD_X: lambda: grad @ w, GRAD_W: lambda: grad.t() @ x}


def scaled_mm(p: Problem) -> Runner:
    from megacpp_compile.lowerings._kernels.fp8 import fp8_gemm

    def multiply(a: Tensor, left: Operand, b: Tensor, right: Operand, fast: bool = False) -> Tensor:
        return fp8_gemm(a, left.scale, b, right.scale, torch.bfloat16, fast=fast)

    return runner({
        FORWARD: lambda: multiply(p.x.payload, p.x, p.w.payload, p.w, fast=True),
        GRAD_X: lambda: multiply(p.grad.payload, p.grad, p.w.transposed, p.w),
        GRAD_W: lambda: multiply(p.grad.transposed, p.grad, p.x.transposed, p.x),
    })  # fmt: skip


def engine(p: Problem, wanted: bool) -> Runner:
    forward, grad_x, grad_w = transformer_engine.gemms(p.x, p.w, p.grad, wanted)
    return runner({FORWARD: forward, GRAD_X: grad_x, GRAD_W: grad_w})


def case(size: Size, settings: Settings) -> Case:
    from megacpp_compile.lowerings.fp8_linear.reference import DTYPES
    from megacpp_compile.passes import linear

    forward, gradient, device = DTYPES[linear.FORWARD], DTYPES[linear.GRADIENT], settings.device
    m, n, k = size.tokens, size.n, size.k
    p = Problem(operand(m, k, forward, device), operand(n, k, forward, device), operand(m, n, gradient, device))
    flops = 2.0 * m * n * k
    work = {FORWARD: Work(m * k + n * k + 2 * m * n, flops), GRAD_X: Work(m * n + n * k + 2 * m * k, flops),
            GRAD_W: Work(m * n + m * k + 2 * n * k, flops)}  # fmt: skip
    rows = [
        Contestant("bfloat16, cuBLAS", "eager", lambda: runner(plain(p, torch.bfloat16)), BOUND),
        Contestant("torch._scaled_mm", "kernels", lambda: scaled_mm(p), BOUND),
        Contestant("Transformer Engine's general_gemm", "peer", lambda: engine(p, settings.with_te), BOUND),
    ]
    name = f"{size.name}, {m} tokens, {k} to {n}"
    return Case("fp8_gemms", name, dataclasses.asdict(size), work,
                lambda: [call() for call in plain(p, torch.float32).values()], rows, torch.bfloat16,
                ("output", "grad x", "grad weight"))  # fmt: skip


def tables(settings: Settings) -> Iterator[dict[str, Any]]:
    top = dataclasses.replace(settings.ceilings, matmul_flops_per_s=2 * settings.ceilings.matmul_flops_per_s)
    settings = dataclasses.replace(settings, budget_ms=min(BUDGET_MS, settings.budget_ms), ceilings=top)
    for size in QUICK if settings.quick else sizes():
        yield from run_case(case(size, settings), settings)
