"""Kinds of CUDA device below the target "cuda", as data: what each has, what is pinned on it, what its peak is.

A chip is known by its compute capability and named by a label, "sm_90". Figures, evidence and settings of one label say
nothing of another. Features say what the hardware has; whether a kernel of this package serves there is asked of the
kernel. Of these chips sm_90 alone has run this package: docs/targets.md says what the others are waiting for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from megacpp_compile.errors import TargetMismatchError

# fp8: GEMMs in float8. block_fp8: with scales of 1 x 128 and 128 x 128. mx: with a scale for 32 elements in the tensor
# core itself. fp4: likewise in 4 bits. tcgen05: GEMMs with operands in tensor memory. clusters: TMA and clusters of
# blocks.
FEATURES = ("fp8", "block_fp8", "mx", "fp4", "tcgen05", "clusters")


@dataclass(frozen=True, slots=True, eq=False)
class Chip:
    """A kind of CUDA device.

    Attributes:
        label: as in reports, records and benchmarks.
        capability: (major, minor).
        devices: which are meant, in words.
        features: of FEATURES.
        shared_memory: bytes that one block of threads may have.
        peaks: precision -> TFLOP/s of dense GEMMs, as the maker states them; nothing here was measured.
        utilisation_of: the precision whose peak a utilisation is a fraction of, "" where none is stated.
        memory_gb_per_s: bandwidth, as the maker states it; 0 where unknown.
        pins: recipe -> settings of it that hold on this chip, whatever a plan leaves open.
        why_pinned: recipe -> why, as a sentence without its full stop.
        known: whether it is in the table below.
    """

    label: str
    capability: tuple[int, int]
    devices: str = ""
    features: frozenset[str] = frozenset()
    shared_memory: int = 0
    peaks: Mapping[str, float] = field(default_factory=dict)
    utilisation_of: str = ""
    memory_gb_per_s: float = 0.0
    pins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    why_pinned: Mapping[str, str] = field(default_factory=dict)
    known: bool = True

    def pinned(self, recipe: str, setting: str, asked: Any = None) -> Any:
        """The value of `setting` of `recipe` in force here: the pin, else what was `asked`."""
        return self.pins.get(recipe, {}).get(setting, asked)

    def lacks(self, recipe: str) -> str:
        """Why a recipe of precision cannot run here, "" where nothing in this table says so."""
        needed = RECIPE_FEATURES.get(recipe, "")
        return f"{self.label} has no {needed}" if needed and needed not in self.features else ""

    def utilisation(self, tflops: float) -> float | None:
        """`tflops` as a fraction of the stated peak, None where there is none to compare with."""
        return tflops / self.peaks[self.utilisation_of] if self.utilisation_of else None

    def describe(self) -> str:
        """One line: label, features, pins in force."""
        pins = [
            f"{recipe} has {name}={value} pinned ({self.why_pinned[recipe]})"
            for recipe, values in self.pins.items() for name, value in values.items()
        ]  # fmt: skip
        has = ", ".join(f for f in FEATURES if f in self.features) or "no optional features"
        if not self.known:
            has = "not in the table of devices: no optional feature is assumed"
        return f"target cuda, {self.label}: {has}; {'; '.join(pins) or 'no pins'}"


# Recipe of precision -> the feature that it needs. Of float8 the libraries that multiply in it say where they can.
RECIPE_FEATURES: Mapping[str, str] = {"nvfp4": "fp4"}

_HOPPER = frozenset({"fp8", "block_fp8", "clusters"})
_BLACKWELL = frozenset({"fp8", "mx", "fp4", "tcgen05", "clusters"})
_NO_RHT = MappingProxyType({"nvfp4": MappingProxyType({"disable_rht": True})})

CHIPS = (
    Chip("sm_80", (8, 0), "A100", frozenset(), 163 * 1024, {"bf16": 312.0}, "bf16", 2039.0),
    Chip("sm_89", (8, 9), "L40S, RTX 4090", frozenset({"fp8"}), 99 * 1024),
    Chip("sm_90", (9, 0), "H100, H200", _HOPPER, 227 * 1024, {"bf16": 989.0, "fp8": 1979.0}, "bf16", 4800.0),
    Chip("sm_100a", (10, 0), "B200, GB200", _BLACKWELL, 227 * 1024,
         {"bf16": 2250.0, "fp8": 4500.0, "nvfp4": 9000.0}, "bf16", 8000.0),
    Chip("sm_121a", (12, 1), "GB10", frozenset({"fp8", "mx", "fp4"}), 99 * 1024, {"nvfp4": 500.0}, "nvfp4", 273.0,
         _NO_RHT, {"nvfp4": "the random Hadamard transform is not stable on that target; results tracked apart"}),
)  # fmt: skip
_BY_CAPABILITY = {chip.capability: chip for chip in CHIPS}


@functools.cache
def of_capability(major: int, minor: int) -> Chip:
    """The chip of a compute capability. One that is not in the table is "sm_103", with no feature that is optional."""
    return _BY_CAPABILITY.get((major, minor)) or Chip(f"sm_{major}{minor}", (major, minor), known=False)


def current(device: torch.device | int | None = None) -> Chip | None:
    """The chip of a CUDA device, by default torch's current one; None without CUDA."""
    return of_capability(*torch.cuda.get_device_capability(device)) if torch.cuda.is_available() else None


def on_hopper(device: torch.device) -> bool:
    """Whether a tensor's device is a GPU of Hopper's capability."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiprocessors(device: torch.device) -> int:
    """How many a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def label(target: str, device: torch.device | int | None = None) -> str:
    """The label of a target where it runs: a chip's on "cuda" ("sm_90"), else the target's name."""
    chip = current(device) if target == "cuda" else None
    return chip.label if chip is not None else target


def label_of(where: Mapping[str, Any]) -> str:
    """The label of a measurement by its conditions or its machine: "label" if it is there, else by "capability"
    ("9.0"); "" where neither says."""
    if given := where.get("label"):
        return str(given)
    major, dot, minor = str(where.get("capability") or "").partition(".")
    if dot and major.isdigit() and minor.isdigit():
        return of_capability(int(major), int(minor)).label
    return "cpu" if where.get("kind") == "cpu" else ""


def one_label(what: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """The label that all `rows` have, told by `label_of`; "" where none has any. Rows that do not say are passed over.

    what: is made of them, "one page of benchmarks". Raises TargetMismatchError where two labels differ.
    """
    labels = sorted({found for row in rows if (found := label_of(row))})
    if len(labels) > 1:
        raise TargetMismatchError(what, labels)
    return labels[0] if labels else ""
