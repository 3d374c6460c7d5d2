"""What multiplies float8, and in which sizes."""

from __future__ import annotations

import torch

MULTIPLE = 16  # of every side of a product


def no_float8(device: torch.device) -> str:
    """Why `device` multiplies no float8, "" where it does."""
    if device.type != "cuda":
        return f"{device.type} has no float8 products"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no float8 products"
