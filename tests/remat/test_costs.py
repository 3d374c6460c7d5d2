"""The cost of recomputing: a GEMM in float8 counts as the 16-bit FLOPs that take as long."""

from __future__ import annotations

import torch
from torch import fx

from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.remat.costs import flops

assert semantic_ops()


def call(op, *args):
    """A node of `op`, whose tensor arguments are placeholders."""
    graph = fx.Graph()

    def node(a):
        if not isinstance(a, torch.Tensor):
            return a
        held = graph.placeholder("held")
        held.meta["val"] = a
        return held

    nodes = ([node(i) for i in a] if isinstance(a, list) else node(a) for a in args)
    return graph.call_function(op.default, tuple(nodes))


def test_experts_in_float8():
    tokens, d, n, experts, chosen = 64, 16, 24, 4, 2
    x, indices = torch.empty(tokens, d, device="meta"), torch.empty(tokens, chosen, dtype=torch.long, device="meta")
    up, down = [torch.empty(n, d, device="meta")] * experts, [torch.empty(d, n, device="meta")] * experts
    common = x, indices, torch.empty(tokens, chosen, device="meta"), up, up, down, "silu", "out_in", torch.bfloat16, True
    wide, fp8 = (flops(call(torch.ops.megacpp.moe, *common, precision)) for precision in ("", "fp8_current"))
    assert wide == flops(call(torch.ops.megacpp.moe, *common)) == 2 * tokens * chosen * 3 * n * d
    assert fp8 == 0.8 * wide


def test_linears_in_float8():
    x, w = torch.empty(64, 32, device="meta"), torch.empty(48, 32, device="meta")
    scale = torch.empty((), device="meta")
    node = call(torch.ops.megacpp.fp8_linear, x, w, x, scale, w, scale, None, "e4m3", torch.bfloat16)
    assert flops(node) == 64 * 48 * 32
