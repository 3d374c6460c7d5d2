"""`gated_linear_attention` on XLA: the reference, with chunks carried by one `while` loop and no float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacpp_compile.lowerings._kernels.gated_chunks import GatedChunks
from megacpp_compile.lowerings._kernels.xla_gated_chunks import PairedChannelDecay, PairedHeadDecay, cannot_serve
from megacpp_compile.lowerings.gated_linear_attention import reference

# ATen cannot express XLA's `while`: the lowered graph calls these functions.
TRACED = False


class LinearAttentionChunks(GatedChunks):
    per_head, per_channel = PairedHeadDecay, PairedChannelDecay


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    return cannot_serve(args[2:8] if name == "gated_linear_attention_backward" else args[:6])


# Functions and no partials: a graph that calls one prints its name.
def gated_linear_attention(*args: Any) -> Any:
    return reference.gated_linear_attention(*args, chunks=LinearAttentionChunks)  # type: ignore[misc]


def gated_linear_attention_backward(*args: Any) -> Any:
    return reference.gated_linear_attention_backward(*args, chunks=LinearAttentionChunks)  # type: ignore[misc]
