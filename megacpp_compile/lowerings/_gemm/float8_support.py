"""What multiplies float8, and in which sizes."""

from __future__ import annotations

import torch

MULTIPLE = 16  # of every side of a GEMM


def no_float8(device: torch.device) -> str:
    """Why `device` multiplies no float8, "" where it does."""
    if device.type != "cuda":
        return f"{device.type} has no float8 GEMMs"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no float8 GEMMs"


def no_grouped_float8(device: torch.device) -> str:
    """Why `device` multiplies no float8 by groups of rows, "" where it does: tiles are of sizes for Hopper."""
    if missing := no_float8(device):
        return missing
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9 or torch.version.cuda is None:
        return f"compute capability {major}.{minor}: grouped float8 GEMMs are written for Hopper, 9.0"
    return ""


def no_block_scales(device: torch.device) -> str:
    """Why `device` multiplies no float8 with a scale for every block of 128, "" where it does: cuBLASLt does on Hopper,
    from CUDA 12.9 on, which is tried once."""
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
