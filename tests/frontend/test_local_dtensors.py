"""Which calls on DTensors are written on local tensors, and where the gradients of replicated ones are summed.

A process that stands for the first of two ranks compiles; nothing runs. That results and gradients are eager's is
`tests/sharding/test_dtensors.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacpp_compile import record
from megacpp_compile.frontend.capture import fake_inputs
from megacpp_compile.frontend.dtensors import calls_on_dtensors, is_dtensor
from megacpp_compile.frontend.local_dtensors import localize
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.lowerings._sum_gradient import sum_gradient
from tests.sharding import ranks

R, S, P = Replicate(), Shard, Partial()


@pytest.fixture(autouse=True)
def mesh():
    torch._dynamo.reset()  # `F.linear` itself is compiled here, and may be elsewhere
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield dist.init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def localized(function, mesh, *shapes, grad=True, dynamic=None):
    """(names of the calls of Dynamo's graph still on DTensors, those on local tensors, sums of gradients with what is
    summed) of `function` of DTensors: (local shape, placement) each."""
    seen = {}

    def look(gm, example_inputs):
        mode, _ = fake_inputs(example_inputs)
        new = localize(gm, mode, calls_on_dtensors(gm, example_inputs))
        holders = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        assert holders == [n.name for n in new.graph.nodes if n.op == "placeholder"]
        new.graph.lint()
        whole, local, sums = [], [], []
        for node in new.graph.nodes:
            name = getattr(node.target, "__name__", node.target)
            of_several = name == "getitem" and not isinstance(dynamo_value(node.args[0]), torch.Tensor)
            if node.op in ("placeholder", "output") or name.removeprefix("prim_") == "to_local" or of_several:
                continue
            if node.target is sum_gradient:
                sums.append(tuple(dynamo_value(node).shape))
            elif name not in ("dtensor_like", "dtensor_of"):
                values = [dynamo_value(node), *map(dynamo_value, node.all_input_nodes)]
                (whole if any(map(is_dtensor, values)) else local).append(name)
        seen["found"] = whole, local, sums
        return gm.forward

    given = [DTensor.from_local(torch.rand(s), mesh, [p], run_check=False).requires_grad_(grad) for s, p in shapes]
    torch.compile(function, backend=look, fullgraph=True, dynamic=dynamic)(*given)
    return seen["found"]


def expanded(k, x):
    return torch.cat([k.expand(-1, -1, x.shape[2], -1), x], -1)


LOCAL = {
    "elementwise": (lambda x: F.silu(x * 2) + 1, ((2, 6), S(0))),
    "heads": (lambda x: x.view(2, 6, 4, 8).transpose(1, 2).split([4, 4], -1)[0].neg(), ((2, 6, 16), S(2))),
    "unflatten": (lambda x: x.unflatten(-1, (4, 8)).flatten(-2), ((2, 6, 16), S(2))),
    "softmax": (lambda x: x.softmax(-1), ((2, 6), S(0))),
    "cast": (lambda x: x.to(torch.bfloat16).float(), ((2, 6), S(0))),
    "view_of_sums": (lambda x: x.view(12).unsqueeze(0), ((2, 6), P)),
    "replicated": (lambda x: x[:3].mean(), ((6, 6), R)),
    "row_parallel": (lambda x, w: F.linear(x, w), ((2, 6, 8), S(2)), ((5, 8), S(1))),
}


def parallel_loss(x):
    with loss_parallel():
        return x.log_softmax(-1)


WHOLE = {
    "softmax_across_ranks": (parallel_loss, ((2, 6), S(1))),
    "norm_across_ranks": (lambda x: F.layer_norm(x, (12,)), ((2, 6), S(1))),
    "chunks_across_ranks": (lambda x: x.chunk(2, -1)[0], ((2, 6), S(1))),
    "sharded_softmax": (lambda x: x.softmax(0), ((2, 6), S(0))),
    "sharded_slice": (lambda x: x[:3].neg(), ((2, 6), S(0))),
    "merged_shard": (lambda x: x.reshape(24).neg(), ((4, 3), S(1))),
    "mixed": (lambda x, y: x + y, ((2, 6), S(0)), ((4, 6), R)),
    "product_of_sums": (lambda x, y: x * y, ((2, 6), P), ((2, 6), P)),
    "bias_of_partial_sums": (F.linear, ((2, 6, 8), S(2)), ((5, 8), S(1)), ((5,), R)),
    "dropout": (lambda x: F.dropout(x, 0.5), ((2, 6), S(0))),
    "running_sum_along_shards": (lambda x: x.cumsum(0), ((2, 6), S(0))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", LOCAL)
def test_calls_of_which_a_rank_computes_its_part_are_local(case, mesh):
    function, *given = LOCAL[case]
    whole, local, sums = localized(function, mesh, *given)
    assert local and not whole and not sums


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", WHOLE)
def test_others_stay_calls_on_dtensors(case, mesh):
    function, *given = WHOLE[case]
    try:
        function(*(DTensor.from_local(torch.rand(s), mesh, [p], run_check=False) for s, p in given))
    except RuntimeError as error:
        pytest.skip(f"this release of torch has no such call on DTensors: {error}"[:200])
    whole, _, sums = localized(function, mesh, *given)
    assert whole and not sums


X, COLUMN = ((2, 3, 8), R), ((6, 8), S(0))
SUMMED = {
    # (function, operands, the shape of what is summed)
    "column_of_a_linear": (lambda x, w: F.linear(x.sin(), w), [X, COLUMN], (2, 3, 8)),
    "two_columns_sum_once": (
        lambda x, w, v: F.linear(y := x.sin(), w) + F.linear(y, v), [X, COLUMN, COLUMN], (2, 3, 8)
    ),
    "before_what_is_linear": (lambda x, w: F.linear(x.sin().view(6, 8).neg().unsqueeze(0), w), [X, COLUMN], (2, 3, 8)),
    "one_head_for_all": (lambda k, x: expanded(k.sin(), x), [((2, 3, 1, 8), R), ((2, 3, 2, 8), S(2))], (2, 3, 1, 8)),
    "what_is_read_whole_too": (lambda x, w: (F.linear(y := x.sin().neg(), w), y), [X, COLUMN], (2, 3, 8)),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SUMMED)
def test_gradients_of_what_ranks_share_are_summed_once(case, mesh):
    function, given, summed = SUMMED[case]
    whole, _, sums = localized(function, mesh, *given)
    assert not whole and sums == [summed]


def test_nothing_is_summed_that_has_no_gradient(mesh):
    function, given, _ = SUMMED["one_head_for_all"]
    assert localized(function, mesh, *given, grad=False)[2] == []


def test_inputs_sum_as_dtensor_does(mesh):
    """What enters the frame as a DTensor is told that its gradient is a partial sum; DTensor reduces it."""
    assert localized(F.linear, mesh, X, COLUMN) == ([], ["linear"], [])


@pytest.mark.end_to_end
@pytest.mark.usefixtures("no_kernels")
def test_backward_keeps_no_more_than_inductor_s(mesh):
    """The activation is recomputed, where a copy of it in front of the linear would have been kept."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mla = ranks.MLA()
            self.up, self.down = (torch.nn.Linear(32, 32, bias=False) for _ in "ab")

        def forward(self, x, cos, sin):
            x = x + self.mla(x, cos, sin)
            return x + self.down(F.silu(self.up(F.silu(x))))

    kept = {}
    for backend in ("inductor", "megacpp"):
        torch._dynamo.reset()
        plan = {f"mla.{name}": style for name, style in ranks.PLAN.items()}
        block = parallelize_module(Block(), mesh, plan | {"up": ColwiseParallel(), "down": RowwiseParallel()})
        own = {t.data_ptr() for p in block.parameters() for t in (p, p.to_local() if is_dtensor(p) else p)}
        sizes = {}

        def keep(t, sizes=sizes, own=own):
            if t.data_ptr() not in own:
                sizes[t.data_ptr()] = t.numel()
            return t

        given = torch.randn(64, 6, 32, requires_grad=True), torch.rand(6, 4), torch.rand(6, 4)
        compiled = torch.compile(block, backend=backend)
        with record() as report:
            compiled(*given)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = compiled(*given)
        assert out.requires_grad
        kept[backend] = sum(sizes.values())
    assert report.counts["down_norm_up"] == 2 and 0 < kept["megacpp"] < kept["inductor"]


def test_a_frame_of_several_lengths(mesh):
    function = lambda x, w: F.linear(x.sin(), w).view(x.shape[0], x.shape[1], 4, 3)  # noqa: E731
    whole, local, sums = localized(function, mesh, ((2, 5, 8), R), COLUMN, dynamic=True)
    assert not whole and {"linear", "view"} <= set(local) and len(sums) == 1
