"""Frames that take what a collective under way returns: captured like others, and waited for before they read it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from megacpp_compile import record
from tests.sharding import ranks

SITES = {"mla_rope_q": 1, "mla_rope_kv": 1, "down_norm_up": 2}


@pytest.fixture
def group(one_rank):
    return dist.group.WORLD


@torch._dynamo.disable
def under_way(x, group):
    y = collectives.all_to_all_single_autograd(x * 2, None, None, group)
    assert isinstance(y, collectives.AsyncCollectiveTensor)
    return y


def unwaited():
    return torch._C._distributed_c10d._get_work_registry_size()


def read(mla, y, *tables):
    return mla(y, *tables)


def written(mla, y, *tables):
    y.mul_(3.0)
    return mla(y, *tables)


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("how", "options", "across"),
    [
        pytest.param(read, {}, "call", id="read"),
        pytest.param(read, {"policy": "selective", "verify": "each"}, "call", id="policy"),
        pytest.param(read, {}, "break", id="across a break"),
        pytest.param(written, {}, "call", id="written"),
    ],
)
def test_it_enters_a_frame(no_kernels, group, how, options, across):
    mla, tables = ranks.MLA(), ranks.tables()
    x = torch.randn(2, 6, 32, requires_grad=True)

    def step(x, how):
        return how(mla, under_way(x, group), *tables)

    want = step(x, how)
    expected = torch.autograd.grad(want.square().sum(), (x, *mla.parameters()))
    before = unwaited()
    with record() as report:
        if across == "call":  # strict refuses graph breaks
            compiled = torch.compile(how, backend="megacpp", options={"strict": True, **options})
            got = step(x, compiled)
        else:
            got = torch.compile(step, backend="megacpp", options=options)(x, how)
    assert {name: n for name, n in report.counts.items() if n} == SITES
    assert unwaited() == before
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), (x, *mla.parameters())), expected)


def test_it_leaves_a_frame_as_it_came(no_kernels, group):
    def kept(y, w):
        return y, (y @ w).relu() @ w.mT

    y, w = under_way(torch.randn(4, 8), group), torch.randn(8, 8)
    with record() as report:
        same, product = torch.compile(kept, backend="megacpp")(y, w)
    assert [frame.captured for frame in report.frames] == [True]
    torch.testing.assert_close(product, kept(y, w)[1])
    torch.testing.assert_close(same.wait(), y.wait())
