"""What the delta rule's kernels in Gluon take, and how they are handed their operands.

`_walks`, `_mild_chunks` and `_behind_prepare` launch them, by ops of their own (`_hopper_ops`), and fall back to
Triton's kernels where this release of Triton does not compile them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from triton.errors import TritonError

from megacpp_compile.lowerings._kernels.gluon_launch import Tile, tile_layout
from megacpp_compile.report import log
from megacpp_compile.targets.chips import on_hopper

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor  # launches take it

    from megacpp_compile.lowerings.gated_delta_rule._gluon_channel_grads import delta_channel_grads
    from megacpp_compile.lowerings.gated_delta_rule._gluon_key_grad import delta_key_grad
    from megacpp_compile.lowerings.gated_delta_rule._gluon_mild_chunks import delta_mild_chunks_hopper
    from megacpp_compile.lowerings.gated_delta_rule._gluon_query_grad import PARTS, delta_query_grad
    from megacpp_compile.lowerings.gated_delta_rule._gluon_reverse_walk import delta_reverse_walk
    from megacpp_compile.lowerings.gated_delta_rule._gluon_states import delta_states
    from megacpp_compile.lowerings.gated_delta_rule._gluon_walk import delta_walk

    missing = ""
except (ImportError, AttributeError) as error:  # Gluon is experimental: what it has differs between releases
    missing = f"Triton {triton.__version__} has not all of Gluon that it takes: {error}"

__all__ = [
    "PARTS",
    "delta_channel_grads",
    "delta_key_grad",
    "delta_mild_chunks_hopper",
    "delta_query_grad",
    "delta_reverse_walk",
    "delta_states",
    "delta_walk",
]

Made = TypeVar("Made")

# What gates a channel are given in.
GATES = (torch.float32, torch.bfloat16)
# Tokens of a chunk, and channels of keys and of values.
CHUNK, CHANNELS = 64, 128
# Chunks of all heads, 8192 tokens of 32. Ops from Python take 1.5 ms of the host for a step, forward and backward, and
# Inductor's launches half: with fewer, a layer's kernels may be through before.
LEAST_CHUNKS = 4096
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
    """Whether the kernel that looks for mild chunks takes these, bfloat16 without documents: `count` of all heads."""
    return g.dtype in GATES and _fit(g.device, chunk, {g.shape[3]}, count)


def _fit(device: torch.device, chunk: int, sizes: set[int], count: Any) -> bool:
    few = statically_known_true(count < LEAST_CHUNKS)
    return not (missing or few) and on_hopper(device) and chunk == CHUNK and sizes == {CHANNELS}


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


@functools.cache
def _beside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def side_by_side(device: torch.device, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Launches both, `first` before `second`, which may run beside it. What is launched afterwards waits for both."""
    if device.type != "cuda":
        first()
        second()
        return
    here, there = torch.cuda.current_stream(device), _beside(device)
    there.wait_stream(here)
    try:
        first()
        with torch.cuda.stream(there):
            second()
    finally:
        here.wait_stream(there)


def tokens(t: Tensor, lanes: int) -> Tile:
    """Of t [b, tokens, heads, channels] by tiles of a chunk's rows and so many channels: heads lie side by side. TMA
    wants them so, and rows that begin at multiples of 16 bytes; what is not is copied."""
    batch, count, heads, width = t.shape
    steps = [t.stride(0) if batch > 1 else count * t.stride(1), t.stride(1)]
    adjacent = t.stride(3) == 1 and (heads == 1 or t.stride(2) == width)
    if not adjacent or t.data_ptr() % 16 or any(step * t.element_size() % 16 for step in steps):
        t, steps = t.clone(memory_format=torch.contiguous_format), [count * heads * width, heads * width]
    return _descriptor(t, [batch, count, heads * width], [*steps, 1], [1, CHUNK, lanes])


def rows(t: Tensor, count: int, lanes: int) -> Tile:
    """Of t, contiguous, as rows of its last dimension, by tiles of so many rows and channels."""
    width = t.shape[-1]
    return _descriptor(t, [t.numel() // width, width], [width, 1], [count, lanes])


def _descriptor(t: Tensor, shape: list[int], steps: list[int], tile: list[int]) -> Tile:
    return Tile(t, shape, steps, tile, tile_layout(tuple(tile), t.dtype))
