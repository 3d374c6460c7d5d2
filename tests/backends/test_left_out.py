"""Results that nobody reads, which a lowering leaves out: a cast's payload in the orientation that a graph does not need."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.backends._lower import LowerSemanticOps
from megacpp_compile.config.options import Config
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings.fp8_linear import cuda_scaled_mm
from megacpp_compile.targets import CUDA
from tests.lowerings.gluon_kernels import needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("hopper")]


def cast(x, largest, turned=True):
    return torch.ops.megacpp.fp8_quantize_delayed(x, largest, "e4m3", turned)


def forward(x, w, largest, *, kept=False):
    """As a policy leaves it that has backward cast again: the linear names the columns, and its lowering reads none."""
    x8, columns, scale, seen = cast(x, largest)
    w8, _, w_scale, _ = cast(w, largest, False)
    operands = x, [w], x8, scale, w8, w_scale, []
    (y,) = torch.ops.megacpp.fp8_linear(*operands, "e4m3", torch.bfloat16, largest, scale, columns)
    return (y, *([columns] if kept else []), scale, w_scale, seen)


# Name -> (what casts, the (rows, columns) that its casts write in the order of the graph).
WRITTEN = {
    "both": (lambda x, w, largest: cast(x, largest), [(1, 1)]),
    "rows alone": (lambda x, w, largest: [t for i, t in enumerate(cast(x, largest)) if i != 1], [(1, 0)]),
    "columns alone": (lambda x, w, largest: cast(x, largest)[1:3], [(0, 1)]),
    "forward": (functools.partial(forward, kept=False), [(1, 0), (1, 0)]),
    "forward that keeps": (functools.partial(forward, kept=True), [(1, 1), (1, 0)]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_casts_write(monkeypatch, name):
    function, written = WRITTEN[name]
    for asked in ("no_float8", "no_linear"):
        monkeypatch.setattr(cuda_scaled_mm, asked, lambda *args: "")
    semantic_ops()
    with FakeTensorMode() as mode:
        x, w = (torch.empty(64, 32, device="cuda:0", dtype=torch.bfloat16) for _ in range(2))
        gm = make_fx(function)(x, w, torch.empty(16, device="cuda:0"))
    with tracing(TracingContext(mode)):
        LowerSemanticOps(CUDA, Config())(gm.graph)
    gm.graph.lint()
    made = [
        {**kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"]), **node.kwargs["kwargs"]}
        for node in gm.graph.nodes if node.target is triton_kernel_wrapper_functional
    ]  # fmt: skip
    assert [(of["ROWS"], of["TRANSPOSED"]) for of in made] == written
