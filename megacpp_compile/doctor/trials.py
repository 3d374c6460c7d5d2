"""Each backend of `attention`, tried once: who served, by which kernels, and at what rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacpp_compile.errors import MegacppError
from megacpp_compile.nn.attention import BACKENDS, attention, attention_capability, observed_attention
from megacpp_compile.report.kernels import families
from megacpp_compile.report.user_code import first_line

# Channels of queries and of values: latent attention's heads, and plain ones.
WIDTHS = ((192, 128), (128, 128))
# Device -> batch, heads, tokens, dtype, timed calls.
_SIZES = {"cuda": (2, 32, 4096, torch.bfloat16, 10), "cpu": (1, 2, 128, torch.float32, 2)}


@dataclass(frozen=True)
class Trial:
    """One backend at one pair of widths, forward.

    Attributes:
        backend: who was asked by name.
        widths: channels of queries, of values.
        family: the family of kernels that ran, "flash"; "" where none did.
        kernels: their names, by the profiler.
        milliseconds: of one call, None where it did not run.
        rate: TFLOP/s of a causal mask's half, None likewise.
        tag: why it did not run, for machines; "raised" for an error.
        reason: the same in words.
    """

    backend: str
    widths: tuple[int, int]
    family: str = ""
    kernels: tuple[str, ...] = ()
    milliseconds: float | None = None
    rate: float | None = None
    tag: str = ""
    reason: str = ""


def trials(device: str) -> list[Trial]:
    """All of them on `device`, a type of device: small on CPU."""
    return [trial(backend, widths, device) for widths in WIDTHS for backend in BACKENDS]


def trial(backend: str, widths: tuple[int, int], device: str) -> Trial:
    """One of them. What it raises is its result."""
    batch, heads, tokens, dtype, repeats = _SIZES.get(device, _SIZES["cpu"])
    keys, values = widths
    sizes = ((batch, heads, tokens, width) for width in (keys, keys, values))
    try:
        with torch.no_grad():
            # Half of unit normals, so that no score is far beyond the others.
            q, k, v = (torch.randn(size, device=device, dtype=torch.float32).mul(0.5).to(dtype) for size in sizes)
            attention_capability(q, k, v, backend=backend)

            def call() -> Any:
                return attention(q, k, v, backend=backend)

            call()
            seen = observed_attention(call, device)
            seconds = _seconds(call, repeats, device)
    except MegacppError as error:
        tag, reason = getattr(error, "tag", "raised"), getattr(error, "reason", str(error))
        return Trial(backend, widths, tag=tag, reason=reason)
    except Exception as error:
        return Trial(backend, widths, tag="raised", reason=first_line(error))
    kernels = (seen.kernels if seen is not None else None) or ()
    flops = batch * heads * tokens * tokens * (keys + values)
    family = ", ".join(families(kernels)) or "none seen"
    return Trial(backend, widths, family, kernels, seconds * 1e3, flops / seconds / 1e12)


def _seconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """The shortest of `repeats` calls."""
    found = []
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - began)
    return min(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
