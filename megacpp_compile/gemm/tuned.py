"""`megacpp::tuned_mm` and `tuned_scaled_mm`: matrix products by the fastest of cuBLASLt's own candidates.

Inductor hands a product to `torch.mm`, which takes the first kernel cuBLASLt's heuristic names. On an H200 a later one
is 5 to 15 % faster for many products that a linear's forward and its input's gradient make; for the gradients of
weights, which sum over tokens, the first is as good as any. `TuneProducts` tries the large products of a partitioned
graph, behind Inductor's own patterns, and puts these ops where a candidate gains more than a call from Python costs.
Bits are `torch.mm`'s: see `cublaslt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.gemm import cublaslt
from megacpp_compile.graph_edit import value
from megacpp_compile.graph_pass import GraphPass

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

# FLOPs from which a product is looked at (0.14 ms on an H200), and up to which trying candidates stays a small part of
# a first step.
MIN_FLOPS, MAX_FLOPS = 1e11, 3e12
# A short contraction with a large result, as MLA's latents make them, is misjudged most: lanes, and bytes of a result.
SHORT, LARGE_BYTES = 1024, 16 << 20


@torch.library.custom_op("megacpp::tuned_mm", mutates_args=())
def tuned_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` by the fastest of cuBLASLt's kernels. a: [m, k]; b: [k, n]; half precision, else `torch.mm` serves."""
    return cublaslt.mm(a, b)


@tuned_mm.register_fake
def _(a, b):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.custom_op("megacpp::tuned_scaled_mm", mutates_args=())
def tuned_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`(a * a_scale) @ (b * b_scale)` of fp8 payloads [m, k], k adjacent, and [k, n], k adjacent; scales: one float32
    number each; in `dtype`, half precision. fast: summed in the tensor cores' own 22 bits."""
    return cublaslt.scaled_mm(a, b, a_scale, b_scale, dtype, fast)


@tuned_scaled_mm.register_fake
def _(a, b, a_scale, b_scale, dtype, fast):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


class TuneProducts(GraphPass):
    """Large products of a partitioned graph for CUDA become these ops. Inductor's `max_autotune` has its own choice."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def run(self, graph: fx.Graph) -> None:
        if _has_its_own():
            return
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            if _takes(node):
                _become(node, torch.ops.megacpp.tuned_mm.default, node.args)
        for node in graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
            if (args := _scaled(node)) and _takes(node, args[-1]):
                _become(node, torch.ops.megacpp.tuned_scaled_mm.default, args)

    def key(self) -> tuple[Any, ...]:
        return ()

    def __reduce__(self) -> Any:
        return TuneProducts, (self.before,)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in a lowering: `tuned_mm` at once where that is worth it, which Inductor then joins with no sum."""
    half = a.dtype in _HALF and a.dtype == b.dtype
    if half and not _has_its_own() and _worth(a, b) and cublaslt.gains(a, b, a.dtype):
        return torch.ops.megacpp.tuned_mm(a, b)
    return a @ b


def _has_its_own() -> bool:
    """Whether Inductor is told to choose by measurement itself."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def _worth(a: Tensor, b: Tensor) -> bool:
    """Whether a candidate may be worth its call, so that it is worth trying."""
    m, k, n = *a.shape, b.shape[1]
    if a.device.type != "cuda" or not all(isinstance(size, int) for size in (m, k, n)) or a.stride(1) != 1:
        return False
    return (k <= SHORT and m * n * 2 >= LARGE_BYTES) or MIN_FLOPS <= 2 * m * k * n <= MAX_FLOPS


def _takes(node: Node, fast: bool = False) -> bool:
    """Whether a product's result is half precision, and a candidate gains. What is concatenated stays: Inductor has it
    written in place."""
    (a, b), dtype = map(value, node.args[:2]), value(node).dtype
    concatenated = any(user.target is aten.cat.default for user in node.users)
    return dtype in _HALF and not concatenated and _worth(a, b) and cublaslt.gains(a, b, dtype, fast)


def _become(node: Node, op: Any, args: Sequence[Any]) -> None:
    node.target, node.args, node.kwargs = op, tuple(args), {}
    # By these Inductor keeps the operands' layouts as the graph has them; it reads them with the op's own schema.
    node.meta["eager_input_vals"] = tuple(fx.map_arg(list(args), value)), {}


def _scaled(node: Node) -> Sequence[Any] | None:
    """`tuned_scaled_mm`'s arguments for a product of payloads with a scale each, or None."""
    names = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    whole = all(value(given[name]).numel() == 1 for name in ("scale_a", "scale_b"))
    if not whole or given.get("bias") is not None or given.get("scale_result") is not None:
        return None
    return *(given[name] for name in names[:4]), value(node).dtype, bool(given.get("use_fast_accum", False))
