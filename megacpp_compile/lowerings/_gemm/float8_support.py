"""Which devices multiply float8, and in which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FP8_GEMM_ALIGNMENT = 16  # of every side of a GEMM


def no_float8(device: torch.device) -> str:
    """Why `device` multiplies no float8, "" where it does."""
    if device.type != "cuda":
        return f"{device.type} has no float8 GEMMs"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no float8 GEMMs"


def no_grouped_float8(device: torch.device) -> str:
    """Why `device` has no grouped float8 GEMMs, "" where it has: the kernels' tiles are sized for Hopper."""
    if missing := no_float8(device):
        return missing
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9 or torch.version.cuda is None:
        return f"compute capability {major}.{minor}: grouped float8 GEMMs are written for Hopper, 9.0"
    return ""


def no_block_scales(device: torch.device) -> str:
    """Why `device` has no float8 GEMMs with a scale for every block of 128, "" where it has.

    cuBLASLt has them on Hopper from CUDA 12.9 on; where it should, one is tried once.
    """
    if missing := no_float8(device):
        return missing
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"compute capability {major}.{minor}: GEMMs with block scales are Hopper's, 9.0"
    cuda = torch.version.cuda or "none"
    known = cuda != "none" and tuple(int(part) for part in cuda.split(".")[:2]) >= (12, 9)
    if not known:
        return f"CUDA {cuda}: GEMMs with block scales are there from 12.9 on"
    from megacpp_compile.lowerings._gemm import block_scaled

    return block_scaled.failing(device)


def no_linear(args: Sequence[Any], backward: bool, multiple: int) -> str | None:
    """Why cuBLASLt cannot serve such a call of `fp8_linear` or `fp8_block_linear`, or of its backward; None if it can.

    multiple: what rows, k and each n have to be multiples of.
    """
    x8, weights = (args[1], args[3]) if backward else (args[2], args[1])
    weights = weights if isinstance(weights, (list, tuple)) else [weights]
    if any(n % multiple for n in (x8[..., 0].numel(), *(n for w in weights for n in w.shape)) if isinstance(n, int)):
        return f"rows, k and n have to be multiples of {multiple}"
    made = {*(a for a in args if isinstance(a, torch.dtype)), *((weights[0].dtype,) if backward else ())}
    if odd := made - {torch.bfloat16, torch.float16, torch.float32}:
        return f"results in {odd.pop()}"
    return None
