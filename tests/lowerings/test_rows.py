"""Tokens x heads: the walk the RoPE kernels are launched over, and the blocks they start from."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from megacpp_compile.lowerings._kernels.rows import RowLayout, overlaps, rows_of

B, S, H, D = 2, 5, 3, 4


def walked(rows: RowLayout, index: int) -> list[list[int]]:
    """Where the walk finds tensor `index`: offsets by token and head."""
    first, second, head = rows.strides[index]
    return [
        [(t // rows.n1) * first + (t % rows.n1) * second + h * head for h in range(rows.heads)]
        for t in range(rows.tokens)
    ]


def offsets(t: torch.Tensor, shape: tuple[int, ...], head: int | None) -> list[list[int]]:
    """The same by the tensor's own strides, for an outer shape that `t` is broadcast to."""
    strides = t.expand(*shape, t.shape[-1]).stride()[:-1]
    tokens = [d for d in range(len(shape)) if d != head]
    heads = range(1 if head is None else shape[head])
    found = []
    for place in itertools.product(*(range(shape[d]) for d in tokens)):
        at = sum(i * strides[d] for i, d in zip(place, tokens, strict=True))
        found.append([at + h * (0 if head is None else strides[head]) for h in heads])
    return found


def contiguous(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def padded(*shape: int) -> torch.Tensor:
    return torch.empty(*shape[:-1], shape[-1] + 3)[..., 3:]


def heads_outermost(*shape: int) -> torch.Tensor:
    """(B, S, H, D) that lies as (H, B, S, D)."""
    return torch.empty(shape[2], shape[0], shape[1], shape[3]).permute(1, 2, 0, 3)


# label -> (full tensors, shared ones, head dimension, n1)
WALKS = {
    "heads last": ([contiguous(B, S, H, D)], [contiguous(1, S, 1, D)], 2, S),
    "heads first": ([contiguous(B, H, S, D)], [contiguous(1, 1, S, D)], 1, S),
    "one angle for all folds": ([contiguous(B, S, H, D)], [contiguous(1, 1, 1, D)], 2, B * S),
    "rows and positions fold": ([contiguous(B, S, H, D)], [contiguous(B, S, 1, D)], 2, B * S),
    "padded channels still fold": ([padded(B, S, H, D)], [contiguous(B, S, 1, D)], 2, B * S),
    "three token dimensions, two folded": ([contiguous(2, 3, S, H, D)], [contiguous(1, 1, S, 1, D)], 3, S),
    "three token dimensions, the later folded": ([contiguous(2, 3, S, H, D)], [contiguous(1, 3, S, 1, D)], 3, 3 * S),
    "the result folds less": ([heads_outermost(B, S, H, D), contiguous(B, H, S, D).transpose(1, 2)],
                              [contiguous(B, S, 1, D)], 2, S),
    "shared by rows": ([contiguous(B, S, H, D)], [contiguous(B, 1, 1, D), contiguous(1, S, 1, D)], 2, S),
    "one head": ([contiguous(B, S, 1, D)], [contiguous(B, S, 1, D)], None, B * S),
    "one position": ([contiguous(B, 1, H, D)], [contiguous(1, 1, 1, D)], 2, B),
    "no tokens": ([contiguous(0, S, H, D)], [contiguous(1, S, 1, D)], 2, S),
    "one of everything": ([contiguous(1, 1, 1, D)], [contiguous(1, 1, 1, D)], None, 1),
    "only heads": ([contiguous(H, D)], [contiguous(1, D)], 0, 1),
    "a table for every head": ([contiguous(B, S, H, D)], [contiguous(1, S, H, D)], 0, S * H),
}  # fmt: skip


@pytest.mark.parametrize("label", WALKS)
def test_walk(label):
    full, shared, head, n1 = WALKS[label]
    rows = rows_of(full, shared)
    assert isinstance(rows, RowLayout), rows
    shape = tuple(full[0].shape[:-1])
    assert (rows.head, rows.n1) == (head, n1)
    assert rows.tokens == torch.Size(shape).numel() // rows.heads
    assert rows.empty == (0 in shape)
    for i, t in enumerate((*full, *shared)):
        assert walked(rows, i) == offsets(t, shape, head), i
    assert all(stride[2] == 0 for stride in rows.strides[len(full) :])


REFUSED = {"rank": ([contiguous(B, S, H, D)], [contiguous(S, D)]),
           "not contiguous": ([contiguous(B, S, H, 2 * D)[..., ::2]], [contiguous(1, S, 1, D)]),
           "3 separate token dimensions": ([padded(2, 3, S, H, D).transpose(0, 1)], [contiguous(3, 1, S, 1, D)])}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    reason = rows_of(*REFUSED[words])
    assert isinstance(reason, str) and words in reason


def test_channels_of_tables_and_single_channels_need_not_be_adjacent():
    tables = [contiguous(1, S, 1, 2 * D)[..., ::2]] * 2
    assert isinstance(rows_of([contiguous(B, S, H, D)], tables), RowLayout)
    assert isinstance(rows_of([contiguous(B, S, H, 2)[..., ::2]], tables), RowLayout)


@pytest.mark.parametrize("heads", [1, H])
def test_packed(heads):
    """Tables are walked by position, which only the second coordinate has; the tokens are never taken for heads."""
    q, row, table = contiguous(7, heads, D), contiguous(7, 1, D), contiguous(9, 1, D)
    for shared in ([], [row]):
        rows = rows_of([q], [*shared, table, table], packed=True)
        assert (rows.tokens, rows.n1, rows.heads) == (7, 7, heads)
        assert walked(rows, 0) == offsets(q, (7, heads), None if heads == 1 else 1)
        assert rows.strides[-2:] == ((0, D, 0),) * 2
    assert rows_of([contiguous(1, heads, D)], [table, table], packed=True).tokens == 1


def test_packed_heads_outermost_and_more_dimensions():
    table = contiguous(9, 1, D)
    rows = rows_of([contiguous(H, 7, D).transpose(0, 1)], [table, table], packed=True)
    assert (rows.tokens, rows.heads, rows.heads_inside) == (7, H, False)
    reason = rows_of([contiguous(7, 2, H, D)], [contiguous(9, 1, 1, D)] * 2, packed=True)
    assert reason == "packed sequences have one token dimension"


@pytest.mark.parametrize("heads", [(1, 4), (4, 1), (4, 2)], ids=str)
def test_a_head_dimension_that_is_known_may_differ(heads):
    q, k = (contiguous(B, S, n, D) for n in heads)
    table = contiguous(1, S, 1, D)
    rows = rows_of([q, k], [table, table], head=2)
    assert (rows.tokens, rows.heads, rows.n1) == (B * S, heads[0], S)
    assert walked(rows, 0) == offsets(q, (B, S, heads[0]), 2)
    assert [row[0] for row in walked(rows, 1)] == [row[0] for row in offsets(k, (B, S, heads[1]), 2)]
    assert rows.strides[1][2] == (0 if heads[1] == 1 else D)


def test_heads_inside():
    table = contiguous(1, S, 1, D)
    assert rows_of([contiguous(B, S, H, D)], [table]).heads_inside
    assert not rows_of([contiguous(B, H, S, D).transpose(1, 2)], [table]).heads_inside
    assert rows_of([contiguous(1, 1, H, D)], [contiguous(1, 1, 1, D)]).heads_inside


@pytest.mark.parametrize(("t", "want"),
                         [(contiguous(2, 3, 4), False), (contiguous(2, 3, 4).permute(2, 0, 1), False),
                          (contiguous(2, 3, 8)[..., ::2], False), (contiguous(1, 3, 4).expand(2, 3, 4), True),
                          (contiguous(20).as_strided((3, 4), (2, 1)), True),
                          (contiguous(2, 1, 4).as_strided((2, 1, 4), (4, 0, 1)), False)],
                         ids=["contiguous", "permuted", "sliced", "expanded", "windows", "one_wide"])
def test_overlaps(t, want):
    assert overlaps(t) is want


def symbolic(*tensors: torch.Tensor, dynamic: tuple[int, ...]) -> tuple[ShapeEnv, list[torch.Tensor]]:
    """Fake tensors whose dimensions `dynamic` are symbolic; equal sizes share a symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    made = []
    for i, t in enumerate(tensors):
        kinds = [DimDynamic.DUCK if d in dynamic and t.shape[d] > 1 else DimDynamic.STATIC for d in range(t.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        source = torch._dynamo.source.ConstantSource(f"t{i}")
        made.append(mode.from_tensor(t, symbolic_context=context, source=source))
    return env, made


@pytest.mark.parametrize("heads_first", [False, True])
def test_symbolic_sizes_get_no_guards(heads_first):
    shapes = ((7, H, 11, D), (1, 1, 11, D)) if heads_first else ((7, 11, H, D), (1, 11, 1, D))
    env, (q, table) = symbolic(*map(torch.empty, shapes), dynamic=(0, 2) if heads_first else (0, 1))
    rows = rows_of([q, q.new_empty(q.shape)], [table, table])
    assert isinstance(rows, RowLayout), rows
    _ = rows.empty, rows.heads_inside, overlaps(q)
    assert rows.heads == H
    assert not env.guards
    assert (rows.tokens, rows.n1) == (77, 11)  # which does guard


def test_symbolic_number_of_sequences_gets_no_guard():
    pytest.importorskip("triton")
    from megacpp_compile.lowerings._kernels.rope_launch import angle_arguments

    q, table = torch.empty(12, H, D), torch.empty(9, 1, D // 2)
    env, (q, table, cu) = symbolic(q, table, torch.zeros(6, dtype=torch.int32), dynamic=(0,))
    rows = rows_of([q, q.new_empty(q.shape)], [table, table], packed=True)
    args = angle_arguments(table, table, rows, D, False, False, False, cu, q.dtype)
    assert args["STEPS"] >= 20 and not env.guards


@pytest.mark.parametrize("boundaries", range(2, 40))
def test_steps_of_the_search_suffice(boundaries):
    pytest.importorskip("triton")
    from megacpp_compile.lowerings._kernels.rope_launch import angle_arguments

    table, cu = torch.empty(9, 1, D // 2), torch.zeros(boundaries, dtype=torch.int32)
    q = torch.empty(12, H, D)
    rows = rows_of([q, q], [table, table], packed=True)
    steps = angle_arguments(table, table, rows, D, False, False, False, cu, q.dtype)["STEPS"]
    assert 2**steps >= boundaries


WORK = ("turn", "copy", "keys", "key gradients")


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("inside", [True, False], ids=["heads_last", "heads_first"])
def test_blocks(work, inside):
    """Sizes Triton takes, and no more rows a program than registers hold."""
    pytest.importorskip("triton")
    from megacpp_compile.lowerings._kernels.rope_launch import blocks

    table = contiguous(1, S, 1, D)
    for heads in (1, 2, 3, 8, 9, 12, 16, 17, 20, 24, 28, 32, 63, 64, 100, 128, 129):
        full = contiguous(B, S, heads, D) if inside else contiguous(B, heads, S, D).transpose(1, 2)
        found = blocks(rows_of([full], [table]), work)
        assert found.keys() == {"BT", "BH", "num_warps"}
        assert all(n > 0 and n & (n - 1) == 0 for n in found.values()), found
        assert found["BT"] * found["BH"] <= 64 and found["num_warps"] <= 8


def test_blocks_of_a_symbolic_number_of_heads():
    pytest.importorskip("triton")
    from megacpp_compile.lowerings._kernels.rope_launch import blocks

    env, (q, table) = symbolic(torch.empty(B, 11, 7, D), torch.empty(1, 11, 1, D), dynamic=(2,))
    rows = rows_of([q], [table])
    assert all(blocks(rows, work)["BT"] > 0 for work in WORK)
    assert not env.guards


def test_reordering_is_told_from_the_first_two_tensors():
    tables = [contiguous(1, S, 1, D)]
    inside, outside = contiguous(B, S, H, D), contiguous(B, H, S, D).transpose(1, 2)
    found = {}
    for name, pair in {"in": (inside, inside), "to": (inside, outside), "from": (outside, inside)}.items():
        rows = rows_of(pair, tables)
        assert isinstance(rows, RowLayout), rows
        found[name] = (rows.heads_inside, rows.reorders)
    assert found == {"in": (True, False), "to": (True, True), "from": (False, False)}
