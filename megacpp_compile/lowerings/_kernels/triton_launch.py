"""Launching Triton kernels from lowerings: traceable for Inductor, direct in eager and under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import wrap_triton

from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.trace_options import measuring, traced

# Choices that are the compiler's, not arguments of the kernel.
LAUNCH = ("num_warps", "num_stages")
# Blocks a launch can have along a dimension other than the first.
MOST_BLOCKS = 65535


class Kernel:
    """A jitted kernel with a static choice of block sizes and, when autotuning, the choices to measure.

    In a compiled graph it is Inductor that measures, at a kernel's first run: once for each kernel it generates, so
    once for all lengths of a dynamic dimension. It writes the choice beside the kernel's code in its cache directory,
    where other processes find it (`torch._inductor.config.autotune_local_cache`). A launch outside a graph is Triton's
    to tune: per `key` (head sizes and counts), and in this process only unless TRITON_CACHE_AUTOTUNING=1.

    quick: it is launched outside of graphs, too, within ops of kernels that Inductor does not take (`gluon_launch`).
    """

    def __init__(
        self, fn: Any, choices: Sequence[dict[str, int]], key: Sequence[str], restore: Sequence[str] = (),
        quick: bool = False,
    ) -> None:  # fmt: skip
        configs = [
            triton.Config(
                {k: v for k, v in c.items() if k not in LAUNCH}, **{k: v for k, v in c.items() if k in LAUNCH}
            )
            for c in choices
        ]
        self.quick = quick
        self.fn, self.tuned = fn, triton.autotune(configs, key=list(key), restore_value=list(restore))(fn)

    def __call__(self, grid: Callable[[dict[str, Any]], tuple[Any, ...]], static: dict[str, int], **args: Any) -> None:
        compiled = isinstance(self.fn, triton.JITFunction)
        if self.quick and compiled and not (measuring() or traced()):
            launch(self.fn, grid({**args, **static}), **args, **static)
            return
        kernel, sizes = (self.tuned, {}) if measuring() and compiled else (self.fn, static)
        (wrap_triton(kernel) if traced() else kernel)[grid](**args, **sizes)


def unfit(operands: Sequence[Tensor | None], sizes: tuple[Any, ...]) -> str | None:
    """Why kernels that multiply in tensor cores take no such operands, of heads of such sizes, or None."""
    given = [t for t in operands if t is not None]
    if any(t.dtype == torch.float64 for t in given):
        return "float64: tensor cores multiply in float32 at most"
    if any(not t.dtype.is_floating_point or t.dtype.itemsize < 2 for t in given):
        return "an operand is neither float32, float16 nor bfloat16"
    if not all(isinstance(size, int) for size in sizes):
        return f"symbolic heads or head sizes: {sizes}"
    return None


def too_large(needed: int, device: torch.device) -> str | None:
    """Why the GPU has no room for a program with so many bytes of shared memory, or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    there = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", needed)
    return f"{needed >> 10} KiB of shared memory, where this GPU has {there >> 10}" if needed > there else None


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least `n`, and 1 for 0."""
    return 1 << (n - 1).bit_length() if n else 1


def is_wide(*dtypes: torch.dtype) -> bool:
    """Whether a kernel has to compute in float64."""
    return torch.float64 in dtypes


def accumulator(dtype: torch.dtype) -> Any:
    """What GEMMs of `dtype` are summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU."""
    return bool(triton.knobs.runtime.interpret)


def multiply(dtype: torch.dtype) -> dict[str, Any]:
    """How a kernel multiplies operands of `dtype`: the constants `PRECISION` and `INTERPRETED`."""
    exact = dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    return {"PRECISION": "tf32" if dtype == torch.float32 and not exact else "ieee",
            "INTERPRETED": interpreted()}  # fmt: skip


def last_dim_contiguous(t: Tensor) -> Tensor:
    return t if statically_known_true(t.stride(-1) == 1) else t.contiguous()


def in_sixteens(t: Tensor) -> Tensor:
    """`t`, or a copy, with contiguous channels, in rows that begin at multiples of 16 numbers: so Triton tells aligned
    ones. Of others Triton 3.6 compiles loops over chunks that read and write beyond their tiles (of 64 x 128, in three
    stages)."""
    t = last_dim_contiguous(t)
    steps = strides("t", t, "012"[: t.dim() - 1]).values()
    whole = all(statically_known_true(step % 16 == 0) for step in (t.storage_offset() * t.itemsize, *steps))
    return t if whole or t.shape[-1] % 16 else t.clone(memory_format=torch.contiguous_format)


def strides(name: str, t: Tensor, dims: str) -> dict[str, Any]:
    """Arguments `name_d`, the strides of `t`'s first dimensions. That of a single row moves nothing, and is 0: whatever
    it is otherwise says nothing about how rows are aligned."""
    steps = (0 if statically_known_true(t.shape[i] == 1) else t.stride(i) for i in range(len(dims)))
    return {f"{name}_{dim}": step for dim, step in zip(dims, steps, strict=True)}
