"""The rates that predictions of time go by: from a table, so that every rank and every run predicts the same.

Only their ratios matter where times are compared: FLOPs per byte say when to compute a value again instead of keeping
it. On sm_90 (an H200) GEMMs in bf16 reach 790 of the stated 989 TFLOP/s and copies 4.27 of 4.8 TB/s; the same fractions
are taken for every other chip. The CPU stands for a server's socket, a TPU for a v5e. A kernel more takes what its
launch does, on a GPU 5 us of the host's time: a step that waits for the host is as much longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacpp_compile.targets import chips, gpus

# What of a stated peak is reached.
OF_FLOPS, OF_BYTES = 0.8, 0.89
LAUNCH = 5e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """flops: FLOP/s of GEMMs in 16 bits. bytes: bytes/s of the device's memory. label: whose they are, "sm_90".
    launch: seconds that a kernel takes beside those."""

    flops: float
    bytes: float
    label: str
    launch: float = 0.0


CPU = Rates(2e12, 200e9, "cpu")
TPU = Rates(OF_FLOPS * 197e12, OF_BYTES * 819e9, "tpu")


def rates(target: str) -> Rates:
    """The rates of a target, on "cuda" of torch's current device; of sm_90 where its table says nothing of them, or
    there is no such device. Of the GPU that is supposed, where one is (`gpus.supposing`)."""
    if (gpu := gpus.supposed()) is not None:
        peak = chips.of_capability(*gpu.capability).peaks["bf16"]
        return Rates(OF_FLOPS * peak * 1e12, OF_BYTES * gpu.memory_gb_per_s * 1e9, gpu.name, LAUNCH)
    if target != "cuda":
        return TPU if target == "tpu" else CPU
    chip = chips.current()
    known = chip if chip is not None and chip.peaks.get("bf16") and chip.memory_gb_per_s else None
    usual = known or chips.of_capability(9, 0)
    flops, moved = OF_FLOPS * usual.peaks["bf16"] * 1e12, OF_BYTES * usual.memory_gb_per_s * 1e9
    return Rates(flops, moved, (chip or usual).label, LAUNCH)
