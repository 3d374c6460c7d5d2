"""The machine and the code that a record is bound to."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from megacpp_compile.doctor.machine import installed
from megacpp_compile.errors import EvidenceError
from megacpp_compile.targets import chips


def machine_binding(folder: Path, records: Path | None = None) -> dict[str, Any]:
    """What `Record.machine` holds of this machine, and of the checkout at `folder`. The host is there by a hash of its
    name and of its GPU's own number, as containers are called alike: two environments have to be two machines, and
    nobody has to know which. What lies under `records` makes no checkout dirty: a run before this one wrote it."""
    found: dict[str, Any] = {
        "host": digest(platform.node() + _gpu()),
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
    found["commit"], found["clean"] = commit(folder, records)
    return found


def digest(text: str) -> str:
    """Twelve hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def launched(path: Path, binding: dict[str, Any]) -> str:
    """The digest of the launch record at `path`, for a record of evidence that `binding` binds.

    Raises EvidenceError for a file that is no launch record, and for one of another host, commit or label: what was
    about to run elsewhere, or with other code, is not what ran.
    """
    name = f"launch record {path.name!r}"
    try:
        text = path.read_text()
        machine = json.loads(text)["machine"]
        said = {key: machine[key] for key in ("host", "commit", "label")}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise EvidenceError(name, f"it is none: {type(error).__name__}: {error}") from error
    for key, value in said.items():
        if value != binding.get(key):
            raise EvidenceError(name, f"its {key} is {value!r}, and the run's {binding.get(key)!r}")
    return digest(text)


def commit(folder: Path, apart: Path | None = None) -> tuple[str | None, bool]:
    """(the commit of the checkout at `folder`, whether no file but those under `apart` differs from it); (None, False)
    outside of one."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    status = ["status", "--porcelain", "--untracked-files=no"]
    if apart is not None and apart.resolve().is_relative_to(folder.resolve()):
        status += ["--", ":/", f":(exclude){apart.resolve().relative_to(folder.resolve())}"]
    return head, head is not None and _git(folder, *status) == ""


def _gpu() -> str:
    """The number that the first GPU has from its maker, "" without one."""
    return str(getattr(torch.cuda.get_device_properties(0), "uuid", "")) if torch.cuda.is_available() else ""


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
