"""What a frame can be compiled for: each target with its devices, their packages, lowerings and compilers.

A target is named "cpu", "cuda" or "tpu" in options and reports. Whatever differs between targets is a field here, so
that nothing else compares device names to find out.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megacpp_compile.errors import BadOptionError, TargetUnavailableError, closest


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device type of a target.

    type: as in `torch.device(type)`. package: what brings it beside torch, "" for torch itself. backend: the module of
    `megacpp_compile.backends` that compiles its frames. attention: what serves `nn.attention`, most wanted first.
    dynamic: whether its programs take sizes that are not known when they are compiled.
    """

    type: str
    package: str
    backend: str
    attention: tuple[str, ...]
    dynamic: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """A family of devices that one set of lowerings serves.

    Attributes:
        name: as in options and reports.
        devices: its device types.
        lowerings: names of lowering files, most wanted first, where an op states no preference of its own.
        keeps_latents: what `keep_latents="auto"` stands for: whether `down_norm_up` saves the latent.
        float8: whether precision plans apply; elsewhere everything stays in the model's own dtype.
        cublas: whether large GEMMs are cuBLAS's, so that candidates are timed and linears of one input merged.
        graphs_hold_ops: whether a graph may keep a semantic op that cannot be traced and is called when it runs.
        decomposes: whether traced lowerings are decomposed as Inductor wants them; XLA computes what ATen names.
    """

    name: str
    devices: tuple[Device, ...]
    lowerings: tuple[str, ...]
    keeps_latents: bool = False
    float8: bool = False
    cublas: bool = False
    graphs_hold_ops: bool = False
    decomposes: bool = True

    def device(self, example_inputs: Sequence[Any]) -> Device:
        """The device of this target that a frame's tensors are on; the first where none is."""
        kinds = device_types(example_inputs)
        return next((d for d in reversed(self.devices) if d.type in kinds), self.devices[0])


CPU = Target("cpu", (Device("cpu", "", "inductor", ("sdpa", "plain")),), ("reference",), graphs_hold_ops=True)
CUDA = Target(
    "cuda", (Device("cuda", "", "inductor", ("sdpa", "flex", "plain")),), ("cuda_triton", "reference"),
    float8=True, cublas=True, graphs_hold_ops=True,
)  # fmt: skip
TPU = Target(
    "tpu",
    (
        Device("xla", "torch_xla", "openxla", ("pallas", "plain")),
        Device("tpu", "torch_tpu", "torch_tpu", ("sdpa", "plain"), dynamic=False),
    ),
    ("tpu_xla", "reference"), keeps_latents=True, decomposes=False,
)  # fmt: skip
TARGETS = {target.name: target for target in (CPU, CUDA, TPU)}
_OTHER_DEVICE = "Or leave the device out: then it is the model's own."
DEVICES = {device.type: device for target in TARGETS.values() for device in target.devices}


def family(kinds: set[str]) -> Target:
    """The target of tensors on devices of these types: XLA's where one is, else CUDA's, else the CPU."""
    return next((t for t in (TPU, CUDA) if any(d.type in kinds for d in t.devices)), CPU)


def by_xla(device: torch.device) -> bool:
    """Whether XLA compiles what runs on `device`, be it through torch_xla or torch_tpu."""
    return any(device.type == d.type for d in TPU.devices)


def resolve_target(wanted: str, example_inputs: Sequence[Any]) -> Target:
    """The target `wanted`, or for "auto" that of the frame's tensors.

    Raises TargetUnavailableError where nothing here can compile for it.
    """
    kinds = device_types(example_inputs)
    target = family(kinds) if wanted == "auto" else TARGETS[wanted]
    packages = [d.package for d in target.devices if d.type in kinds] or [d.package for d in target.devices]
    _check_is_here(target, packages)
    return target


def named_device(given: str | torch.device, key: str = "device") -> torch.device:
    """The device that the setting `key` names.

    Raises BadOptionError for what names none, and for a GPU of a higher index than there are, TargetUnavailableError
    for one of a target of this package that is not here. Fake tensors of a device that torch has no code for would
    abort the process in autograd.
    """
    kind = given.partition(":")[0] if isinstance(given, str) else ""
    if kind in DEVICES:  # first, as torch may not know the name either without the package
        _check_is_here(family({kind}), [DEVICES[kind].package], _OTHER_DEVICE)
    try:
        place = torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        place = None
    if place is not None and place.type in DEVICES:
        _check_is_here(family({place.type}), [DEVICES[place.type].package], _OTHER_DEVICE)
        if place.type != "cuda" or (place.index or 0) < torch.cuda.device_count():
            return place
    elif place is not None and (place.type == "meta" or place.type == _accelerator()):
        return place
    types = sorted(DEVICES)
    wanted = f"one of {', '.join(map(repr, types))}, or a device of torch's that is here, with or without an index"
    meant = "cuda" if _names_a_gpu(str(given)) else closest(str(given), types, cutoff=0.75)
    raise BadOptionError(key, given, wanted, meant=meant)


def _check_is_here(target: Target, packages: Sequence[str], remedy: str | None = None) -> None:
    if all(package and importlib.util.find_spec(package) is None for package in packages):
        install = "pip install 'megacpp-compile[tpu]', or torch_tpu with torch 2.11 to 2.15"
        raise TargetUnavailableError(target.name, f"the package {' or '.join(packages)}", install, remedy)
    if target is CUDA and not torch.cuda.is_available():
        raise TargetUnavailableError(target.name, "a CUDA device", "install a CUDA build of torch", remedy)


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else None


def _names_a_gpu(text: str) -> bool:
    """Whether people call a CUDA device so: "gpu", "h100", "sm_90"."""
    from megacpp_compile.targets.chips import CHIPS

    known = {word for chip in CHIPS for word in (chip.label, *re.findall(r"\w+", chip.devices))}
    return text.lower() in {"gpu", "nvidia", "triton", *(word.lower() for word in known)}


def device_types(example_inputs: Sequence[Any]) -> set[str]:
    """Types of the devices that the tensors among a frame's inputs are on."""
    kinds: set[str] = set()
    for x in example_inputs:
        if isinstance(x, torch.Tensor):
            kinds.add(x.device.type)
        elif isinstance(x, (list, tuple)):  # as compiled autograd hands a backward what was saved
            kinds |= device_types(x)
    return kinds
