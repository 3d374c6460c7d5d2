"""`moe_sorted` on CUDA: the kernels of `moe`, which read rows where they lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megacpp_compile.lowerings.moe import cuda_triton as unsorted
from megacpp_compile.lowerings.moe.reference import precision_of
from megacpp_compile.lowerings.moe_sorted import reference

__all__ = ["moe_sorted", "moe_sorted_backward", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x, down = (args[0], args[4]) if name == "moe_sorted" else (args[1], args[4])
    return unsorted.refusal(x, down, precision_of(name, args))


moe_sorted = functools.partial(reference.moe_sorted, gemms=unsorted.GroupedGemms)
moe_sorted_backward = functools.partial(reference.moe_sorted_backward, gemms=unsorted.GroupedGemms)
