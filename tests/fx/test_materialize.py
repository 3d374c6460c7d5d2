"""Operands that several kernels read through views: what is put into memory for them, once."""

from __future__ import annotations

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.fx.materialize import operands_of
from tests.lowerings.gluon_kernels import needs_triton

aten = torch.ops.aten


@torch.library.custom_op("materialize_test::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@kernel.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("materialize_test::writes", mutates_args=("x",))
def writes(x: torch.Tensor) -> None:
    x.add_(1)


def is_kernel(node):
    return node.target in (torch.ops.materialize_test.kernel.default, torch.ops.materialize_test.writes.default)


def table(read):
    """What reads a table of cosines."""
    return lambda x: read(x.cos() * 2)


# Name -> (what reads a table, what is put into memory for it).
READ = {
    "the same view": (table(lambda t: (kernel(t[:, None]), kernel(t[:, None]))), [aten.mul.Tensor]),
    "other views": (table(lambda t: (kernel(t[:3]), kernel(t[3:]), t.sum())), [aten.mul.Tensor]),
    "one view of a view": (table(lambda t: (kernel(t.t()[None]), kernel(t))), [aten.mul.Tensor]),
    "cast": (
        table(lambda t: [kernel((h := t.half())[None]), kernel(h.view(-1))]),
        [torch.ops.prims.convert_element_type.default],
    ),
    "a lookup": (lambda x: [kernel(y.view(-1)) for y in [x[[0, 2, 2]]] * 2], [aten.index.Tensor]),
    "one kernel": (table(lambda t: (kernel(t[:, None]), t.sum())), []),
    "no views": (table(lambda t: (kernel(t), kernel(t))), []),
    "an input": (lambda x: (kernel(x[:, None]), kernel(x[:, None])), []),
    "a kernel's result": (lambda x: (kernel(kernel(x).t()), kernel(kernel(x).t())), []),
    "a sum": (lambda x: (kernel(x.sum(0)[None]), kernel(x.sum(0)[:, None])), []),
    "written to": (table(lambda t: (writes(t.view(-1)), writes(t.t()), t)[2]), []),
}


def put(gm):
    return [n.args[0].target for n in gm.graph.nodes if n.target is aten.as_strided.default]


@pytest.mark.parametrize("name", READ)
def test_what_is_put_into_memory(name):
    function, targets = READ[name]
    given = torch.arange(12.0).view(6, 2)
    gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(given)
    for _ in range(2):  # and no more the second time
        operands_of(gm.graph, is_kernel)
        gm.graph.lint()
        assert put(gm) == targets
    gm.recompile()
    torch.testing.assert_close(gm(given.clone()), function(given.clone()), rtol=0, atol=0)


def test_symbolic_sizes():
    function = table(lambda t: (kernel(t[:, None]), kernel(t[:, None])))
    gm = make_fx(function, tracing_mode="symbolic")(torch.arange(12.0).view(6, 2))
    operands_of(gm.graph, is_kernel)
    gm.graph.lint()
    gm.recompile()
    assert put(gm) == [aten.mul.Tensor]
    for rows in (6, 9):
        given = torch.arange(2.0 * rows).view(rows, 2)
        torch.testing.assert_close(gm(given), function(given), rtol=0, atol=0)


@pytest.mark.end_to_end
@needs_triton
@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is not there is compiled for")
@pytest.mark.parametrize("once", [False, True])
def test_inductor_writes_the_table_once(once, monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    from tests.lowerings.hopper import inductor_for_hopper

    mode, stores, compiled = FakeTensorMode(), [], AsyncCompile.triton
    with mode:
        args = [torch.empty(512, 64, device="cuda:0")]
    gm = make_fx(table(lambda t: tuple(kernel(t.view(2, 256, 64)) for _ in range(3))))(*args)
    if once:
        operands_of(gm.graph, is_kernel)
        gm.recompile()

    def counted(self, name, source, *more, **named):
        stores.append(source.count("tl.store("))
        return compiled(self, name, source, *more, **named)

    monkeypatch.setattr(AsyncCompile, "triton", counted)
    with inductor_for_hopper(), tracing(TracingContext(mode)):
        compile_fx_inner(gm, args)
    assert stores == [1 if once else 3]
