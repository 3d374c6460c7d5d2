"""`megacpp::tuned_mm`: GEMMs of half precision by the fastest of cuBLASLt's own candidates.

Inductor hands a GEMM to `torch.mm`, which takes the first kernel cuBLASLt's heuristic names. On an H200 a later one
is 5 to 15 % faster for many GEMMs of a linear's forward and of its input's gradient; for the gradients of
weights, which sum over tokens, the first is as good as any. `BeginSearch` has the large GEMMs of a joint graph tried in
a thread, while it is partitioned and lowered; `AutotuneGemms` puts this op into the partitioned graph, after Inductor's
own patterns, where a candidate gains more than a call from Python costs.
Results are bit for bit those of `torch.mm`: see `cublaslt`.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.fx.materialize import operands_of
from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._gemm import cublaslt
from megacpp_compile.lowerings._op import kernel_op
from megacpp_compile.lowerings._traits import OpTraits, declare

# FLOPs from which a GEMM is looked at (0.14 ms on an H200), and up to which trying candidates stays a small part of
# a first step.
MIN_FLOPS, MAX_FLOPS = 1e11, 3e12
# cuBLASLt misjudges a short contraction with a large result most, as MLA's latents make them: k, and bytes of a result.
SHORT, LARGE_BYTES = 1024, 16 << 20


@kernel_op("megacpp::tuned_mm", ours=False)
def tuned_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` by the fastest of cuBLASLt's kernels. a: [m, k]; b: [k, n]; half precision, else `torch.mm` serves."""
    return cublaslt.mm(a, b)


@torch.library.register_fake("megacpp::tuned_mm")
def _(a, b):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]))


def _flops(a: Tensor, b: Tensor) -> float:
    return 2 * elements(a) * hint(b.shape[1])


declare({"megacpp::tuned_mm": OpTraits(gemm=True, flops=_flops)})


class _OverGemms(GraphPass):
    """A pass that does nothing under Inductor's `max_autotune`, which measures by itself."""

    def run(self, graph: fx.Graph) -> None:
        if not _has_its_own():
            for node in graph.find_nodes(op="call_function", target=aten.mm.default):
                self.see(node)

    def see(self, node: Node) -> None:
        raise NotImplementedError


class BeginSearch(_OverGemms):
    """Begins in a thread, on a graph that is not partitioned yet, the search that `AutotuneGemms` waits for."""

    def see(self, node: Node) -> None:
        if _worth(*map(value, node.args)):
            cublaslt.begin(*map(value, node.args))


class AutotuneGemms(_OverGemms):
    """Turns large `aten.mm` of a partitioned CUDA graph into `megacpp::tuned_mm` where a candidate gains."""

    def run(self, graph: fx.Graph) -> None:
        super().run(graph)
        operands_of(graph, lambda node: node.target is torch.ops.megacpp.tuned_mm.default)

    def see(self, node: Node) -> None:
        if _takes(node):
            node.target = torch.ops.megacpp.tuned_mm.default
            # By these Inductor keeps the operands' layouts as the graph has them.
            node.meta["eager_input_vals"] = tuple(fx.map_arg(list(node.args), value)), {}


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in a lowering; `tuned_mm` already where a candidate gains, so that Inductor fuses no addition into it."""
    if not _has_its_own() and _worth(a, b) and cublaslt.gains(a, b):
        return torch.ops.megacpp.tuned_mm(a, b)
    return a @ b


def _has_its_own() -> bool:
    """Whether Inductor's settings make it choose GEMM kernels by measurement."""
    from megacpp_compile._torch.inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def _worth(a: Tensor, b: Tensor) -> bool:
    """Whether candidates for `a @ b` are worth trying, by dtypes and sizes."""
    m, k, n = *a.shape, b.shape[1]
    if a.dtype not in cublaslt.DATA_TYPE or a.dtype != b.dtype:
        return False
    if a.device.type != "cuda" or not all(isinstance(size, int) for size in (m, k, n)) or a.stride(1) != 1:
        return False
    return (k <= SHORT and m * n * 2 >= LARGE_BYTES) or MIN_FLOPS <= 2 * m * k * n <= MAX_FLOPS


def _takes(node: Node) -> bool:
    """Whether a candidate gains for this `mm`. One that is concatenated stays: Inductor writes it in place."""
    a, b = map(value, node.args)
    concatenated = any(user.target is aten.cat.default for user in node.users)
    return not concatenated and _worth(a, b) and cublaslt.gains(a, b)
