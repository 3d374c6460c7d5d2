"""Kernels in graphs that Inductor compiles for a Hopper GPU, which need not be there: signatures, block sizes and launches
are as they are in a frame, where a launch by hand has others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from megacpp_compile.backends import _lower
from megacpp_compile.lowerings._kernels.chunk_grid import segments_bound
from megacpp_compile.targets import CUDA

from .agreement import interpreted, module_of
from .cases import CASES
from .hopper import inductor_for_hopper, on_hopper

pytest.importorskip("triton")
pytestmark = [pytest.mark.skipif(interpreted(), reason="Triton's interpreter takes the place of its compiler"),
              pytest.mark.skipif(torch.cuda.is_available(),
                                 reason="on a GPU test_hybrid_end_to_end compiles them, and runs them"),
              pytest.mark.usefixtures("hopper")]
RULE = "gated_delta_rule_"
KERNELS = {
    ("gated_delta_rule", "gate_a_head"): {"delta_prepare", "delta_walk"},
    ("gated_delta_rule", "gate_a_channel"): {
        "delta_small_decay_chunks", "delta_large_decay_chunks", "delta_prepare", "delta_prepare_channels", "delta_walk"
    },
    ("gated_delta_rule_backward", "gate_a_head"): {
        RULE + name for name in ("prepare", "states", "reverse_walk", "query_grad", "value_grad", "key_grad")
    },
    ("gated_delta_rule_backward", "gate_a_channel"): {
        RULE + name
        for name in ("prepare", "prepare_channels", "states", "reverse_walk", "query_grad_channels", "value_grad",
                     "read_grad_channels", "key_grad_channels", "query_grad_small_decay", "key_grad_small_decay", "grads_small_decay")
    },
    ("gated_linear_attention", "gate_a_head"): {"gla_decay", "gla_join", "gla_output"},
    ("gated_linear_attention", "gate_a_channel"): {"delta_small_decay_chunks", "gla_rows", "gla_join", "gla_output"},
    ("gated_linear_attention_backward", "two_segments"): {
        "gla_decay", "gla_walk", "gla_join", "gla_query_gradients", "gla_key_gradients"
    },
    ("gated_linear_attention_backward", "gate_a_channel"): {
        "delta_small_decay_chunks", "gla_rows", "gla_walk", "gla_join", "gla_query_gradients", "gla_key_gradients",
        "gated_delta_rule_grads_small_decay", "gla_rows_gradient"
    },
    ("attention", "dropout"): {"attention_forward"},
    ("attention", "dropout_of_nearly_all_at_once"): {"attention_forward"},
    ("attention", "prefix_beside_all"): {"attention_forward"},
    ("attention_backward", "prefix_and_a_bias"): {
        "attention_keys_grad", "attention_query_grad", "attention_bias_grad"
    },
    ("attention_backward", "dropout"): {"attention_keys_grad", "attention_query_grad"},
    ("attention_backward", "dropout_and_a_bias"): {
        "attention_keys_grad", "attention_query_grad", "attention_bias_grad"
    },
    ("hyper_connection", "sinkhorn"): {"logits_of_streams", "maps_of_logits"},
    ("hyper_connection_backward", "twenty_steps"): {"maps_backward", "gradients_of_streams"},
    ("hyper_connection_backward", "logarithms"): {"maps_backward", "gradients_of_streams"},
    ("stream_update", "four_streams"): {"update_streams"},
    ("stream_update_backward", "four_streams"): {"update_streams_backward"},
    ("index_scores", "several_tiles"): {"index_scores_tiles"},
    ("index_scores_backward", "several_tiles"): {"index_scores_of_queries", "index_scores_of_keys"},
    ("selective_scan", "plain"): {"selective_ends", "selective_carry", "selective_rows"},
    ("selective_scan_backward", "plain"): {"selective_ends", "selective_carry", "selective_gradients"},
    ("ssd_scan", "plain"): {"ssd_decay", "ssd_walk"},
    ("ssd_scan", "documents"): {"ssd_decay", "ssd_cuts", "ssd_walk"},
}  # fmt: skip


def compile_for_hopper(name, operands):
    """The names of the kernels that were compiled, and of ops in the graph. No kernel is taken to write an operand, which
    would be copied: where sizes are symbolic, torch 2.11 stops there."""
    tensors = [arg for arg in operands if isinstance(arg, Tensor)]
    places = iter(range(len(tensors)))
    args = [_lower._Hole(next(places)) if isinstance(arg, Tensor) else arg for arg in operands]
    lowering = getattr(module_of(name.removesuffix("_backward"), "cuda_triton"), name)

    def traced(*args):
        return tuple(made) if isinstance(made := lowering(*args), (tuple, list)) else (made,)

    with inductor_for_hopper() as compiled:
        gm = _lower._trace(traced, args, tensors, CUDA)
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        kernels = [node.kwargs for node in nodes if node.target is triton_kernel_wrapper_functional]
        written = [given["kwargs"][name] for given in kernels for name in given["tensors_to_clone"]]
        assert kernels and not [node.name for node in written if node.op == "placeholder"]
        compile_fx_inner(gm, tensors)
    return compiled, [str(node.target) for node in nodes]


@pytest.mark.end_to_end
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "label"), KERNELS, ids=lambda part: part)
def test_a_kernel(rand, name, label):
    compiled, _ = compile_for_hopper(name, on_hopper(CASES[name][label](rand, torch.bfloat16)))
    assert KERNELS[name, label] <= set(compiled), compiled


def symbolic_tokens():
    """What fakes are made by, a number of tokens of theirs, and what makes them."""
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])

    def operand(*shape, dtype=torch.bfloat16):
        with fakes:
            return torch.empty(shape, dtype=dtype, device="cuda:0")

    return fakes, fakes.from_tensor(torch.empty(8192), symbolic_context=context).shape[0], operand


IN_GLUON = {("gated_delta_rule", "gate_a_head"): ["walk"], ("gated_delta_rule", "gate_a_channel"): ["small_decay_chunks"],
            ("gated_delta_rule_backward", "gate_a_head"): ["backward"],
            ("gated_delta_rule_backward", "gate_a_channel"): ["small_decay_chunks", "backward_channels"]}


@pytest.mark.end_to_end
@pytest.mark.sampled(8)
@pytest.mark.parametrize("gluon", [True, False], ids=["in_gluon", "in_triton"])
@pytest.mark.parametrize(("name", "label"), IN_GLUON)
def test_a_recurrence_over_symbolic_tokens(monkeypatch, name, label, gluon):
    """Of a size at which Hopper has kernels in Gluon, in ops of their own."""
    from megacpp_compile.lowerings.gated_delta_rule import _hopper

    if gluon and _hopper.kernels.missing:
        pytest.skip(_hopper.kernels.missing)
    monkeypatch.setattr("megacpp_compile.lowerings._kernels.hopper.on_hopper", lambda device: gluon)
    fakes, tokens, operand = symbolic_tokens()
    q, k, v = (operand(1, tokens, heads, 128) for heads in (16, 16, 32))
    gates = operand(1, tokens, 32, *([128] if label == "gate_a_channel" else []), dtype=torch.float32)
    given = [q, k, v, gates, operand(1, tokens, 32, dtype=torch.float32), None, None]
    if name.endswith("_backward"):
        states = operand(1, segments_bound(tokens, 64, None), 32, 128, 128, dtype=torch.float32)
        args = [v, None, *given, states, operand(1, tokens, 32, 64), 0.1, 1e-6, 64]
    else:
        args = [*given, 0.1, 1e-6, 64, torch.bfloat16]
    with tracing(TracingContext(fakes)):
        compiled, ops = compile_for_hopper(name, args)
    in_gluon = [f"megacpp_delta.{op}.default" for op in IN_GLUON[name, label]]
    assert [op for op in ops if "megacpp_delta" in op] == (in_gluon if gluon else [])
    assert (KERNELS[name, label] <= set(compiled)) != gluon, compiled


@pytest.mark.end_to_end
def test_linear_attention_over_symbolic_tokens():
    name = "gated_linear_attention_backward"
    fakes, tokens, operand = symbolic_tokens()
    q, k, v = (operand(1, tokens, heads, 128) for heads in (16, 16, 32))
    g = operand(1, tokens, 32, dtype=torch.float32)
    states = operand(1, segments_bound(tokens, 64, None), 32, 128, 128, dtype=torch.float32)
    with tracing(TracingContext(fakes)):
        compiled, _ = compile_for_hopper(name, [v, None, q, k, v, g, None, None, states, 0.1, 64])
    assert KERNELS[name, "two_segments"] <= set(compiled), compiled


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
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
