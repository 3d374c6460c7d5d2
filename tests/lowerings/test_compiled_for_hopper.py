"""Kernels in graphs that Inductor compiles for a Hopper GPU, which need not be there: signatures, block sizes and launches
are as they are in a frame, where a launch by hand has others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner

from megacpp_compile.backends import _lower
from megacpp_compile.targets import CUDA

from .agreement import interpreted, module_of
from .cases import CASES
from .hopper import inductor_for_hopper, on_hopper

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(interpreted(), reason="Triton's interpreter takes the place of its compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_delta_end_to_end compiles them, and runs them"),
    pytest.mark.usefixtures("hopper"),
]
RULE = "gated_delta_rule_"
KERNELS = {
    ("gated_delta_rule", "gate_a_head"): {"delta_prepare", "delta_walk"},
    ("gated_delta_rule", "gate_a_channel"): {"delta_mild_chunks", "delta_prepare", "delta_prepare_channels", "delta_walk"},
    ("gated_delta_rule_backward", "gate_a_head"): {
        RULE + name for name in ("prepare", "states", "reverse_walk", "query_grad", "value_grad", "key_grad")
    },
    ("gated_delta_rule_backward", "gate_a_channel"): {
        RULE + name
        for name in ("prepare", "prepare_channels", "states", "reverse_walk", "query_grad_channels", "value_grad",
                     "read_grad_channels", "key_grad_channels", "query_grad_mild", "key_grad_mild", "grads_mild")
    },
    ("ssd_scan", "plain"): {"ssd_decay", "ssd_walk"},
    ("ssd_scan", "documents"): {"ssd_decay", "ssd_cuts", "ssd_walk"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "label"), KERNELS, ids=lambda part: part)
def test_a_recurrence(rand, name, label):
    operands = on_hopper(CASES[name][label](rand, torch.bfloat16))
    tensors = [arg for arg in operands if isinstance(arg, Tensor)]
    places = iter(range(len(tensors)))
    args = [_lower._Hole(next(places)) if isinstance(arg, Tensor) else arg for arg in operands]
    lowering = getattr(module_of(name.removesuffix("_backward"), "cuda_triton"), name)
    with inductor_for_hopper() as compiled:
        compile_fx_inner(_lower._trace(lowering, args, tensors, CUDA), tensors)
    assert KERNELS[name, label] <= set(compiled), compiled


@pytest.mark.parametrize("drawn", [False, True], ids=["fixed", "drawn"])
def test_signs(rand, drawn):
    """With a seed of 63 bits, which is a number of the graph."""
    x, _, _, draw, rank, seed = CASES["compressed_linear"]["drawn"](rand, torch.bfloat16)
    tensors = on_hopper((x, draw) if drawn else (x,))
    signs = module_of("compressed_linear", "cuda_triton").signs

    def lowering(x: Tensor, draw: Tensor | None = None) -> tuple[Tensor]:
        return (signs(x.shape[-1], rank, draw, seed, x),)

    with inductor_for_hopper() as compiled:
        compile_fx_inner(_lower._trace(lowering, [_lower._Hole(i) for i in range(len(tensors))], tensors, CUDA), tensors)
    assert "random_signs" in compiled, compiled
