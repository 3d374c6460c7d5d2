"""`gated_delta_rule` on XLA: the reference, with chunks carried by one `while` loop, no float64 and T made of GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megacpp_compile.lowerings._kernels.xla_gated_chunks import (
    PairedChannelDecay,
    PairedHeadDecay,
    block_inverse,
    cannot_serve,
)
from megacpp_compile.lowerings.gated_delta_rule import reference

# ATen cannot express XLA's `while`: the lowered graph calls these functions.
TRACED = False


class DeltaRuleChunks(reference.DeltaRuleChunks):
    per_head, per_channel = PairedHeadDecay, PairedChannelDecay

    @staticmethod
    def inverse(lower: Tensor) -> Tensor:
        return block_inverse(lower)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    return cannot_serve(args[2:9] if name == "gated_delta_rule_backward" else args[:7])


# Functions and no partials: a graph that calls one prints its name.
def gated_delta_rule(*args: Any) -> Any:
    return reference.gated_delta_rule(*args, chunks=DeltaRuleChunks)  # type: ignore[misc]


def gated_delta_rule_backward(*args: Any) -> Any:
    return reference.gated_delta_rule_backward(*args, chunks=DeltaRuleChunks)  # type: ignore[misc]
