"""`megacpp::rope_qk`: what rotations keep alike, its shapes, and packed sequences."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings._registry import choose
from megacpp_compile.lowerings.rope_qk import rope_qk

from . import addresses, relative_error, saved_by
from .contract import agree
from .rotations import NOPE, B, R, Rotation, S, tables, turned

H, KV_HEADS = 4, 2


def formula(q, k, cos, sin, *settings):
    return tuple(turned(t, cos, sin, *settings[:-1]) for t in (q, k))


class TestRotation(Rotation):
    op, formula, heads = rope_qk, staticmethod(formula), H

    def shapes(self, nope=NOPE, outer=(B, S)):
        return [(*outer, heads, nope + R) for heads in (H, KV_HEADS)]


def operands(rand, *shape, **kw):
    return TestRotation().operands(rand, *shape, **kw)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("outer", "nope"), [((0, S), NOPE), ((B, 1), NOPE), ((S,), NOPE), ((B, S), 0)], ids=str)
def test_shapes(rand, outer, nope):
    """No batch, one position, fewer dimensions, whole heads."""
    q, k = operands(rand, nope, outer, grad=True)
    args = (*tables(rand, (*[1] * (len(outer) - 1), outer[-1], 1)), nope, False, False, False, False, torch.float64)
    opcheck(rope_qk, (q, k, *args))
    torch.testing.assert_close(rope_qk(q, k, *args), formula(q, k, *args))


def test_q_and_k_of_different_dtypes_get_their_own_gradients(rand):
    q, k = operands(rand)
    q, k = q.bfloat16().requires_grad_(), k.float().requires_grad_()
    args = (*tables(rand, dtype=torch.float32), NOPE, False, False, False, False, torch.float32)
    out = rope_qk(q, k, *args)
    got = torch.autograd.grad([t.square().sum() for t in out], (q, k))
    want = torch.autograd.grad([t.square().sum() for t in formula(q, k, *args)], (q, k))
    assert [t.dtype for t in got] == [torch.bfloat16, torch.float32]
    assert relative_error(got[1], want[1]) < 1e-6


PACKED = [(0, 3, 10, 11), (0, 0, 4, 4, 9, 9), (0, 7), (0, 4)]


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("boundaries", PACKED, ids=str)
def test_packed(rand, boundaries, integer):
    """Tables by position in a document give what tables gathered for every token give; tokens behind the last boundary
    count on from it, to the tables' end."""
    tokens, positions = 11, 7
    q, k = rand(tokens, H, NOPE + R, grad=True), rand(tokens, KV_HEADS, NOPE + R, grad=True)
    cos, sin = tables(rand, (positions, 1))
    cu_seqlens = torch.tensor(boundaries, dtype=integer)
    starts = [max(b for b in boundaries if b <= t) for t in range(tokens)]
    rows = torch.tensor([min(t - start, positions - 1) for t, start in enumerate(starts)])
    args = (NOPE, True, False, False, False, torch.float64)
    if (integer, boundaries) in ((torch.int32, PACKED[0]), (torch.int64, PACKED[1])):
        opcheck(rope_qk, (q, k, cos, sin, *args, cu_seqlens))
    agree(rope_qk(q, k, cos, sin, *args, cu_seqlens), formula(q, k, cos[rows], sin[rows], *args))
    assert torch.autograd.gradcheck(lambda q, k: rope_qk(q, k, cos, sin, *args, cu_seqlens), (q, k), fast_mode=True)


def test_packed_keeps_the_tables_by_position(rand):
    q, k = rand(9, H, NOPE + R, grad=True), rand(9, KV_HEADS, NOPE + R, grad=True)
    (cos, sin), cu_seqlens = tables(rand, (5, 1)), torch.tensor([0, 4, 9])
    args = (cos, sin, NOPE, True, False, False, False, torch.float64, cu_seqlens)
    assert saved_by(rope_qk, q, k, *args) == addresses(cos, sin, cu_seqlens)


def test_what_lies_before_the_first_boundary_reads_no_row_outside_of_the_tables(rand):
    q, k = rand(5, H, R), rand(5, KV_HEADS, R)
    cos, sin = tables(rand, (3, 1))
    args = (0, False, False, False, False, torch.float64)
    rows = torch.tensor([0, 0, 0, 1, 2])
    got = rope_qk(q, k, cos, sin, *args, torch.tensor([2, 5]))
    agree(got, formula(q, k, cos[rows], sin[rows], *args))


def test_where_inductors_own_fusion_is_as_fast(rand):
    for nope, served in ((0, "reference"), (NOPE, "cuda_triton")):
        args = (*(t.expand(12000, *t.shape[1:]) for t in operands(rand, nope, (1, 9))), *tables(rand, (1, 9, 1)))
        args += nope, False, False, False, False, torch.float64
        choice = choose(torch.ops.megacpp.rope_qk.default, "cuda", args)
        assert choice.effective == served and ("inductor-is-faster" in choice.reason) == (nope == 0), choice
