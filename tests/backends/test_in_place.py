"""Which memory a lowering may work in: what nobody needs any more, and that only."""

from __future__ import annotations

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


def reader(x: Tensor) -> Tensor:
    """What stands for the op that may overwrite; found in the graph by its name."""
    return torch.neg(x)


def asked(function: Callable[..., object]) -> bool:
    """Whether the operand of the one `neg` in `function(x)` may be overwritten by it."""
    gm = make_fx(function, tracing_mode="fake")(torch.randn(4, 6))
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.neg.default)
    return overwritable(node.args[0], node)


def dead(x):
    return reader(x + 1)


def read_before(x):
    y = x + 1
    total = y.sum()
    return reader(y) + total


def view_of_what_is_dead(x):
    return reader((x + 1).view(6, 4).t())


def read_later(x):
    y = x + 1
    return reader(y), y * 2


def view_read_later(x):
    y = x + 1
    other = y.view(24)
    return reader(y), other * 2


def base_read_later(x):
    y = x + 1
    return reader(y.view(24)), y * 2


def another_view_of_the_base_read_later(x):
    y = x + 1
    a, b = y.view(24), y.t()
    return reader(a), b * 2


def result_of_a_view_read_later_only(x):
    y = x + 1
    other = y.t() * 2
    return reader(y), other * 3


def returned(x):
    y = x + 1
    return reader(y), y


def view_returned(x):
    y = x + 1
    return reader(y.view(24)), y.t()


def placeholder(x):
    return reader(x)


def view_of_a_placeholder(x):
    return reader(x.view(24))


def part_of_what_is_dead(x):
    first, _ = (x + 1).split(2)
    return reader(first)


def part_beside_one_read_later(x):
    """The parts' memory is apart, which is more than is looked at."""
    first, second = (x + 1).split(2)
    return reader(first), second * 2


def part_of_what_is_read_later(x):
    y = x + 1
    first, _ = y.split(2)
    return reader(first), y * 2


def whole_with_a_part_read_later(x):
    y = x + 1
    _, second = y.split(2)
    return reader(y), second * 2


def part_of_a_placeholder(x):
    first, _ = x.split(2)
    return reader(first)


def one_of_several_results(x):
    values, _ = torch.ops.aten.topk(x, 2)
    return reader(values)


def one_of_several_results_another_read_later(x):
    values, places = torch.ops.aten.topk(x, 2)
    return reader(values), places * 2


def unsafe_view_of_what_is_read_later(x):
    y = x + 1
    return reader(torch.ops.aten._unsafe_view(y, (24,))), y * 2


FREE = [
    dead, read_before, view_of_what_is_dead, result_of_a_view_read_later_only, part_of_what_is_dead,
    one_of_several_results, one_of_several_results_another_read_later,
]  # fmt: skip
NEEDED = [
    read_later, view_read_later, base_read_later, another_view_of_the_base_read_later, returned, view_returned,
    placeholder, view_of_a_placeholder, part_beside_one_read_later, part_of_what_is_read_later,
    whole_with_a_part_read_later, part_of_a_placeholder, unsafe_view_of_what_is_read_later,
]  # fmt: skip


@pytest.mark.parametrize("function", FREE, ids=lambda f: f.__name__)
def test_nobody_needs_it(function):
    assert asked(function)


@pytest.mark.parametrize("function", NEEDED, ids=lambda f: f.__name__)
def test_somebody_needs_it(function):
    assert not asked(function)


def test_no_tensor_at_all():
    gm = make_fx(dead, tracing_mode="fake")(torch.randn(4, 6))
    assert not overwritable(None, next(iter(gm.graph.nodes)))
    assert not overwritable(2.0, next(iter(gm.graph.nodes)))


# --- the choice made at handoff


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


@triton_without_interpreter
def test_in_place_where_the_operand_is_dead(hopper):
    assert kernels(lambda q, c, s: mla_rope_q(q + 1, c, s, *FLAGS), *inputs()) == ["mla_rope_q_in_place"]


ELSEWHERE = {
    "an input": lambda q, c, s: mla_rope_q(q, c, s, *FLAGS),
    "read later": lambda q, c, s: (y := q + 1, mla_rope_q(y, c, s, *FLAGS), y * 2)[1:],
    "returned": lambda q, c, s: (y := q + 1, mla_rope_q(y, c, s, *FLAGS)),
    "not contiguous": lambda q, c, s: mla_rope_q((q + 1).transpose(0, 2).contiguous().transpose(0, 2), c, s, *FLAGS),
}


@triton_without_interpreter
@pytest.mark.parametrize("why", ELSEWHERE)
def test_elsewhere_where_it_is_not(hopper, why):
    assert kernels(ELSEWHERE[why], *inputs()) == ["mla_rope_q_rows"]


@triton_without_interpreter
def test_queries_and_keys_only_together(hopper):
    def both(q, k, c, s):
        return rope_qk(q + 1, k + 1, c, s, *FLAGS)

    def keys_read_later(q, k, c, s):
        k = k + 1
        return *rope_qk(q + 1, k, c, s, *FLAGS), k * 2

    q, c, s = inputs()
    assert kernels(both, q, q[:, :, :2], c, s) == ["rope_qk_in_place"]
    assert kernels(keys_read_later, q, q[:, :, :2], c, s) == ["rope_qk_rows"]


@triton_without_interpreter
def test_one_tensor_as_queries_and_keys_is_not_turned_twice(hopper):
    def same(q, c, s):
        q = q + 1
        return rope_qk(q, q, c, s, *FLAGS)

    def overlapping(q, c, s):
        q = q + 1
        return rope_qk(q, q.view(q.shape), c, s, *FLAGS)

    for function in (same, overlapping):
        assert kernels(function, *inputs()) == ["rope_qk_rows"]


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

    (node,), _ = lowered(ELSEWHERE["an input"], *inputs(), config=Config(autotune=on))
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    assert len(kernel.configs) > 4 if on else len(kernel.configs) == 1


@triton_without_interpreter
def test_a_measured_choice_is_found_again(hopper, tmp_path):
    """By Inductor's decorator of the kernels it generates, as a second process calls it: with what the first one saved
    there is nothing left to measure."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import config_to_dict, user_autotune

    (node,), _ = lowered(ELSEWHERE["an input"], *inputs(), config=Config(autotune=True))
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
