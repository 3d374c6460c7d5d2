"""What the delta rule's kernels in Gluon take.

`_walks`, `_small_decay_chunks` and `_after_prepare` launch them, by ops of their own (`_hopper_ops`), and fall back to
Triton's kernels where this release of Triton does not compile them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.hopper import CHUNK, GluonKernels, lacking, rows, side_by_side, tokens

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor  # launches take it

    from megacpp_compile.lowerings.gated_delta_rule._gluon_channel_grads import delta_channel_grads
    from megacpp_compile.lowerings.gated_delta_rule._gluon_key_grad import delta_key_grad
    from megacpp_compile.lowerings.gated_delta_rule._gluon_query_grad import PARTS, delta_query_grad
    from megacpp_compile.lowerings.gated_delta_rule._gluon_reverse_walk import delta_reverse_walk
    from megacpp_compile.lowerings.gated_delta_rule._gluon_small_decay_chunks import delta_small_decay_chunks_hopper
    from megacpp_compile.lowerings.gated_delta_rule._gluon_states import delta_states
    from megacpp_compile.lowerings.gated_delta_rule._gluon_walk import delta_walk

    kernels = GluonKernels("")
except (ImportError, AttributeError) as error:
    kernels = GluonKernels(lacking(error))

__all__ = [
    "CHUNK",
    "PARTS",
    "delta_channel_grads",
    "delta_key_grad",
    "delta_query_grad",
    "delta_reverse_walk",
    "delta_small_decay_chunks_hopper",
    "delta_states",
    "delta_walk",
    "rows",
    "side_by_side",
    "tokens",
]

# What gates a channel are given in.
GATES = (torch.float32, torch.bfloat16)
# Channels of keys and of values.
CHANNELS = 128
# Value heads of a key head: kernels of gates a head have them one after the other in their code.
MOST_PER_KEY = 4


def serve(call: Any, chunk: int, packed: bool, per_channel: bool = False) -> bool:
    """Whether the kernels of gates a head, or a channel, take a call, of forward or backward."""
    return (
        not (call.wide or packed)
        and call.per_channel == per_channel
        and (not per_channel or call.g.dtype in GATES)
        and (per_channel or call.heads <= call.key_heads * MOST_PER_KEY)
        and _fit(call.v.device, chunk, {call.K, call.V}, call.batch * call.chunks * call.heads)
    )


def serve_gates(g: Tensor, chunk: int, count: Any) -> bool:
    """Whether the kernel that looks for chunks of small decay takes these, bfloat16 without documents: `count` of all
    heads."""
    return g.dtype in GATES and _fit(g.device, chunk, {g.shape[3]}, count)


def _fit(device: torch.device, chunk: int, sizes: set[int], count: Any) -> bool:
    return chunk == CHUNK and sizes == {CHANNELS} and kernels.serve(device, count)
