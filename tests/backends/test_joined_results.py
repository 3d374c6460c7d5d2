"""Joined tensors that kernels write: which are, what the graph then is, and that Inductor copies nothing."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._dynamo.utils import ReinplaceCounters
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from megacpp_compile.backends import joined_results
from megacpp_compile.backends._lower import LowerSemanticOps
from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.config.options import Config
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.targets import CUDA
from tests.lowerings.gluon_kernels import LEAST_CHUNKS, ON_HOPPER, needs_triton
from tests.lowerings.hopper import inductor_for_hopper

pytestmark = [pytest.mark.usefixtures("hopper", "kernels_of_any_size")]
aten, ops = torch.ops.aten, torch.ops.megacpp
B, T, H, P, G, N = 2, 192, 8, 64, 2, 128
INNER, STATES = H * P, G * N
MIXED = INNER + 2 * STATES
SIZES = {
    "dout": (B, T, INNER), "y": (B, T, INNER), "z": (B, T, INNER), "w": (INNER,), "rrms": (B, T, 1), "x": (B, T, H, P),
    "dt": (B, T, H), "A": (H,), "b": (B, T, G, N), "c": (B, T, G, N), "D": (H,), "states": (B, 1, H, P, N),
    "mixed": (B, T, MIXED), "taps": (MIXED, 4), "bias": (MIXED,),
}  # fmt: skip
WIDE = {"rrms", "dt", "A", "states"}


def behind_norm(a):
    dy, dz, dw = ops.gated_rms_norm_backward(a["dout"], a["y"], a["z"], a["w"], a["rrms"], INNER, False)
    return dy, dz, dw


def behind_scan(a, dy):
    operands = a["x"], a["dt"], a["A"], a["b"], a["c"], a["D"]
    dx, d_dt, _, db, dc, *_ = ops.ssd_scan_backward(dy.view(a["x"].shape), None, *operands, None, a["states"], 256)
    return dx.flatten(2), db.flatten(2), dc.flatten(2), d_dt


def behind_conv(a, grad):
    return ops.causal_conv1d_backward(grad, a["mixed"], a["taps"], a["bias"], "silu")


def steps(a, d_dt):
    return torch.ops.prims.convert_element_type(d_dt * a["dt"].sigmoid(), torch.bfloat16)


def mixer(a):
    dy, dz, dw = behind_norm(a)
    *parts, d_dt = behind_scan(a, dy)
    dx, d_taps, d_bias = behind_conv(a, torch.cat(parts, -1))
    return torch.cat([dz, dx, steps(a, d_dt)], 2).view(-1, INNER + MIXED + H), dw, d_taps, d_bias


def read_twice(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, a["mixed"]], -1), dz.sum()


def beside_itself(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, dz], -1)


def small_part(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, a["mixed"]], -1)


def larger_part(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, a["b"].flatten(2), a["dt"].to(torch.bfloat16)], -1)


def of_another_dtype(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, a["dt"]], -1)


def one_below_the_other(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, a["y"]], 1)


def rows_out_of_line(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz, a["dt"].to(torch.bfloat16).narrow(-1, 0, 3)], -1)


def begins_out_of_line(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([a["dt"].to(torch.bfloat16).narrow(-1, 0, 3), dz, a["dt"].to(torch.bfloat16).narrow(-1, 3, 5)], -1)


def transposed(a):
    _, dz, _ = behind_norm(a)
    return torch.cat([dz.transpose(0, 1), a["b"].flatten(2).transpose(0, 1)], -1)


def scan_among_others(a):
    *parts, _ = behind_scan(a, a["dout"])
    return torch.cat([a["dt"].to(torch.bfloat16), *parts], -1)


def in_another_order(a):
    dx, db, dc, _ = behind_scan(a, a["dout"])
    return torch.cat([dc, dx, db], -1)


def twice_in_one(a):
    _, dz, _ = behind_norm(a)
    _, other, _ = behind_norm({**a, "y": a["dout"]})
    return torch.cat([dz, other], -1)


def traced(function, device="cuda:0", symbolic=False):
    """The function's graph on no data, and what it was traced on. symbolic: of a number of tokens that is not known."""
    semantic_ops()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    tokens = mode.from_tensor(torch.empty(T), symbolic_context=context).shape[0] if symbolic else T
    with mode:
        args = [
            torch.empty([tokens if n == T else n for n in size], device=device,
                        dtype=torch.float32 if name in WIDE else torch.bfloat16)
            for name, size in SIZES.items()
        ]  # fmt: skip
    with tracing(TracingContext(mode)):
        gm = make_fx(lambda *args: function(dict(zip(SIZES, args, strict=True))))(*args)
    return gm, args, mode


