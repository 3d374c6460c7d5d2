"""GEMMs that run while ranks communicate: which move, which stay, and that results are the same."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacpp_compile.backends.overlap import FLOPS_PER_BYTE, overlap
from tests.backends.models import equal

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def summed(one_rank):
    """Sums over ranks."""
    group = dist.group.WORLD.group_name
    return lambda x: collectives.wait_tensor(collectives.all_reduce(x, "sum", group))


def scheduled(function, *args):
    """The calls of `function`'s graph as they are ordered, once its results are seen to be the same."""
    gm = make_fx(function, tracing_mode="fake")(*(t.clone() for t in args))
    want = function(*(t.clone() for t in args))
    overlap(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert equal(gm(*(t.clone() for t in args)), want)
    return calls(gm.graph)


def calls(graph: fx.Graph):
    short = {"all_reduce": "start", "wait_tensor": "wait"}
    names = [
        n.target._opname for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    ]
    return [short.get(name, name) for name in names]


def tensors(*shapes):
    return [torch.randn(shape) for shape in shapes]


def test_gradients_of_weights_run_while_those_of_inputs_are_summed(summed):
    """As autograd orders a linear's backward: the weight's gradient first, then the sum, which nothing follows."""

    def backward(grad, x, w):
        dw = grad.t() @ x
        return summed(grad @ w).relu(), dw

    order = scheduled(backward, *tensors((64, 512), (64, 512), (512, 512)))
    assert order == ["t", "mm", "start", "mm", "wait", "relu"]


def test_what_follows_and_needs_no_result_runs_before_the_wait(summed):
    """Experts that all tokens share, beside those that rows are sent to: with what stands between their GEMMs."""

    def forward(x, up, down):
        sent = summed(x)
        shared = torch.relu(x @ up) @ down
        return (sent.exp() + shared,)

    order = scheduled(forward, *tensors((64, 512), (512, 512), (512, 512)))
    assert order == ["start", "mm", "relu", "mm", "wait", "exp", "add"]


def test_no_more_than_takes_as_long_as_the_collective(summed):
    def forward(x, *ws):
        sent = summed(x)
        return (sent.exp(), *(x @ w for w in ws))

    rows, width = 64, 512
    per_gemm, sent = 2 * rows * width * width, 4 * rows * width
    order = scheduled(forward, *tensors((rows, width), *[(width, width)] * 40))
    hidden = order.index("wait") - order.index("start") - 1
    assert (hidden - 1) * per_gemm < FLOPS_PER_BYTE * sent <= hidden * per_gemm
    assert order.count("mm") == 40 > hidden


def test_starts_keep_their_order_and_waits_go_to_their_readers(summed):
    def forward(x, y, w):
        first, second = summed(x), summed(y)
        z = second.sin()
        return z @ w, first.cos()

    order = scheduled(forward, *tensors((8, 16), (8, 16), (16, 16)))
    assert order == ["start", "start", "wait", "sin", "mm", "wait", "cos"]
    # What needs a result stays behind it.
    order = scheduled(lambda x, w: (summed(summed(x) @ w) @ w,), *tensors((8, 16), (16, 16)))
    assert order == ["start", "wait", "mm", "start", "wait", "mm"]


def test_readers_of_what_is_written_stay_on_their_side(summed):
    """A GEMM behind a write to its operand must see it, one before must not."""

    def forward(x, buffer, w):
        before = buffer @ w
        buffer.add_(1.0)
        sent = summed(x).exp()
        buffer.mul_(2.0)
        return sent, before, buffer @ w

    order = scheduled(forward, *tensors((64, 512), (64, 512), (512, 512)))
    assert order == ["mm", "add_", "start", "wait", "exp", "mul_", "mm"]


def test_random_numbers_keep_their_order(summed):
    args = tensors((64, 512), (512, 512))
    gm = make_fx(lambda x, w: (summed(x).exp(), torch.rand_like(x) @ w), tracing_mode="fake")(*args)
    overlap(gm.graph)
    assert calls(gm.graph) == ["start", "wait", "exp", "rand_like", "mm"]


def test_graphs_whose_sizes_the_host_reads_stay_as_they_are(summed):
    def forward(x, counts, w):
        counts = summed(counts)
        rows = counts[0].item()
        torch._check(rows >= 0)
        return counts.exp(), torch.zeros(rows), x @ w

    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True):
        x, counts, w = torch.empty(64, 512), torch.empty(2, dtype=torch.int64), torch.empty(512, 512)
        gm = make_fx(forward)(x, counts, w)
    before = calls(gm.graph)
    overlap(gm.graph)
    assert calls(gm.graph) == before
    assert before.index("wait") == before.index("start") + 1 < before.index("mm")


def test_symbolic_sizes_stay_symbolic(summed):
    """To schedule a graph is no reason to compile it anew for another length."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        x, w = mode.from_tensor(torch.randn(64, 512), static_shapes=False), torch.empty(512, 512)
        gm = make_fx(lambda x, w: (summed(x).exp(), x @ w))(x, w)
    before = list(shapes.guards)
    overlap(gm.graph)
    assert calls(gm.graph) == ["start", "mm", "wait", "exp"]
    assert shapes.guards == before


def test_results_of_a_triton_kernel_are_named(summed):
    """Its node's value is a dict, which torch below 2.13 finds no sizes in."""
    x, w = tensors((64, 512), (512, 512))
    gm = make_fx(lambda x, w: (x.sin(), summed(x).exp(), x @ w), tracing_mode="fake")(x, w)
    sin = next(node for node in gm.graph.nodes if "sin" in node.name)
    with gm.graph.inserting_before(sin):
        kernel = gm.graph.call_function(lambda x: {"y": x.sin()}, (sin.args[0],))
        one = gm.graph.call_function(operator.getitem, (kernel, "y"))
    kernel.meta["val"], one.meta["val"] = {"y": sin.meta["val"]}, sin.meta["val"]
    sin.replace_all_uses_with(one)
    gm.graph.erase_node(sin)
    overlap(gm.graph)
    assert calls(gm.graph) == ["start", "mm", "wait", "exp"]
    gm.recompile()
    assert equal(gm(x, w)[0], x.sin())
