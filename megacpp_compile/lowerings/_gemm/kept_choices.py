"""What the search among cuBLASLt's candidates chose, kept beside torch's own caches for other processes.

A choice is a file under Inductor's cache directory, named by all that it was made for: the GPU, the releases of
cuBLASLt and torch, and the GEMM. Nothing is kept or found where Inductor's caches are disabled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from megacpp_compile._torch import inductor
from megacpp_compile.errors import TorchInternalsError

log = logging.getLogger(__name__)


def place(device: torch.device, library: int, gemm: tuple[Any, ...]) -> Path | None:
    """The file of a GEMM's choice, None where nothing is kept. library: cuBLASLt's release; gemm: dtypes, shapes and
    strides."""
    try:
        folder = None if inductor.config.force_disable_caches else inductor.cache_dir()
    except TorchInternalsError as error:
        log.info("cublasLt's choices are not kept: %s", error)
        folder = None
    if folder is None:
        return None
    gpu = torch.cuda.get_device_properties(device)
    made_for = gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count, library, torch.__version__, gemm
    name = hashlib.sha256(repr(made_for).encode()).hexdigest()[:32]
    return Path(folder) / "megacpp_gemms" / f"{name}.json"


def find(file: Path | None) -> tuple[bool, list[int] | None]:
    """(whether a choice is kept, the words of the algorithm that won, None where torch's choice is as good)."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if file is not None:
            words = json.loads(file.read_text())["algorithm"]
            return True, None if words is None else [int(word) for word in words]
    return False, None


def keep(file: Path | None, algorithm: list[int] | None) -> None:
    """Keep a choice, for `find`. One that cannot be written is searched for again."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")  # a process that reads meanwhile finds all of it or nothing
        own.write_text(json.dumps({"algorithm": algorithm}))
        own.replace(file)
    except OSError as error:
        log.info("cublasLt's choice was not kept in %s: %s", file, error)
