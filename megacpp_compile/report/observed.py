"""Which kernels served the attention of a step, beside those that its frames were compiled to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megacpp_compile.report.kernels import attention_kernels, families
from megacpp_compile.report.measure import measured_kind

# What is no promise of a kernel: nobody knew, or Inductor writes its own.
_NO_PROMISE = ("?", "", "unfused")


def observed(step: Callable[[], Any], device: str | torch.device, rows: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Run `step` under torch's profiler, and note in `rows` (of `Frame.attention`) which family of kernels served:
    (the families seen, sorted).

    A row's `observed` is its own kernel where that ran, else the only family that ran, else "?": a profiler does not
    tell which of several attentions a kernel was for. Warns of a kernel that a frame was compiled to and that did not
    run.
    """
    seen = families(attention_kernels(step, torch.device(measured_kind(device))))
    missed: dict[str, str] = {}
    for row in rows:
        kernel = row["kernel"]
        row["observed"] = kernel if kernel in seen else seen[0] if len(seen) == 1 else "?"
        if kernel not in (*seen, *_NO_PROMISE):
            missed.setdefault(kernel, row["fqn"] or "(the frame itself)")
    ran = ", ".join(seen) or "no kernel of attention that is known"
    for kernel, fqn in missed.items():
        text = f"{fqn}: attention was compiled to {kernel}, and in this step {ran} ran; `megacpp doctor` names causes."
        warnings.warn(text, stacklevel=3)
    return seen
