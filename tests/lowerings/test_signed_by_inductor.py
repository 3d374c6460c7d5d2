"""Kernels that take floats compile as Inductor signs them: in 64 bits, where a launch by hand gives 32 (torch 2.11 to
2.14, pytorch#190340). Needs no GPU: Triton makes its IR anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from megacpp_compile.lowerings._kernels.trace_options import tracing

from .agreement import interpreted, lowerings, module_of, why_not
from .cases import CASES

triton = pytest.importorskip("triton")

pytestmark = [pytest.mark.skipif(interpreted(), reason="Triton's interpreter takes the place of its compiler"),
              pytest.mark.usefixtures("hopper")]

OPS = [(folder, name) for _, folder, name, lowering in lowerings("cuda") if lowering == "cuda_triton"]
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
         torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.bool: "i1", torch.float64: "fp64",
         torch.float16: "fp16"}  # fmt: skip


DELTA = "gated_delta_rule_"
WITH_FLOATS = {
    "attention": {"attention_forward"},
    "attention_backward": {"attention_query_grad", "attention_keys_grad", "attention_bias_grad"},
    "gated_delta_rule": {"delta_small_decay_chunks", "delta_prepare", "delta_prepare_channels", "delta_walk"},
    "gated_delta_rule_backward": {
        "delta_small_decay_chunks",
        *(DELTA + kernel
          for kernel in ("prepare", "reverse_walk", "query_grad", "prepare_channels", "query_grad_channels",
                         "read_grad_channels", "key_grad_channels", "query_grad_small_decay", "grads_small_decay")),
    },
    "gated_linear_attention": {"delta_small_decay_chunks", "gla_walk", "gla_output"},
    "gated_linear_attention_backward": {
        "delta_small_decay_chunks", "gla_walk", "gla_query_gradients", "gla_key_gradients", DELTA + "grads_small_decay"
    },
    "compressed_linear": {"random_signs"},
    "compressed_linear_backward": {"random_signs"},
    "gated_rms_norm": {"gated_rms_norm_rows"},
    "hyper_connection": {"maps_of_logits"},
    "hyper_connection_backward": {"maps_backward"},
    "index_scores": {"index_scores_tiles"},
    "index_scores_backward": {"index_scores_of_keys", "index_scores_of_queries"},
    "mla_decode": {"mla_decode_rows", "mla_decode_codes"},
    "sparse_mla": {"sparse_mla_forward"},
    "sparse_mla_backward": {"sparse_mla_query_grad", "sparse_mla_rows_grad"},
}  # fmt: skip


def launches(folder: str, name: str, rand: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The kernels that an op's cases launch, with their arguments: fake tensors and numbers."""
    module = module_of(folder, "cuda_triton")
    for make in CASES[name].values():
        args = make(rand, torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args = tree_map_only(Tensor, mode.from_tensor, args)
            if why_not(module, name, args) is not None:
                continue
            tensors = [arg for arg in args if isinstance(arg, Tensor)]

            def call(*tensors, args=args):
                given = iter(tensors)
                return getattr(module, name)(*[next(given) if isinstance(a, Tensor) else a for a in args])

            # A kernel without floats, which is launched by hand.
            with tracing():
                graph = make_fx(call)(*tensors).graph
        for node in graph.nodes:
            if "kernel_idx" in node.kwargs:
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                kernel = kernel if isinstance(kernel, triton.JITFunction) else kernel.fn
                given = {k: getattr(arg, "meta", {"val": arg})["val"] for k, arg in node.kwargs["kwargs"].items()}
                yield kernel, given | kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])


def signed(kernel: Any, given: dict[str, Any]) -> tuple[dict[str, str], dict[tuple[int, ...], Any]]:
    signature, constants = {}, {}
    for i, (param, arg) in enumerate((p, given[p.name]) for p in kernel.params):
        if param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", arg
        elif isinstance(arg, Tensor):
            signature[param.name] = "*" + TYPES[arg.dtype]
        else:
            signature[param.name] = "fp64" if isinstance(arg, float) else "i32"
    return signature, constants


def build(kernel: Any, given: dict[str, Any]) -> str:
    """Triton's IR of a kernel."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    source, context, target = ASTSource(kernel, *signed(kernel, given)), ir.context(), GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": 4})
    made = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(target, options, *made, context))


@pytest.mark.end_to_end
@pytest.mark.rare(*({name for _, name in OPS} - {"gated_rms_norm", "mla_decode", "sparse_mla"}))
@pytest.mark.parametrize(("folder", "case"), OPS, ids=[name for _, name in OPS])
def test_kernels_with_floats(rand, folder, case):
    built = set()
    for kernel, given in launches(folder, case, rand):
        constants = tuple(given[p.name] for p in kernel.params if p.is_constexpr)
        if any(isinstance(arg, float) for arg in given.values()) and (kernel, constants) not in built:
            built.add((kernel, constants))
            tiles = [line for line in build(kernel, given).splitlines() if "xf64" in line]
            # Asked to be WIDE, some sum in float64.
            assert given.get("WIDE") or not tiles, f"{kernel.__name__} computes in float64: {tiles[0].strip()}"
    assert {kernel.__name__ for kernel, _ in built} == WITH_FLOATS.get(case, set())
