"""Planted dequantisations of every kind are found, on graphs and as they run; what is none is not."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.errors import DequantisationError
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.passes import linear
from megacpp_compile.precision.sentinel import RUNS_COMPILED, Sentinel, check
from tests.frames import run

from .models import Of
from .wrapped import te_tensor, torchao_tensor

assert semantic_ops()
E4M3 = torch.float8_e4m3fn


def payload(*shape):
    return torch.randn(*shape).to(E4M3)


def copied(p):
    return torch.empty(p.shape, dtype=torch.bfloat16).copy_(p)


def from_bits(b):
    """e4m3 by hand: sign, exponent and mantissa out of the bytes."""
    magnitude = ((b & 0x7F).to(torch.int32) << 20) + 0x3C000000
    return magnitude.view(torch.float32) * torch.where(b > 127, -1.0, 1.0)


# name -> (what it does, its operand, whether as plain bytes)
PLANTED = {
    "to": (lambda p: p.to(torch.bfloat16) * 2, False), "float_of_a_slice": (lambda p: p[1:, ::2].float(), False),
    "copy_into_a_wide_tensor": (copied, False), "bytes_viewed_as_fp8": (lambda b: b.view(E4M3).to(torch.float32), True),
    "bytes_decoded": (from_bits, True), "looked_up": (lambda b: torch.arange(256.0)[b.long()], True),
}
HARMLESS = {
    "views": (lambda p: p.view(-1)[3:].view(torch.uint8).clone().t(), False),
    "rounding": (lambda p: (torch.ones(p.shape) * 3).to(E4M3), False),
    "as_a_template": (lambda p: torch.zeros_like(p, dtype=torch.float32) + 1, False),
    "comparison": (lambda b: b == 3, True),
    "a_sum_of_the_bytes": (lambda b: b.sum(), True),
    "scaled_mm": (lambda p: torch._scaled_mm(p, payload(32, 32).t(), torch.tensor(1.0), torch.tensor(1.0), out_dtype=torch.bfloat16), False),
    "own_op": (lambda p: torch.ops.megacpp.linear_fp8_weight(torch.ones(64, 32), p, torch.ones(1, 1), None, torch.float32), False),
}


def operand(as_bytes):
    made = payload(32, 32)
    return made.view(torch.uint8) if as_bytes else made


def graph_of(function, x):
    return make_fx(function, tracing_mode="fake")(x).graph


def found_in_graph(function, as_bytes, **options):
    graph = graph_of(function, operand(as_bytes))
    holders = [n for n in graph.nodes if n.op == "placeholder"] if as_bytes else []
    return check(graph, holders, **options)


def found_in_dynamos_graph(function, as_bytes, **options):
    """Where calls are those that were written: of ops without an overload, of torch's functions, of methods."""
    graphs = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, _: graphs.append(gm.graph) or gm, fullgraph=True)(operand(as_bytes))
    holders = [n for n in graphs[0].nodes if n.op == "placeholder"] if as_bytes else []
    return check(graphs[0], holders, **options)


def found_running(function, as_bytes, **options):
    x = operand(as_bytes)
    with Sentinel(payloads=[x] if as_bytes else [], **options) as sentinel:
        function(x)
    return sentinel.findings


FINDERS = [found_in_graph, found_in_dynamos_graph, found_running]


@pytest.mark.parametrize("find", FINDERS)
@pytest.mark.parametrize("name", PLANTED)
def test_planted(find, name):
    findings = find(*PLANTED[name])
    assert len(findings) == 1, findings
    (one,) = findings
    assert one.made.itemsize > 1 and one.bytes >= 256 * one.made.itemsize
    with pytest.raises(DequantisationError, match=r"1 fp8 payload widened in silence"):
        find(*PLANTED[name], strict=True)


@pytest.mark.parametrize("find", FINDERS)
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(find, name):
    assert find(*HARMLESS[name]) == []


@pytest.mark.parametrize("find", [found_in_graph, found_running])
def test_an_allowed_op(find):
    assert find(*PLANTED["to"], allow=("aten::_to_copy",)) == []
    assert len(find(*PLANTED["to"], allow=("aten::copy_",))) == 1


