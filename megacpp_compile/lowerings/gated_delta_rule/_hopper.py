"""What the delta rule's kernels in Gluon take, and how they are handed their operands.

`_walks`, `_entering_states` and `_head_gradients` launch them, by ops of their own (`_hopper_ops`), and fall back to
Triton's kernels where this release of Triton does not compile them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from triton.errors import TritonError

from megacpp_compile.report import log
from megacpp_compile.targets.chips import on_hopper

try:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float32
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from megacpp_compile.lowerings.gated_delta_rule._gluon_key_grad import delta_key_grad
    from megacpp_compile.lowerings.gated_delta_rule._gluon_query_grad import PARTS, delta_query_grad
    from megacpp_compile.lowerings.gated_delta_rule._gluon_states import delta_states
    from megacpp_compile.lowerings.gated_delta_rule._gluon_walk import delta_walk

    missing = ""
except (ImportError, AttributeError) as error:  # Gluon is experimental: what it has differs between releases
    missing = f"Triton {triton.__version__} has not all of Gluon that it takes: {error}"

__all__ = ["PARTS", "delta_key_grad", "delta_query_grad", "delta_states", "delta_walk"]

Made = TypeVar("Made")

# Tokens of a chunk, and channels of keys and of values.
CHUNK, CHANNELS = 64, 128
# Chunks of all heads. Fewer are over before a call of an op from Python has paid for itself.
LEAST_CHUNKS = 1024
# Value heads of a key head: kernels have them one after the other in their code.
MOST_PER_KEY = 4


def serve(call: Any, chunk: int, packed: bool) -> bool:
    """Whether the kernels take a call (`cuda_triton.Call` or `_backward_call.Call`)."""
    return (
        not missing
        and on_hopper(call.v.device)
        and not (call.wide or call.per_channel or packed)
        and (chunk, call.K, call.V) == (CHUNK, CHANNELS, CHANNELS)
        and call.heads <= call.key_heads * MOST_PER_KEY
        and not statically_known_true(call.batch * call.chunks * call.heads < LEAST_CHUNKS)
    )


def or_in_triton(name: str, in_gluon: Callable[[], Made], in_triton: Callable[[], Made]) -> Made:
    """What `in_gluon` makes for the op `name`. Where this Triton has not compiled it once, which is said, `in_triton`
    serves, and all ops from then on."""
    global missing
    if not missing:
        try:
            return in_gluon()
        except TritonError as error:
            words = " ".join(str(error).split())
            missing = f"Triton {triton.__version__} did not compile it: {words[:200]}"
            log.logger.warning("%s: %s; Triton's own kernels serve", name, missing)
    return in_triton()


def tokens(t: Tensor, lanes: int) -> Any:
    """Of t [b, tokens, heads, channels] by tiles of a chunk's rows and so many channels: heads lie side by side. TMA
    wants them so, and rows that begin at multiples of 16 bytes; what is not is copied."""
    batch, count, heads, width = t.shape
    steps = [t.stride(0) if batch > 1 else count * t.stride(1), t.stride(1)]
    side_by_side = t.stride(3) == 1 and (heads == 1 or t.stride(2) == width)
    if not side_by_side or t.data_ptr() % 16 or any(step * t.element_size() % 16 for step in steps):
        t, steps = t.clone(memory_format=torch.contiguous_format), [count * heads * width, heads * width]
    return _descriptor(t, [batch, count, heads * width], [*steps, 1], [1, CHUNK, lanes])


def rows(t: Tensor, count: int, lanes: int) -> Any:
    """Of t, contiguous, as rows of its last dimension, by tiles of so many rows and channels."""
    width = t.shape[-1]
    return _descriptor(t, [t.numel() // width, width], [width, 1], [count, lanes])


def _descriptor(t: Tensor, shape: list[int], steps: list[int], tile: list[int]) -> Any:
    numbers = float32 if t.dtype == torch.float32 else bfloat16
    return TensorDescriptor(t, shape, steps, tile, NVMMASharedLayout.get_default_for(tile, numbers))
