"""What ops with kernels in Gluon share: whether those serve, what else does, and how they are handed their operands.

Gluon is experimental: what it has, and what it compiles, differs between releases of Triton.
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

from megacpp_compile.lowerings._kernels.gluon_launch import Tile, address, tile_layout
from megacpp_compile.lowerings._kernels.trace_options import ahead
from megacpp_compile.report import log
from megacpp_compile.targets.chips import on_hopper

Made = TypeVar("Made")

# Tokens of a chunk.
CHUNK = 64
# Chunks of all heads, 8192 tokens of 32. Ops from Python take 1.5 ms of the host for a step, forward and backward, and
# Inductor's launches half: with fewer, a layer's kernels may be through before.
LEAST_CHUNKS = 4096


class GluonKernels:
    """An op's kernels in Gluon. `missing`: why this Triton has them not, or nothing. least: of how many times as many
    chunks as LEAST_CHUNKS they serve."""

    def __init__(self, missing: str, least: int = 1) -> None:
        self.missing, self.least = missing, least

    def serve(self, device: torch.device, chunks: Any) -> bool:
        """Whether they take a call of so many chunks of all heads, which may be symbolic."""
        few = statically_known_true(chunks < self.least * LEAST_CHUNKS)
        return not (self.missing or few) and on_hopper(device)

    def or_in_triton(self, name: str, in_gluon: Callable[[], Made], in_triton: Callable[[], Made]) -> Made:
        """What `in_gluon` makes for the op `name`. Where this Triton has not compiled it once, which is said,
        `in_triton` serves, and all ops from then on."""
        if not self.missing:
            try:
                return in_gluon()
            except TritonError as error:
                words = " ".join(str(error).split())
                self.missing = f"Triton {triton.__version__} did not compile it: {words[:200]}"
                log.logger.warning("%s: %s; Triton's own kernels serve", name, self.missing)
        return in_triton()


def lacking(error: Exception) -> str:
    """Why there are no kernels in Gluon, from what importing them has raised."""
    return f"Triton {triton.__version__} has not all of Gluon that it takes: {error}"


@functools.cache
def _beside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def side_by_side(device: torch.device, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Launches both, `first` before `second`, which may run beside it. What is launched afterwards waits for both."""
    if device.type != "cuda" or ahead():
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


def tokens(t: Tensor, lanes: int, count: int = CHUNK) -> Tile:
    """Of t [b, tokens, heads, channels] by tiles of so many tokens and channels: heads lie side by side. TMA wants them
    so, and rows that begin at multiples of 16 bytes; what is not is copied."""
    batch, length, heads, width = t.shape
    steps = [t.stride(0) if batch > 1 else length * t.stride(1), t.stride(1)]
    adjacent = t.stride(3) == 1 and (heads == 1 or t.stride(2) == width)
    if not adjacent or address(t) % 16 or any(step * t.element_size() % 16 for step in steps):
        t, steps = t.clone(memory_format=torch.contiguous_format), [length * heads * width, heads * width]
    return _descriptor(t, [batch, length, heads * width], [*steps, 1], [1, count, lanes])


def rows(t: Tensor, count: int, lanes: int) -> Tile:
    """Of t, contiguous, as rows of its last dimension, by tiles of so many rows and channels."""
    width = t.shape[-1]
    return _descriptor(t, [t.numel() // width, width], [width, 1], [count, lanes])


def _descriptor(t: Tensor, shape: list[int], steps: list[int], tile: list[int]) -> Tile:
    return Tile(t, shape, steps, tile, tile_layout(tuple(tile), t.dtype))
