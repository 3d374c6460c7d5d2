"""What a program returns is what its graph returns, whatever torch_xla makes of results that are the same value."""

from __future__ import annotations

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func

from megacpp_compile.backends import openxla
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.config.options import Config
from megacpp_compile.targets import TPU

pytestmark = pytest.mark.usefixtures("fresh")

aten = torch.ops.aten
COPIES = {
    "clone": aten.clone.default, "alias": aten.alias.default, "detach": aten.detach.default,
    "lift": aten.lift_fresh_copy.default, "copy": lambda x: aten.copy.default(torch.zeros_like(x), x),
    "cast to what it is": lambda x: aten._to_copy.default(x, dtype=x.dtype),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_among_the_results(xla, name):
    def function(x):
        a = torch.softmax(x, -1)
        b = COPIES[name](a)
        return x.sum(), a, b, (b * 7).sum(1), COPIES[name](x)

    def backend(gm, inputs):
        return openxla.compile_plain(gm, inputs, Settings(TPU, Config(), {}))

    x = torch.randn(3, 5)
    for got, want in zip(torch.compile(function, backend=backend)(x.to(xla)), function(x), strict=True):
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("reduce", [
    lambda x: x.amax(), lambda x: x.amin(keepdim=True), lambda x: x.sum(()), lambda x: x.mean(()),
    lambda x: x.var((), correction=0), lambda x: x.sum(), lambda x: x.amax(0),
], ids=["amax", "amin", "sum", "mean", "var", "sum of all", "amax of some"])  # fmt: skip
def test_reductions_over_no_dimension_by_name(xla, reduce):
    """Of all dimensions, in a frame nothing fires in, forward and backward."""
    results = []
    for call, device in ((reduce, "cpu"), (torch.compile(reduce, backend="megacpp"), xla)):
        x = torch.arange(15.0).view(3, 5).sin().to(device).requires_grad_()
        out = call(x)
        out.sum().backward()
        results.append((out.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(*results)


def test_a_copy_is_saved_once(xla):
    """And results that are copies are tensors of their own."""
    graphs = []

    def backend(gm, inputs):
        def keep(graph, _):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return openxla.compile_lowered(gm, inputs, Settings(TPU, Config(), {}, inner_compile=keep))

    def function(x):
        a = torch.softmax(x, -1)
        b = a.clone()
        return b @ x.sin(), b

    x = torch.randn(4, 4, device=xla, requires_grad=True)
    y, b = torch.compile(function, backend=backend)(x)
    (y.sum() + b.sum()).backward()
    clones = [node for graph in graphs for node in graph.graph.nodes if node.target is aten.clone.default]
    assert all(user.op == "output" for node in clones for user in node.users)
    reference = x.detach().cpu().requires_grad_()
    y, b = function(reference)
    (y.sum() + b.sum()).backward()
    torch.testing.assert_close(x.grad.cpu(), reference.grad)