class Block(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.mm(x, self.weight.t())


class Dequantising(Block):
    def forward(self, x):
        return x @ self.weight.dequantize().t()


@pytest.mark.parametrize("overload", [False, True], ids=["packet", "overload"])
def test_an_op_that_multiplies_payloads_is_none_by_either_name(overload):
    """In Dynamo's graph a custom op stands by its packet, as `megacpp_compile.sparse_mla` calls it."""
    op = torch.ops.megacpp.sparse_mla.default if overload else torch.ops.megacpp.sparse_mla
    graph = fx.Graph()
    values = {"q": torch.randn(1, 3, 2, 24, dtype=torch.bfloat16), "kv": payload(1, 9, 1, 24),
              "indices": torch.zeros(1, 3, 1, 3, dtype=torch.int32), "scale": torch.rand(1, 9, 1, 1)}  # fmt: skip
    operands = [graph.placeholder(name) for name in values]
    called = graph.call_function(op, (*operands, 0.1, 16))
    for node, value in zip((*operands, called), (*values.values(), values["q"].repeat(1, 4, 1, 1)), strict=True):
        node.meta["example_value"] = value
    graph.output(called)
    assert check(graph, strict=True) == []


def test_names_module_line_and_bytes():
    weight = nn.Parameter(te_tensor(torch.randn(16, 8)), requires_grad=False)
    model = nn.Sequential(collections.OrderedDict(blocks=nn.Sequential(Block(weight))))
    with Sentinel(model) as sentinel:
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert sentinel.findings
    one = sentinel.findings[0]
    assert (one.fqn, one.held) == ("blocks.0", E4M3) and one.bytes >= 2 * 16 * 8
    assert "blocks.0" in str(one) and "float8_e4m3fn" in str(one) and ".py:" in one.source
    with Sentinel(model, allow_modules=("blocks.*",)) as sentinel:
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert sentinel.findings == []


class Decoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits):
        ctx.save_for_backward(bits)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].float(), None


class Held(nn.Module):
    """A payload in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bits", payload(16, 16))

    def forward(self, x):
        return x @ self.bits.float()


class InBackward(Held):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(torch.relu(Decoded.apply(self.first(x), self.bits)))


@pytest.mark.parametrize("again", [False, True])
def test_names_the_module_in_backward(again):
    """Also of what backward computes again."""

    def body(m, x):
        return checkpoint(m.inner, x, use_reentrant=False) if again else m.inner(x)

    model = nn.Sequential(nn.Linear(16, 16), Of(body, inner=InBackward()), nn.Linear(16, 16))
    with Sentinel() as sentinel:
        model(torch.ones(4, 16)).sum().backward()
    (one,) = sentinel.findings
    assert one.fqn == "1.inner" and one.source.endswith("in backward")


def test_a_wrapper_is_asked_for_its_values():
    """Once, by the method, whatever that does inside; and the class is as it was."""
    weight = te_tensor(torch.randn(16, 8))
    before = vars(type(weight)).get("dequantize"), weight.dequantize.__func__
    model = nn.Sequential(Dequantising(nn.Parameter(weight, requires_grad=False)))
    with Sentinel(model) as sentinel:
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    (one,) = sentinel.findings
    assert (one.op, one.fqn, one.bytes) == ("Float8Tensor.dequantize", "0", 2 * 16 * 8)
    assert one.source.startswith("test_sentinel.py:") and one.source.endswith("in forward")
    assert (vars(type(weight)).get("dequantize"), weight.dequantize.__func__) == before
    with pytest.raises(DequantisationError), Sentinel(model, strict=True):
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert (vars(type(weight)).get("dequantize"), weight.dequantize.__func__) == before


@pytest.mark.skipif(not RUNS_COMPILED, reason="this torch runs it in eager")
def test_compiled_code_runs_compiled():
    """And what it leaves to the dispatcher is seen: under a mode torch runs a model in eager, unless told not to."""
    ran = []

    def backend(gm, _):
        return lambda *args: ran.append(gm) or gm.forward(*args)

    torch._dynamo.reset()
    model = nn.Sequential(Held())
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        with Sentinel(model) as sentinel:
            compiled(torch.ones(4, 16))
        assert [(w.op, w.bytes) for w in sentinel.findings] == [("aten::_to_copy", 4 * 16 * 16)]
        assert not sentinel.findings[0].fqn.startswith("_orig_mod")
    assert len(ran) == 2 and ran[0] is ran[1]


def test_weights_of_torchao_in_a_linear():
    linear = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(torchao_tensor(linear.weight.detach()), requires_grad=False)
    with Sentinel(linear) as sentinel, torch.no_grad():
        linear(torch.ones(2, 32, dtype=torch.bfloat16))
    assert sentinel.findings and sentinel.findings[0].bytes >= 2 * 16 * 32


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", [None, "fp8_current", "fp8_block"])
def test_a_compiled_model_raises_no_alarm(monkeypatch, recipe):
    """Neither its graphs, with linears in float8 or without, nor what runs, forward and backward."""
    for question in ("no_float8", "no_block_scales"):
        monkeypatch.setattr(linear, question, lambda device: "")
    model = nn.Sequential(nn.Linear(128, 256), nn.RMSNorm(256), nn.SiLU(), nn.Linear(256, 128)).bfloat16()
    plan = recipe and PrecisionPlan((("*", recipe),), gate=False)
    args = (torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True),)
    frames = run(model, args, Config(precision=plan))
    assert frames.counts["linear"] == (2 if recipe else 0)
    assert [check(graph.graph, strict=True) for graph in frames.graphs] == [[]]
    if RUNS_COMPILED:
        with Sentinel(model, strict=True) as sentinel:
            frames.compiled(*args).float().sum().backward()
        assert sentinel.findings == []


def test_a_plain_model_raises_no_alarm():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()).bfloat16()
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    with Sentinel(model, strict=True) as sentinel:
        model(x).float().sum().backward()
    assert sentinel.findings == []
    assert check(make_fx(lambda x: model(x).float().sum())(x).graph, strict=True) == []
