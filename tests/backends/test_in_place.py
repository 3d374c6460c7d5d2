"""Which memory a lowering may work in: what nobody needs any more, and that only."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.backends._lower import LowerSemanticOps
from megacpp_compile.config.options import Config
from megacpp_compile.fx.aliasing import overwritable
from megacpp_compile.lowerings.mla_rope_q import mla_rope_q
from megacpp_compile.lowerings.rope_qk import rope_qk
from megacpp_compile.targets import CUDA, TARGETS

B, S, H, D = 2, 3, 4, 8

triton_without_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="kernels are traced, not interpreted",
)


def asked(function: Callable[..., object], whose: str = "sum") -> bool:
    """Whether the operand of the one `neg` in `function(x + 1)`, or in `function(x)`, may be overwritten by it."""
    of = (lambda x: function(x + 1)) if whose == "sum" else function
    gm = make_fx(of, tracing_mode="fake")(torch.randn(4, 6))
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.neg.default)
    return overwritable(node.args[0], node)


neg, topk, unsafe_view = torch.neg, torch.ops.aten.topk, torch.ops.aten._unsafe_view
# What is done with a sum that nobody else has.
FREE = {
    "dead": lambda y: neg(y), "read before": lambda y: (total := y.sum(), neg(y) + total)[1],
    "view of what is dead": lambda y: neg(y.view(6, 4).t()),
    "result of a view read later only": lambda y: (other := y.t() * 2, neg(y), other * 3)[1:],
    "part of what is dead": lambda y: neg(y.split(2)[0]), "one of several results": lambda y: neg(topk(y, 2)[0]),
    "one of several results, another read later": lambda y: (found := topk(y, 2), neg(found[0]), found[1] * 2)[1:],
}
NEEDED = {
    "read later": lambda y: (neg(y), y * 2),
    "view read later": lambda y: (other := y.view(24), neg(y), other * 2)[1:],
    "base read later": lambda y: (neg(y.view(24)), y * 2),
    "another view of the base read later": lambda y: (a := y.view(24), b := y.t(), neg(a), b * 2)[2:],
    "returned": lambda y: (neg(y), y),
    "view returned": lambda y: (neg(y.view(24)), y.t()),
    # The parts' memory is apart, which is more than is looked at.
    "part beside one read later": lambda y: (parts := y.split(2), neg(parts[0]), parts[1] * 2)[1:],
    "part of what is read later": lambda y: (neg(y.split(2)[0]), y * 2),
    "whole with a part read later": lambda y: (parts := y.split(2), neg(y), parts[1] * 2)[1:],
    "unsafe view of what is read later": lambda y: (neg(unsafe_view(y, (24,))), y * 2),
}
INPUTS = {
    "input": lambda x: neg(x), "view of an input": lambda x: neg(x.view(24)),
    "part of an input": lambda x: neg(x.split(2)[0]),
}


@pytest.mark.parametrize("name", FREE)
def test_nobody_needs_it(name):
    assert asked(FREE[name])


@pytest.mark.parametrize("name", [*NEEDED, *INPUTS])
def test_somebody_needs_it(name):
    assert not asked(NEEDED[name]) if name in NEEDED else not asked(INPUTS[name], "input")


def test_no_tensor_at_all():
    gm = make_fx(FREE["dead"], tracing_mode="fake")(torch.randn(4, 6))
    assert not overwritable(None, next(iter(gm.graph.nodes)))
    assert not overwritable(2.0, next(iter(gm.graph.nodes)))


FLAGS = (D - 4, True, False, False, False, torch.float32)


def lowered(
    function: Callable[..., object], *args: Tensor, config: Config | None = None
) -> tuple[list[Node], fx.GraphModule]:
    """The kernels that `function`, a graph with ops, is lowered to for CUDA, traced as Inductor's pass is."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    from megacpp_compile.lowerings._kernels import rope_launch
    from megacpp_compile.lowerings.mla_rope_q import cuda_triton as on_q
    from megacpp_compile.lowerings.rope_qk import cuda_triton as on_qk

    with pytest.MonkeyPatch.context() as patch:
        for module in (rope_launch, on_q, on_qk):
            patch.setattr(module, "MIN_BYTES", 0)
        LowerSemanticOps(CUDA, config or Config())(gm.graph)
    gm.graph.lint()
    return [n for n in gm.graph.nodes if "triton_kernel_wrapper" in str(n.target)], gm


def kernels(function: Callable[..., object], *args: Tensor) -> list[str]:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    nodes, _ = lowered(function, *args)
    return [kernel_side_table.get_kernel(n.kwargs["kernel_idx"]).fn.__name__ for n in nodes]


def inputs(width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, S, H, width), torch.randn(1, S, 1, 2), torch.randn(1, S, 1, 2)


