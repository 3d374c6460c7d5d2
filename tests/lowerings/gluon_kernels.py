"""What tests of kernels in Gluon share: compiling one for Hopper, which needs no GPU, and telling which were launched."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from .agreement import interpreted

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_triton = pytest.mark.skipif(interpreted() or importlib.util.find_spec("triton") is None,
                                  reason="the kernels are Triton's compiler's to compile")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="the kernels are of Hopper's instructions")
# So much shared memory leaves room for a second program on a multiprocessor, of 228 KiB less 1 KiB a program.
HALF = 113 * 1024
# Where `GluonKernels` asks for the chip, and for how many chunks there are to be.
ON_HOPPER = "megacpp_compile.lowerings._kernels.hopper.on_hopper"
LEAST_CHUNKS = "megacpp_compile.lowerings._kernels.hopper.LEAST_CHUNKS"


def tile(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> str:
    """The type of an argument that describes tiles of that shape."""
    from megacpp_compile.lowerings._kernels.gluon_launch import tile_layout

    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}[dtype]
    return f"tensordesc<{short}{list(shape)},{tile_layout(tuple(shape), dtype)!r}>"


def assemble(kernel: Any, types: dict[str, str], constants: dict[str, Any], whole: Iterable[str] | None = None,
             plain: bool = False, **options: int) -> Any:  # fmt: skip
    """What the kernel compiles to for sm_90, assemble, which needs no GPU. Arguments of no type are int32. whole: those
    that are multiples of 16, or begin there; pointers to float32 without. plain: it is Triton's own, not in Gluon."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n in names if (signature[n] == "*fp32" if whole is None else n in whole)]
    given = {(names.index(n),): v for n, v in constants.items() if n in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = (ASTSource if plain else GluonASTSource)(kernel, signature, given, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    assert made.asm["cubin"]
    return made


def lowering(folder: str) -> Any:
    """The op's lowering in Gluon, where this Triton has one."""
    module = importlib.import_module(f"megacpp_compile.lowerings.{folder}.cuda_gluon")
    if module.missing:
        pytest.skip(module.missing)
    return module


def hopper(folder: str) -> Any:
    """The op's kernels in Gluon, of an op whose lowering is Triton's."""
    module = importlib.import_module(f"megacpp_compile.lowerings.{folder}._hopper")
    if module.kernels.missing:
        pytest.skip(module.kernels.missing)
    return module


def on_hopper(test: Any) -> Any:
    return pytest.mark.cuda(needs_hopper(test))


def told(kernel: Any, names: list[str]) -> Any:
    """The kernel, which puts its name into `names` when it is launched."""

    class Told:
        def __getitem__(self, grid: Any) -> Any:
            names.append(kernel.fn.__name__)
            return kernel[grid]

    return Told()


def replays(made: Callable[[], list[Tensor]]) -> None:
    """Captured in a CUDA graph, all that `made` launches gives equal bits, time after time: what is launched behind two
    streams waits for both."""
    want = made()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = made()
    for _ in range(20):
        for t in got:
            t.zero_()
        graph.replay()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
