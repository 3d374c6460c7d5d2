"""Routed experts: registration, gradients, the loop they stand for, and what is kept for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map_only

from megacpp_compile.lowerings._activation import Activation, Bound
from megacpp_compile.lowerings._kernels.grouped import rows, separate, sums, weights
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings.moe import moe, reference
from megacpp_compile.lowerings.moe._grouped import experts_of

from . import relative_error
from .agreement import module_of
from .cases import CASES, CURVES
from .contract import as_leaves, assert_keeps, leaves

assert semantic_ops()
OP = torch.ops.megacpp.moe.default
FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"), "relu": F.relu,
             "relu2": lambda h: F.relu(h).square(), "swish": lambda h: h * torch.sigmoid(1.702 * h),
             "clamped_silu": lambda h: F.silu(h.clamp(max=0.5)),
             "clamped_swish": lambda h: h.clamp(max=0.5) * torch.sigmoid(1.702 * h.clamp(max=0.5)),
             "clamped_result": lambda h: F.silu(h).clamp(max=0.2),
             "hard_gelu": lambda h: F.gelu(F.hardtanh(h, -0.4, 0.6)),
             "softcapped_factors": lambda h: 0.5 * torch.tanh(h / 0.5) * torch.sigmoid(h),
             "clamped_factor": lambda h: h.clamp(max=0.4) * torch.sigmoid(1.702 * h),
             "softcapped_silu": lambda h: 0.8 * torch.tanh(F.silu(0.5 * torch.tanh(h / 0.5)) / 0.8)}
UPS = {"clamped_silu": lambda h: h.clamp(-0.5, 0.5), "clamped_swish": lambda h: h.clamp(-0.5, 0.5) + 1,
       "clamped_result": lambda h: h.clamp(-0.6, 0.2), "softcapped_factors": lambda h: 0.3 * torch.tanh(h / 0.3),
       "softcapped_silu": lambda h: 0.3 * torch.tanh(h / 0.3)}
WRITTEN = {str(Activation.parse(text)): name for name, text in CURVES.items()}


def loop(x, indices, gates, w_gate, w_up, w_down, activation, layout, out_dtype, keep_hidden=True, precision="",
         *biases):  # fmt: skip
    """One expert after the other."""
    b_gate, b_up, b_down = ([None] * experts_of(w_down) if b is None else b for b in biases or [None] * 3)
    name = WRITTEN.get(activation, activation)
    f, u = FUNCTIONS[name], UPS.get(name, lambda h: h)
    gate, up, down = (list(w[0]) if w and w[0].dim() == 3 else w for w in (w_gate, w_up, w_down))
    y = torch.zeros(x.shape[0], down[0].shape[0], dtype=out_dtype, device=x.device)
    for e in range(len(down)):
        token, choice = torch.where(indices == e)
        h = F.linear(x[token], up[e], b_up[e])
        if layout == "pair":
            h = f(F.linear(x[token], gate[e], b_gate[e])) * u(h)
        elif layout == "interleaved":
            h = f(h[:, ::2]) * u(h[:, 1::2])
        elif layout == "single":
            h = f(h)
        else:
            first, second = h.chunk(2, -1)
            h = f(first) * u(second) if layout == "gate_up" else f(second) * u(first)
        y = y.index_add(0, token, (F.linear(h, down[e], b_down[e]) * gates[token, choice, None]).to(out_dtype))
    return y


@pytest.mark.parametrize("label", CASES["moe"])
def test_is_the_loop(rand, label):
    args = as_leaves(CASES["moe"][label](rand, torch.float64))
    got, want = OP(*args)[0], loop(*args)
    assert relative_error(got, want) < 1e-12
    seed, given = rand(*want.shape), leaves(args)
    grads = [torch.autograd.grad(y, given, seed, allow_unused=True) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        b = torch.zeros_like(a) if b is None else b  # the loop does not use what no token chose
        assert relative_error(a, b) < 1e-11, label


def test_opcheck_of_the_gemms(rand):
    x, w, ends = rand(9, 4, dtype=torch.float32), rand(3, 6, 4, dtype=torch.float32), torch.tensor([2, 2, 7]).int()
    basic = ("test_schema", "test_faketensor")
    torch.library.opcheck(rows, ([x], [w], ends, False), test_utils=basic)
    grad, bias, take = rand(9, 6, dtype=torch.float32), rand(3, 6, dtype=torch.float32), torch.arange(8, -1, -1)
    torch.library.opcheck(rows, ([x], [w], ends, False, take, bias), test_utils=basic)
    torch.library.opcheck(weights, (grad, x, ends), test_utils=basic)
    torch.library.opcheck(sums, (grad, ends, take, x[:, 0]), test_utils=basic)


@pytest.mark.parametrize("suffix", ["", "_backward"])
@pytest.mark.parametrize("name", ["moe", "moe_sorted"])
def test_blocks_need_a_fixed_number_of_tokens(name, suffix):
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=ShapeEnv())
    rows = fake.from_tensor(torch.ones(6, 2), symbolic_context=dynamic, source=ConstantSource("rows"))
    tpu_xla = module_of(name, "tpu_xla")
    assert "not fixed" in tpu_xla.supports(name + suffix, (rows,) * 3)
    assert tpu_xla.supports(name + suffix, (torch.ones(6, 2),) * 3) is None


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["moe", "moe_sorted"])
@pytest.mark.parametrize("lowering", ["reference", "cuda_triton", "tpu_xla"])
def test_gradients_lie_as_promised(rand, lowering, name):
    """Else a graph would copy those of all weights: 0.34 of 13.5 ms for 64 experts of 1408 x 2048 on an H200."""
    backward = f"{name}_backward"
    bodies = getattr(module_of(name, lowering), backward), getattr(torch.ops.megacpp, backward)
    for label, make in CASES[backward].items():
        args = make(rand, torch.bfloat16)
        with FakeTensorMode() as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
            got, want = (body(*fakes) for body in bodies)
        described = [[(t.shape, t.dtype, t.stride()) for t in tree_leaves(out) if t.numel()] for out in (got, want)]
        assert described[0] == described[1], label
        if name == "moe":
            ups = [separate(ws) for ws in args[3:5] if ws]
            for part, ws in zip(want[2].chunk(len(ups), 1), ups, strict=True):
                # Of one tensor with those of the other half, if they lie across.
                strides = {w.stride() if w.stride(-1) == 1 else (1, len(ups) * len(w)) for w in ws}
                assert {g.stride() for g in part.unbind(0)} == strides, label
            assert {g.stride() for g in want[3].unbind(0)} == {w.stride() for w in separate(args[5])}, label


@pytest.mark.parametrize("text", ["silu", *CURVES.values()])
def test_an_activation_is_its_string(text):
    assert str(Activation.parse(text)) == text and Activation.parse(text) == Activation.parse(
        str(Activation.parse(text))
    )


@pytest.mark.parametrize("kind, written",
                         [("clamp", lambda x: x.clamp(-1, 2)),
                          ("minimum", lambda x: torch.minimum(torch.maximum(x, x.new_full((), -1)), x.new_full((), 2))),
                          ("hardtanh", lambda x: F.hardtanh(x, -1, 2))])
def test_a_bound_has_the_gradient_of_what_it_is_written_as(kind, written):
    """At its ends too, where torch's functions of the same values have three."""
    assert Bound(-1.0, 2.0, kind).of(torch.tensor(float("nan")))[0].isnan()
    x = torch.tensor([-3.0, -1.0, 0.0, 2.0, 2.5, float("inf")], requires_grad=True)
    want = written(x)
    (slope,) = torch.autograd.grad(want.sum(), x)
    got = Bound(-1.0, 2.0, kind).of(x.detach())
    torch.testing.assert_close(got, (want.detach(), slope), rtol=0, atol=0)


def test_slots_are_sorted_stably(rand):
    indices = torch.tensor([[2, 0], [5, 2], [-1, 2]])
    order, ends = reference.by_expert(indices, 3)
    assert order.tolist()[:4] == [1, 0, 3, 5]
    assert ends.tolist() == [1, 1, 4]


@pytest.mark.parametrize("experts", [255, 256, 300])
def test_many_experts(experts):
    """As many as a byte can number, and more; and one slot of none."""
    indices = torch.arange(-1, experts).flip(0).view(-1, 1)
    order, ends = reference.by_expert(indices, experts)
    assert order[:-1].equal(torch.arange(experts).flip(0)) and ends.equal(torch.arange(1, experts + 1).int())


@pytest.mark.parametrize("keep", [True, False])
def test_saved_for_backward(rand, keep):
    """No row of an expert's output, and nothing of the width of x for every choice."""
    args = as_leaves((*CASES["moe"]["pair_separate"](rand, torch.float32)[:9], keep))
    hidden = (1, 2) if keep else ()
    outs = assert_keeps(moe, args, leaves(args), *range(1, 3 + len(hidden)))
    assert len(outs) == 3 + len(hidden)
