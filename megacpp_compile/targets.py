"""Which device family a frame is compiled for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from megacpp_compile.errors import TargetUnavailableError

# Type of a device that XLA compiles for -> the package that brings it. Both are the target "tpu".
XLA_DEVICES = {"xla": "torch_xla", "tpu": "torch_tpu"}


def family(kinds: set[str]) -> str:
    """ "cpu", "cuda" or "tpu" for tensors on devices of these types."""
    return "tpu" if kinds & XLA_DEVICES.keys() else "cuda" if "cuda" in kinds else "cpu"


def resolve_target(wanted: str, example_inputs: Sequence[Any]) -> str:
    """ "cpu", "cuda" or "tpu": `wanted`, or for "auto" where the frame's tensors are.

    Raises TargetUnavailableError where `wanted` can't be compiled for here.
    """
    kinds = device_types(example_inputs)
    if wanted == "auto":
        wanted = family(kinds)
    if wanted == "tpu":
        needed = [XLA_DEVICES[kind] for kind in kinds if kind in XLA_DEVICES] or list(XLA_DEVICES.values())
        if all(importlib.util.find_spec(package) is None for package in needed):
            install = "pip install 'megacpp-compile[tpu]', or torch_tpu with torch 2.11 to 2.15"
            raise TargetUnavailableError("tpu", f"the package {' or '.join(needed)}", install)
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TargetUnavailableError("cuda", "a CUDA device", "install a CUDA build of torch")
    return wanted


def device_types(example_inputs: Sequence[Any]) -> set[str]:
    """Where the tensors among a frame's inputs are."""
    return {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}


def by_torch_tpu(example_inputs: Sequence[Any]) -> bool:
    """Whether torch_tpu, and not torch_xla, compiles a frame of target "tpu"."""
    return any(XLA_DEVICES.get(kind) == "torch_tpu" for kind in device_types(example_inputs))
