"""Other people's kernels for Mamba-2's scan: `mamba_ssm` (ssd_combined) and `fla` (simple gated linear attention).

Both round decays and scores to bfloat16 before a GEMM, so that they have a bound of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from benchmarks.harness import Contestant, Missing, Runner, training

BOUND = 2e-2


def scans(inputs: Sequence[Tensor], grad: Tensor, chunk: int) -> list[Contestant]:
    """`inputs`: x, dt, A, B, C."""

    def mamba(module: Any) -> Callable[..., Tensor]:
        return lambda x, dt, A, B, C: module.mamba_chunk_scan_combined(x, dt, A, B, C, chunk)

    def gated(module: Any) -> Callable[..., Tensor]:
        def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
            keys, queries = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
            steps = (x * dt.unsqueeze(-1)).to(x.dtype)
            return module.chunk_simple_gla(queries, keys, steps, g=A * dt, scale=1.0)[0]

        return run

    return [
        Contestant(name, "peer", lambda module=module, make=make: _build(module, make, inputs, grad), BOUND)  # type: ignore[misc]
        for name, module, make in (
            ("mamba_ssm's kernels", "mamba_ssm.ops.triton.ssd_combined", mamba),
            ("fla's kernels", "fla.ops.simple_gla", gated),
        )
    ]


def _build(name: str, make: Callable[[Any], Callable[..., Tensor]], inputs: Sequence[Tensor], grad: Tensor) -> Runner:
    if inputs[0].device.type != "cuda":
        raise Missing("needs CUDA")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise Missing(f"{name}: {type(error).__name__}: {error}") from None
    return training(make(module), inputs, inputs, [grad])
