"""Where and with what a run was made, as far as it can be known from inside."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from megacpp_compile.evidence import binding
from megacpp_compile.targets import chips

PEERS = ("megatron-core", "torchao", "transformer-engine", "liger-kernel", "transformers")


def conditions(device: torch.device, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "seed": seed,
        "packages": {name: v for name in PEERS if (v := version(name))},
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["label"], chip = chips.label("cuda", device), chips.current(device)
        if chip is not None and chip.utilisation_of:  # the maker's figure, of which a utilisation is a fraction
            found["stated_peak"] = {chip.utilisation_of: chip.peaks[chip.utilisation_of]}
        found["device_memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return found


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this checkout, with a + when files differ from it; None outside a checkout."""
    head, clean = binding.commit(Path(__file__).parent)
    return head and head + ("" if clean else "+")


def _cudnn() -> int | str | None:
    """torch refuses to name one where another library, as Transformer Engine, has loaded its own before."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error).partition(".")[0]
