"""What this process has loaded and could load, read from where it can't be mistaken: its own memory map, and the
metadata of what is installed. Nothing here loads a library."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megacpp_compile.fx.groups import by_key
from megacpp_compile.report.user_code import first_line

# What is asked for by the name of its distribution.
PACKAGES = ("torch", "triton", "transformer-engine", "flash-attn-4", "torch_xla", "torch_tpu", "jax")
_CUDNN = re.compile(r"^nvidia[-_]cudnn", re.IGNORECASE)
_LIBRARY = re.compile(r"(/\S*/)(libcudnn[\w]*\.so[\w.]*)$")


@dataclass(frozen=True)
class Machine:
    """What a machine has, as far as attention goes by it.

    Attributes:
        packages: distribution -> version, of those that are installed.
        cudnn_packages: likewise those that bring cuDNN.
        cudnn_loaded: folder -> the names of cuDNN's libraries that this process has loaded from there.
        cudnn: the version that torch runs with, None without one; "" where torch refuses to say.
        refusal: why it does.
        devices: "NVIDIA H200, sm_90" of each CUDA device.
        built_for: the CUDA release that torch was built for, None for a build without.
        python: version.
    """

    packages: dict[str, str] = field(default_factory=dict)
    cudnn_packages: dict[str, str] = field(default_factory=dict)
    cudnn_loaded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cudnn: str | None = None
    refusal: str = ""
    devices: tuple[str, ...] = ()
    built_for: str | None = None
    python: str = ""


def machine() -> Machine:
    """This one. cuDNN is loaded when something has asked for it: look again afterwards."""
    cudnn, refusal = _cudnn()
    return Machine(
        installed(), cudnn_packages(_distributions()), loaded_cudnn(_memory_map()), cudnn, refusal, _devices(),
        torch.version.cuda, platform.python_version(),
    )  # fmt: skip


def installed(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Distribution -> version of those among `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cudnn_packages(distributions: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those of (name, version) that bring cuDNN."""
    return {name: version for name, version in sorted(distributions) if _CUDNN.match(name)}


def loaded_cudnn(memory_map: str) -> dict[str, tuple[str, ...]]:
    """Folder -> names of cuDNN's libraries, of a text as /proc/self/maps has it."""
    hits = (_LIBRARY.search(line.removesuffix(" (deleted)")) for line in memory_map.splitlines())
    found = by_key((str(Path(hit[1])), hit[2]) for hit in hits if hit)
    return {folder: tuple(sorted({*names})) for folder, names in sorted(found.items())}


def _distributions() -> Iterable[tuple[str, str]]:
    for one in importlib.metadata.distributions():
        if name := one.metadata["Name"]:
            yield name, one.version


def _memory_map() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:  # another system
        return ""


def _cudnn() -> tuple[str | None, str]:
    """torch refuses to name one where another library has loaded its own before."""
    try:
        found = torch.backends.cudnn.version()
    except RuntimeError as error:
        return "", first_line(error)
    return (None if found is None else str(found)), ""


def _devices() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    places = range(torch.cuda.device_count())
    return tuple(f"{torch.cuda.get_device_name(i)}, sm_{''.join(map(str, torch.cuda.get_device_capability(i)))}"
                 for i in places)  # fmt: skip
