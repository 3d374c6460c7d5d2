"""The whole of `megacpp doctor`: trials first, so that what they load is seen, then the machine, then the traps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from megacpp_compile.doctor.machine import PACKAGES, Machine, machine
from megacpp_compile.doctor.traps import Trap, traps
from megacpp_compile.doctor.trials import Trial, trials
from megacpp_compile.report.tables import table_text


@dataclass(frozen=True)
class Examination:
    """What was found. `str(examination)` is for people."""

    device: str
    machine: Machine
    trials: tuple[Trial, ...]
    traps: tuple[Trap, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain containers, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [(name, self.machine.packages.get(name, "-")) for name in PACKAGES]
        rows += [("Python", self.machine.python), ("CUDA, of torch's build", self.machine.built_for or "-")]
        rows += [("device", device) for device in self.machine.devices or ("no CUDA device",)]
        rows += [("cuDNN, that torch runs with", self.machine.refusal or self.machine.cudnn or "-")]
        rows += [(f"cuDNN package {name}", version) for name, version in self.machine.cudnn_packages.items()]
        rows += [("cuDNN loaded from", folder) for folder in self.machine.cudnn_loaded]
        text = table_text("this machine", ("what", "version"), rows)
        text += table_text(f"attention on {self.device}, forward, causal",
                           ("backend", "channels", "kernel", "ms", "TFLOP/s", "reason [tag]"),
                           [_row(trial) for trial in self.trials])  # fmt: skip
        found = [f"trap {trap.name}: {trap.found}. {trap.remedy}" for trap in self.traps]
        return text + "\n".join(found or ["no known trap"])


def examine(device: str | None = None) -> Examination:
    """Try each backend on `device` ("cuda" where there is one, else "cpu") and look at the machine."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tried = trials(device)
    found = machine()
    return Examination(device, found, tuple(tried), tuple(traps(found, tried)))


def _row(trial: Trial) -> tuple[str, ...]:
    keys, values = trial.widths
    reason = f"{trial.reason} [{trial.tag}]" if trial.tag else "-"
    numbers = ("-", "-")
    if trial.milliseconds is not None and trial.rate is not None:
        numbers = f"{trial.milliseconds:.3g}", f"{trial.rate:.3g}"
    return trial.backend, f"{keys} / {values}", trial.family or "-", *numbers, reason
