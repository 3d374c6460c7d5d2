"""The machine and the code that a record is bound to."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from megacpp_compile.doctor.machine import installed
from megacpp_compile.targets import chips


def machine_binding(folder: Path) -> dict[str, Any]:
    """What `Record.machine` holds of this machine, and of the checkout at `folder`. The host is there by a hash of its
    name: two environments have to be two machines, and nobody has to know which."""
    found: dict[str, Any] = {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
        "kind": "cpu",
        "device": platform.processor() or platform.machine(),
        "capability": None,
        "label": "cpu",
        "driver": None,
        "torch": torch.__version__,
        "packages": installed(),
    }
    if torch.cuda.is_available():
        found["kind"], found["device"] = "cuda", torch.cuda.get_device_name()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["label"] = chips.label("cuda")
        found["driver"] = _driver()
    found["commit"], found["clean"] = commit(folder)
    return found


def commit(folder: Path) -> tuple[str | None, bool]:
    """(the commit of the checkout at `folder`, whether no file differs from it); (None, False) outside of one."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    return head, head is not None and _git(folder, "status", "--porcelain", "--untracked-files=no") == ""


def _git(folder: Path, *args: str) -> str | None:
    return _said(["git", *args], folder)


def _driver() -> str | None:
    return _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], Path("."))


def _said(command: list[str], folder: Path) -> str | None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
