"""Small pieces of large joined tensors, which are computed by themselves: which are, and that results are the same."""

from __future__ import annotations

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile.backends.joined_pieces import LEAST, compute_apart
from tests.lowerings.gluon_kernels import needs_triton

ROWS = LEAST // 1024


def small(dt):
    return torch.log1p(dt.exp()).sigmoid() * dt


# Name -> (a large tensor that is joined of pieces, how many of them are computed by themselves).
JOINED = {
    "gated": (lambda z, x, dt: torch.cat([z * 2, x, small(dt)], -1), 1),
    "reshaped": (lambda z, x, dt: torch.cat([z * 2, x, small(dt).view(-1, 8)], -1), 1),
    "few ops": (lambda z, x, dt: torch.cat([z * 2, x, dt.exp() * 2], -1), 0),
    "half": (lambda z, x, dt: torch.cat([small(z), x], -1), 0),
    "strided": (lambda z, x, dt: torch.cat([z * 2, x, small(dt.t()).t()], -1), 0),
}
gated, _ = JOINED["gated"]


def traced(function, device="cuda", rows=ROWS):
    """The function's graph on no data."""
    with FakeTensorMode():
        args = [torch.empty(rows, width, device=device) for width in (512, 512, 8)]
    return make_fx(function)(*args)


def put(gm):
    return [n.args[0].target for n in gm.graph.nodes if n.target is torch.ops.aten.as_strided.default]


@pytest.mark.parametrize("name", JOINED)
def test_which_are_put_into_memory(name):
    function, apart = JOINED[name]
    gm = traced(function)
    for _ in range(2):  # and no more the second time
        compute_apart(gm.graph)
        gm.graph.lint()
        assert put(gm) == [torch.ops.aten.mul.Tensor] * apart


@pytest.mark.parametrize("change", [{"rows": ROWS // 2}, {"device": "cpu"}], ids=["small", "cpu"])
def test_whole_that_stays(change):
    gm = traced(gated, **change)
    compute_apart(gm.graph)
    assert not put(gm)


def test_all_readers_read_what_is_in_memory_and_results_are_the_same():
    def both(z, x, dt):
        made = small(dt)
        return torch.cat([z * 2, x, made], -1), made.sum(0)

    gm = traced(both)
    compute_apart(gm.graph)
    gm.recompile()
    (there,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.as_strided.default)
    assert len(there.args[0].users) == 1 and len(there.users) == 2
    args = [torch.randn(4, width) for width in (512, 512, 8)]
    there.args = (there.args[0], [4, 8], [8, 1])
    gm.recompile()
    for got, want in zip(gm(*args), both(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.end_to_end
@needs_triton
@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is not there is compiled for")
def test_inductor_makes_a_kernel_of_its_own():
    from tests.lowerings.hopper import inductor_for_hopper

    def compiled(apart):
        mode = FakeTensorMode()
        with mode:
            args = [torch.empty(ROWS, width, device="cuda:0") for width in (512, 512, 8)]
        gm = make_fx(lambda *args: (gated(*args),))(*args)
        if apart:
            compute_apart(gm.graph)
            gm.recompile()
        with inductor_for_hopper() as kernels, tracing(TracingContext(mode)):
            compile_fx_inner(gm, args)
        return len(kernels)

    assert compiled(apart=True) == 2 * compiled(apart=False) > 0
