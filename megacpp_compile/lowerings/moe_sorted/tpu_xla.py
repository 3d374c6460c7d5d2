"""`moe_sorted` on XLA: `moe`'s blocks of rows, a fixed number in all, each of which is one GEMM."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megacpp_compile.lowerings.moe.reference import precision_of
from megacpp_compile.lowerings.moe.tpu_xla import GroupedGemms, refusal
from megacpp_compile.lowerings.moe_sorted import reference


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x = args[0] if name == "moe_sorted" else args[1]
    return refusal(x.shape, precision_of(name, args))


moe_sorted = functools.partial(reference.moe_sorted, gemms=GroupedGemms)
moe_sorted_backward = functools.partial(reference.moe_sorted_backward, gemms=GroupedGemms)
