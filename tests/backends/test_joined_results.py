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


def gate(a):
    return behind_norm(a)[1]


def scan_among_others(a):
    *parts, _ = behind_scan(a, a["dout"])
    return torch.cat([bf16(a["dt"]), *parts], -1)


def in_another_order(a):
    dx, db, dc, _ = behind_scan(a, a["dout"])
    return torch.cat([dc, dx, db], -1)


def bf16(t):
    return t.to(torch.bfloat16)


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


# Name -> (what joins tensors, in how many places kernels write the joined one).
JOINED = {
    "mixer": (mixer, 2), "larger part": (lambda a: torch.cat([gate(a), a["b"].flatten(2), bf16(a["dt"])], -1), 1),
    "in another order": (in_another_order, 1),
    "twice in one": (lambda a: torch.cat([gate(a), gate({**a, "y": a["dout"]})], -1), 1),
    "read twice": (lambda a: (torch.cat([dz := gate(a), a["mixed"]], -1), dz.sum()), 0),
    "beside itself": (lambda a: torch.cat([gate(a)] * 2, -1), 0),
    "small part": (lambda a: torch.cat([gate(a), a["mixed"]], -1), 0),
    "of another dtype": (lambda a: torch.cat([gate(a), a["dt"]], -1), 0),
    "one below the other": (lambda a: torch.cat([gate(a), a["y"]], 1), 0),
    "rows out of line": (lambda a: torch.cat([gate(a), bf16(a["dt"]).narrow(-1, 0, 3)], -1), 0),
    "begins out of line": (
        lambda a: torch.cat([bf16(a["dt"]).narrow(-1, 0, 3), gate(a), bf16(a["dt"]).narrow(-1, 3, 5)], -1), 0
    ),
    "transposed": (lambda a: torch.cat([gate(a).transpose(0, 1), a["b"].flatten(2).transpose(0, 1)], -1), 0),
    "scan among others": (scan_among_others, 0),
}


@needs_triton
@pytest.mark.parametrize("name", JOINED)
def test_which_are_written(name):
    function, written = JOINED[name]
    gm, *_ = lowered(function)
    assert joins(gm) == joins(traced(function)[0]) - written


@pytest.mark.end_to_end
@needs_triton
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_a_mixer_in_inductor(symbolic):
    """One kernel after the other writes the joined tensor, which nothing copies."""
    gm, args, mode = lowered(mixer, symbolic=symbolic)
    kernels = [node.kwargs["kwargs"] for node in gm.graph.nodes if node.target is triton_kernel_wrapper_functional]
    first, *others = [(given.get(name), name) for given in kernels for name in ("dz", "dx", "whole") if name in given]
    assert first[0].target is aten.empty.memory_format
    assert [name for _, name in (first, *others)] == ["dz", "dx", "whole"]
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
