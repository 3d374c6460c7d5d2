"""Traps that are known by name: each a pure function of what the machine has and of what the trials found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megacpp_compile.doctor.machine import Machine
from megacpp_compile.doctor.trials import Trial

# A backend that takes as many times as long as another at the same widths is slow.
_SLOW = 2.0


@dataclass(frozen=True)
class Trap:
    """One that this machine is in. name: for machines. found: what is the matter. remedy: what to do."""

    name: str
    found: str
    remedy: str


def traps(machine: Machine, trials: Sequence[Trial] = ()) -> list[Trap]:
    """The traps that this machine is in."""
    return [trap for look in _KNOWN for trap in look(machine, trials)]


def _two_cudnns(machine: Machine, _: Sequence[Trial]) -> Iterator[Trap]:
    """Measured on an H200: torch's attention 3.4 times slower, Transformer Engine's unfused, without a word."""
    if len(machine.cudnn_loaded) > 1:
        found = "cuDNN is loaded from " + " and from ".join(machine.cudnn_loaded)
        remedy = "Keep one of them off the library path: torch and Transformer Engine have to share theirs."
        yield Trap("two-cudnns", found, remedy)


def _two_cudnn_packages(machine: Machine, _: Sequence[Trial]) -> Iterator[Trap]:
    if len(machine.cudnn_packages) > 1:
        both = " and ".join(f"{name} {version}" for name, version in machine.cudnn_packages.items())
        yield Trap("two-cudnn-packages", f"{both} are installed", "Uninstall the one that torch does not ask for.")


def _torch_refuses(machine: Machine, _: Sequence[Trial]) -> Iterator[Trap]:
    if machine.refusal:
        yield Trap("cudnn-of-another", f"torch does not run with the cuDNN that is loaded: {machine.refusal}",
                   "Import torch first, and take the other cuDNN off the library path.")  # fmt: skip


def _other_than_installed(machine: Machine, _: Sequence[Trial]) -> Iterator[Trap]:
    if not machine.cudnn or len(machine.cudnn_packages) != 1:
        return
    [(name, version)] = machine.cudnn_packages.items()
    if _release(version) != _release_of_number(machine.cudnn):
        yield Trap("cudnn-not-the-installed", f"torch runs with cuDNN {machine.cudnn}, and {name} is {version}",
                   "Something on the library path comes before the package; take it off.")  # fmt: skip


def _no_triton(machine: Machine, _: Sequence[Trial]) -> Iterator[Trap]:
    if machine.devices and "triton" not in machine.packages:
        yield Trap("no-triton", "there is a CUDA device and no Triton: nothing compiles for it", "Install triton.")


def _xla_of_another_torch(machine: Machine, _: Sequence[Trial]) -> Iterator[Trap]:
    xla, torch = machine.packages.get("torch_xla"), machine.packages.get("torch")
    if xla and torch and _release(xla)[:2] != _release(torch)[:2]:
        found = f"torch_xla {xla} works with torch of its own number, and torch is {torch}"
        remedy = f"Install torch {'.'.join(map(str, _release(xla)[:2]))}, in an environment of its own."
        yield Trap("torch-xla-of-another-torch", found, remedy)


def _fa4_does_not_run(machine: Machine, trials: Sequence[Trial]) -> Iterator[Trap]:
    if "flash-attn-4" not in machine.packages or not machine.devices:
        return
    failed = {trial.reason for trial in trials if trial.backend == "fa4" and trial.tag}
    for reason in sorted(failed):
        yield Trap("fa4-does-not-run", f"flash-attn-4 is installed and serves nothing: {reason}",
                   "Compare its release, and that of nvidia-cutlass-dsl, with the device.")  # fmt: skip


def _unfused(machine: Machine, trials: Sequence[Trial]) -> Iterator[Trap]:
    """On a GPU alone: on CPU torch has no fused kernel for heads of two widths."""
    for trial in trials if machine.devices else ():
        if trial.backend in ("sdpa", "te") and trial.family == "unfused":
            yield Trap("unfused-attention", f"{trial.backend} multiplies all scores out at {_widths(trial)} channels",
                       "See the other traps: a second cuDNN is the usual reason.")  # fmt: skip


def _slow(machine: Machine, trials: Sequence[Trial]) -> Iterator[Trap]:
    for trial in trials if machine.devices else ():
        alike = [t.milliseconds for t in trials if t.widths == trial.widths and t.milliseconds is not None]
        if trial.backend == "sdpa" and trial.milliseconds is not None and trial.milliseconds > _SLOW * min(alike):
            times = f"{trial.milliseconds / min(alike):.1f} times as long as the fastest"
            found = f"sdpa takes {times} at {_widths(trial)} channels, by {trial.family}"
            yield Trap("slow-attention", found, "See the other traps, or ask for the faster backend.")


_KNOWN: tuple[Callable[[Machine, Sequence[Trial]], Iterator[Trap]], ...] = (
    _two_cudnns, _two_cudnn_packages, _torch_refuses, _other_than_installed, _no_triton, _xla_of_another_torch,
    _fa4_does_not_run, _unfused, _slow,
)  # fmt: skip


def _widths(trial: Trial) -> str:
    return f"{trial.widths[0]} and {trial.widths[1]}"


def _release(version: str) -> tuple[int, ...]:
    """(9, 10, 2) of "9.10.2.21"."""
    numbers = version.partition("+")[0].split(".")[:3]
    return tuple(int(n) for n in numbers if n.isdigit())


def _release_of_number(number: str) -> tuple[int, ...]:
    """(9, 10, 2) of "91002", as cuDNN says it since 9; (8, 9, 7) of "8907"."""
    whole = int(number)
    major = whole // 10000 if whole >= 90000 else whole // 1000
    rest = whole - major * (10000 if whole >= 90000 else 1000)
    return major, rest // 100, rest % 100
