"""GEMMs over one channel as multiplications, which Inductor fuses with what reads them.

Models make their tables of rotations as `inv_freq[:, None] @ positions[None, :]`. cuBLAS writes such a product to
memory with the frequencies as rows; the kernel of sines and cosines then reads it transposed, for which Inductor
compiles six tilings, 0.7 s each: 4.4 s of Gemma's first step beside an H200, the longest of all kernels. In a graph
that is not divided yet, the partitioner, too, sees that backward need not be handed the product.

A product of two numbers is rounded once either way, so results are those of a GEMM in the operands' own precision;
where TF32 is allowed for float32 they are closer to exact than cuBLAS'.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.inductor_pass import GraphPass


class MultiplyOuterProducts(GraphPass):
    """`multiply`, on a graph that is not divided into forward and backward yet."""

    def run(self, graph: fx.Graph) -> None:
        multiply(graph)


def multiply(graph: fx.Graph) -> int:
    """Replace each `mm` and `bmm` over one channel by `mul`; how many there were."""
    gemms = [n for op in (aten.mm.default, aten.bmm.default) for n in graph.find_nodes(op="call_function", target=op)]
    outer = [node for node in gemms if not node.kwargs and _is_outer(node)]
    for node in outer:
        build = Builder(graph, value(node).fake_mode, node, node)
        product = build(aten.mul.Tensor, *node.args)
        if value(product).stride() != value(node).stride():  # as views behind a GEMM need it
            product = build(aten.clone.default, product, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    return len(outer)


def _is_outer(node: Node) -> bool:
    channels = value(node.args[0]).shape[-1]
    return isinstance(channels, int) and channels == 1
