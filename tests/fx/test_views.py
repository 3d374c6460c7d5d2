"""The table of views and casts says of each op what the op does to a tensor of numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

from megacpp_compile.fx import views

aten = torch.ops.aten
SETS = {
    name: getattr(views, name) for name in (
        "RESHAPES", "FOLDS", "UNIT_DIMS", "PERMUTATIONS", "COMPOSITE_PERMUTATIONS", "EXPANSIONS", "REPETITIONS",
        "PARTS", "SPLITS", "STRIDED", "IDENTITIES", "CASTS",
    )
}  # fmt: skip
ROWS = torch.arange(6.0).reshape(2, 1, 3)
ARGUMENTS = {
    aten.view.default: ([3, 2],), aten.reshape.default: ([3, 2],), aten._unsafe_view.default: ([3, 2],),
    aten.flatten.using_ints: (), aten.unflatten.int: (0, [2, 1]), aten.squeeze.default: (), aten.squeeze.dim: (1,),
    aten.squeeze.dims: ([1],), aten.unsqueeze.default: (0,), aten.transpose.int: (0, 2),
    aten.permute.default: ([2, 0, 1],), aten.t.default: (), aten.mT.default: (), aten.numpy_T.default: (),
    aten.movedim.int: (0, 2), aten.movedim.intlist: ([0], [2]), aten.expand.default: ([2, 4, 3],),
    aten.broadcast_to.default: ([2, 4, 3],), aten.repeat.default: ([2, 1, 1],), aten.repeat_interleave.self_int: (2, 0),
    aten.slice.Tensor: (2, 1, 3), aten.select.int: (2, 1), aten.unbind.int: (2,), aten.split.Tensor: (2, 2),
    aten.split_with_sizes.default: ([1, 2], 2), aten.chunk.default: (2, 2), aten.as_strided.default: ([3], [1]),
    aten.diagonal.default: (0, 0, 2), aten.unfold.default: (2, 2, 1), aten.alias.default: (), aten.clone.default: (),
    aten.contiguous.default: (), aten.lift_fresh_copy.default: (), aten._to_copy.default: (),
    aten.to.dtype: (torch.bfloat16,), aten.type_as.default: (torch.ones(1).bfloat16(),), aten.detach.default: (),
}  # fmt: skip
ALL = sorted({op for ops in SETS.values() for op in ops} | {views.DETACH}, key=str)


def run(op):
    x = (ROWS[:, 0] if op is aten.t.default else ROWS).clone()
    kwargs = {"dtype": torch.bfloat16} if op is aten._to_copy.default else {}
    return x, op(x, *ARGUMENTS[op], **kwargs)


def test_every_op_stands_once():
    for (a, first), (b, second) in itertools.combinations(SETS.items(), 2):
        assert not first & second, (a, b)
    assert views.COPIES < views.IDENTITIES and views.SQUEEZES < views.UNIT_DIMS


@pytest.mark.parametrize("op", sorted(views.RESHAPES | views.FOLDS | views.UNIT_DIMS, key=str), ids=str)
def test_reshapes_keep_the_order_of_elements(op):
    x, made = run(op)
    assert made.shape != x.shape and made.flatten().equal(x.flatten())


@pytest.mark.parametrize("op", sorted(views.PERMUTATIONS | views.COMPOSITE_PERMUTATIONS, key=str), ids=str)
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_permutations_move_dimensions(op):
    x, made = run(op)
    assert sorted(zip(made.shape, made.stride(), strict=True)) == sorted(zip(x.shape, x.stride(), strict=True))
    assert made.stride() != x.stride()


@pytest.mark.parametrize("op", sorted(views.EXPANSIONS | views.REPETITIONS, key=str), ids=str)
def test_repetitions_hold_every_element_as_often(op):
    x, made = run(op)
    times = made.numel() // x.numel()
    assert times > 1 and made.flatten().sort().values.equal(x.flatten().repeat_interleave(times))


@pytest.mark.parametrize("op", sorted(views.IDENTITIES | {views.DETACH}, key=str), ids=str)
def test_identities_keep_values_and_all_but_detach_the_gradient(op):
    x = ROWS.clone().requires_grad_()
    made = op(x)
    assert made.equal(x) and made.requires_grad == (op is not views.DETACH)


@pytest.mark.parametrize("op", sorted(views.CASTS, key=str), ids=str)
def test_casts_change_the_dtype_alone(op):
    x, made = run(op)
    assert made.dtype == torch.bfloat16 and made.shape == x.shape and made.float().equal(x)


@pytest.mark.parametrize("op", ALL, ids=str)
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_is_view_is_told_by_memory_and_not_by_composite_ops(op):
    x, made = run(op)
    first = made if isinstance(made, torch.Tensor) else made[0]
    shares = first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    node = fx.Graph().call_function(op)
    assert views.is_view(node) == (shares and (not composite or op is aten.reshape.default))


def test_predicates():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = ROWS
    assert not views.is_reshape(x) and not views.is_identity(x) and not views.is_cast(x) and not views.is_view(x)
    assert views.is_reshape(graph.call_function(aten.view.default, (x, [6])))
    assert not views.is_reshape(graph.call_function(aten.unsqueeze.default, (x, 0)))
    assert views.is_identity(graph.call_function(aten.clone.default, (x,)))
    assert not views.is_identity(graph.call_function(aten.detach.default, (x,)))


@pytest.mark.parametrize(("dtype", "device", "cast"), [
    (torch.bfloat16, "cpu", True), (torch.int64, "cpu", False), (torch.bfloat16, "meta", False),
])  # fmt: skip
def test_a_cast_is_between_floating_dtypes_of_one_device(dtype, device, cast):
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype, "device": device})
    x.meta["val"], node.meta["val"] = ROWS, ROWS.to(dtype=dtype, device=device)
    assert views.is_cast(node) == cast