def queries_and_keys(q, c, s, *, same=False, keys_read_later=False):
    q, k = q + 1, q[:, :, :2] + 1
    both = rope_qk(q, q if same else k, c, s, *FLAGS)
    return (*both, k * 2) if keys_read_later else both


AN_INPUT = lambda q, c, s: mla_rope_q(q, c, s, *FLAGS)  # noqa: E731
# Name -> (what is done, the kernel that does it).
KERNELS = {
    "dead": (lambda q, c, s: mla_rope_q(q + 1, c, s, *FLAGS), "mla_rope_q_in_place"),
    "an input": (AN_INPUT, "mla_rope_q_rows"),
    "read later": (lambda q, c, s: (y := q + 1, mla_rope_q(y, c, s, *FLAGS), y * 2)[1:], "mla_rope_q_rows"),
    "returned": (lambda q, c, s: (y := q + 1, mla_rope_q(y, c, s, *FLAGS)), "mla_rope_q_rows"),
    "not contiguous": (
        lambda q, c, s: mla_rope_q((q + 1).transpose(0, 2).contiguous().transpose(0, 2), c, s, *FLAGS),
        "mla_rope_q_rows",
    ),
    "queries and keys": (functools.partial(queries_and_keys, same=False), "rope_qk_in_place"),
    "of both the keys read later": (functools.partial(queries_and_keys, keys_read_later=True), "rope_qk_rows"),
    "one tensor as both": (functools.partial(queries_and_keys, same=True), "rope_qk_rows"),
    "one tensor as both, by a view": (
        lambda q, c, s: (y := q + 1, rope_qk(y, y.view(y.shape), c, s, *FLAGS))[1], "rope_qk_rows"
    ),
}  # fmt: skip


@triton_without_interpreter
@pytest.mark.parametrize("case", KERNELS)
def test_in_place_where_the_operands_are_dead_and_elsewhere_where_not(hopper, case):
    function, kernel = KERNELS[case]
    assert kernels(function, *inputs()) == [kernel]


WRITES = {
    "q": (lambda q, c, s: mla_rope_q(q + 1, c, s, *FLAGS), ["q"]),
    "out": (lambda q, c, s: mla_rope_q(q, c, s, *FLAGS), ["out"]),
    "q and k": (lambda q, c, s: rope_qk(q + 1, q + 2, c, s, *FLAGS), ["q", "k"]),
    "q_out and k_out": (lambda q, c, s: rope_qk(q, q + 2, c, s, *FLAGS), ["q_out", "k_out"]),
}


@triton_without_interpreter
@pytest.mark.parametrize("what", WRITES)
def test_functional_until_inductor_decides(hopper, what):
    """The graph has no mutation, only a kernel of which is known what it writes: that Inductor overwrites or clones."""
    function, written = WRITES[what]
    (kernel,), gm = lowered(function, *inputs())
    assert "functional" in str(kernel.target) and kernel.kwargs["tensors_to_clone"] == written
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


@triton_without_interpreter
@pytest.mark.parametrize("on", [False, True])
def test_autotune_takes_block_sizes_by_measurement(hopper, on):
    """`Config.autotune` reaches the kernel: its choices travel with it instead of the built-in one."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    (node,), _ = lowered(AN_INPUT, *inputs(), config=Config(autotune=on))
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    assert len(kernel.configs) > 4 if on else len(kernel.configs) == 1


@triton_without_interpreter
def test_a_measured_choice_is_found_again(hopper, tmp_path):
    """By Inductor's decorator of the kernels it generates, as a second process calls it: with what the first one saved
    there is nothing left to measure."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import config_to_dict, user_autotune

    (node,), _ = lowered(AN_INPUT, *inputs(), config=Config(autotune=True))
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    choices = [config_to_dict(c) for c in kernel.configs]

    def generated():
        device = DeviceProperties(type="cuda", index=0, multi_processor_count=132, cc=90)
        meta = {"signature": {}, "device": device, "constants": {}, "configs": [{}]}
        inductor_meta = {"kernel_name": "rows", "autotune_local_cache": True, "backend_hash": None}
        return user_autotune(choices, meta, str(tmp_path / "code.py"), inductor_meta, custom_kernel=True)(kernel.fn)

    first = generated()
    assert len(first.configs) == len(choices) > 4
    best = first.configs[3]
    first.save_cache_hook(best, 1)
    (found,) = generated().configs
    assert config_to_dict(found) == config_to_dict(best)


@pytest.mark.parametrize(("target", "on", "products"), [("cuda", True, 1), ("cuda", False, 2), ("cpu", True, 2)])
def test_merge_down_is_asked_for_and_for_cuda(target, on, products):
    gm = make_fx(lambda x, v, w: (x @ v, x @ w), tracing_mode="fake")(*(torch.randn(4, 4) for _ in range(3)))
    LowerSemanticOps(TARGETS[target], Config(fuse_shared_input_gemms=on))(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == products
