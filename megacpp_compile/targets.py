"""Which device family a frame is compiled for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from megacpp_compile.errors import TargetUnavailableError


def resolve_target(wanted: str, example_inputs: Sequence[Any]) -> str:
    """ "cpu", "cuda" or "tpu": `wanted`, or for "auto" where the frame's tensors are.

    Raises TargetUnavailableError where `wanted` can't be compiled for here.
    """
    if wanted == "auto":
        kinds = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
        wanted = "tpu" if "xla" in kinds else "cuda" if "cuda" in kinds else "cpu"
    if wanted == "tpu":
        if importlib.util.find_spec("torch_xla") is None:
            raise TargetUnavailableError("tpu", "the package torch_xla", "pip install 'megacpp-compile[tpu]'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TargetUnavailableError("cuda", "a CUDA device", "install a CUDA build of torch")
    return wanted
