"""What the machine, its packages or its torch lack."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_compile.errors._base import MegacppError


class TargetUnavailableError(MegacppError):
    """The target asked for cannot be used on this machine.

    Args:
        target: `"cpu"`, `"cuda"` or `"tpu"`.
        missing: what is missing ("the package triton", "a CUDA device").
        install: how to get it ("pip install triton").
        remedy: what else to do, where it was not asked for by the option `target`.
    """

    def __init__(self, target: str, missing: str, install: str, remedy: str | None = None) -> None:
        self.target, self.missing, self.install = target, missing, install
        remedy = remedy or "Or let options={'target': 'auto'} choose what is there."
        super().__init__(f"target {target!r} is not available: {missing} is missing. To get it: {install}. {remedy}")


class TargetRecipeError(MegacppError, ValueError):
    """A plan asks of a recipe what is refused on the device that is to run it.

    Args:
        target: label of the device, "sm_121a".
        recipe: the recipe.
        reason: why it is refused, as a sentence without its full stop.
        remedy: what to do, as a sentence.
    """

    def __init__(self, target: str, recipe: str, reason: str, remedy: str) -> None:
        self.target, self.recipe, self.reason, self.remedy = target, recipe, reason, remedy
        super().__init__(f"precision: {recipe!r} on {target}: {reason}. {remedy}")


class TargetMismatchError(MegacppError, ValueError):
    """Measurements or evidence of different devices were to be merged or compared.

    Args:
        what: what was to become of them, "one page of benchmarks".
        labels: the labels of the devices.
    """

    def __init__(self, what: str, labels: Sequence[str]) -> None:
        self.what, self.labels = what, tuple(labels)
        super().__init__(
            f"{what} would merge rows of {' and '.join(self.labels)}: figures and evidence of one target say nothing "
            "of another. Give the rows of one target at a time."
        )


class TorchTooOldError(MegacppError):
    """The installed torch is older than this package supports.

    Args:
        found: the version installed.
        needed: the oldest version that is supported.
    """

    def __init__(self, found: str, needed: str = "2.9") -> None:
        self.found, self.needed = found, needed
        super().__init__(
            f"torch {found} is too old for the megacpp backend, which needs {needed} or newer: "
            f"pip install 'torch>={needed}'."
        )


class TorchInternalsError(MegacppError):
    """Internal: the installed torch lacks a private symbol that this package uses. What was asked for then goes
    without it wherever it can, and this is the reason in the report; the user meets it where nothing else serves.

    Args:
        symbol: where torch had it.
        found: the version of torch.
        use: what it is for, as a noun.
        consequence: what happens without it, as a sentence.
    """

    def __init__(self, symbol: str, found: str, use: str, consequence: str) -> None:
        self.symbol, self.found, self.use, self.consequence = symbol, found, use, consequence
        super().__init__(f"torch {found} has no {symbol} (for {use}): {consequence}")


class PackageMissingError(MegacppError, ImportError):
    """Something that was asked for needs a package that cannot be imported.

    Args:
        package: its name.
        asked: what asked for it.
        problem: what importing it said, "" for nothing.
    """

    def __init__(self, package: str, asked: str, problem: str = "") -> None:
        self.package, self.asked, self.problem = package, asked, problem
        super().__init__(
            f"{asked} needs the package {package!r}, which cannot be imported{f' ({problem})' if problem else ''}. "
            "Install it, or ask for something else."
        )


class DeviceNotMeasuredError(MegacppError, ValueError):
    """Memory of a device that torch keeps no account of was to be measured.

    Args:
        device: the device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        super().__init__(f"the memory of {device!r} cannot be measured: give measure() a CUDA device or 'cpu'.")