@pytest.fixture(autouse=True)
def gluon_serves(monkeypatch):
    monkeypatch.setattr(LEAST_CHUNKS, 0)
    monkeypatch.setattr(ON_HOPPER, lambda device: device.type == "cuda")


def lowered(function, symbolic=False, **config):
    gm, args, mode = traced(function, symbolic=symbolic)
    with tracing(TracingContext(mode)):
        LowerSemanticOps(CUDA, Config(**config))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, args, mode


def joins(gm):
    return sum(node.target is aten.cat.default for node in gm.graph.nodes)


WRITTEN = {mixer: 2, larger_part: 1, in_another_order: 1, twice_in_one: 1}
STAY = (read_twice, beside_itself, small_part, of_another_dtype, one_below_the_other, rows_out_of_line, begins_out_of_line, transposed,
        scan_among_others)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("function", [*WRITTEN, *STAY], ids=lambda function: function.__name__)
def test_which_are_written(function):
    gm, *_ = lowered(function)
    assert joins(gm) == joins(traced(function)[0]) - WRITTEN.get(function, 0)


@needs_triton
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_a_mixer_in_inductor(symbolic):
    """One kernel after the other writes the joined tensor, which nothing copies."""
    gm, args, mode = lowered(mixer, symbolic=symbolic)
    kernels = [node.kwargs["kwargs"] for node in gm.graph.nodes if node.target is triton_kernel_wrapper_functional]
    first, *others = [(given.get(name), name) for given in kernels for name in ("dz", "dx", "whole") if name in given]
    assert first[0].target is aten.empty.memory_format and [name for _, name in (first, *others)] == ["dz", "dx", "whole"]
    for (whole, _), before in zip(others, ("dz", "dx"), strict=True):
        assert whole.target is operator.getitem and whole.args[1] == before
        assert sum(user.target is triton_kernel_wrapper_functional for user in whole.users) == 1
    scans = [node for node in gm.graph.nodes if node.target is torch.ops.megacpp_ssd.backward.default]
    assert [node.args[-1] for node in scans] == [[0, INNER, INNER + STATES]]
    ReinplaceCounters.clear()
    with inductor_for_hopper() as compiled, tracing(TracingContext(mode)):
        compile_fx_inner(gm, args)
    assert {"gated_rms_norm_rows_backward", "causal_conv1d_walk", "copy_columns"} <= set(compiled)
    assert ReinplaceCounters.get_total_missed() == 0


def test_on_another_device():
    gm, *_ = traced(mixer, device="cpu")
    assert not any(joined_results.find(gm.graph, target, late=False) for target in ("cpu", "cuda"))


@needs_triton
def test_under_a_limit_on_the_peak():
    """No joined tensor is there before its last kernel: of the mixer's gradients the convolution's is."""
    gm, *_ = lowered(mixer, policy=CheckpointingPolicy(peak_gib=8))
    kernels = [node.kwargs["kwargs"] for node in gm.graph.nodes if node.target is triton_kernel_wrapper_functional]
    (made,) = (given["dx"] for given in kernels if "dx" in given)
    assert made.target is aten.empty.memory_format and joins(gm) == 0
    assert sum("whole" in given for given in kernels) == 2  # copies of the gate's gradient and of the step sizes'
