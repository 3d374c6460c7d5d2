"""`megacpp::rope_qk`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.rope_qk import rope_qk

from . import BOTH, LAYOUTS, STRIDES, TABLE_SHAPES, addresses, pairwise, relative_error, saved_by, strided, turn

B, S, H, KV_HEADS, NOPE, R = 2, 3, 4, 2, 5, 6


def tables(rand, leading=(1, S, 1), full=False, **kw):
    """Arbitrary numbers, no angles: a lowering may not lean on cos² + sin² = 1."""
    return tuple(rand(*leading, R if full else R // 2, **kw) for _ in range(2))


def operands(rand, nope=NOPE, outer=(B, S), **kw):
    return rand(*outer, H, nope + R, **kw), rand(*outer, KV_HEADS, nope + R, **kw)


def formula(q, k, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, inverse, out_dtype):
    """The op by its definition, in float64."""
    out = []
    for t in (q.double(), k.double()):
        r = t.shape[-1] - nope_dim
        nope, rope = (t[..., r:], t[..., :r]) if rope_first else (t[..., :nope_dim], t[..., nope_dim:])
        rope = turn(rope, cos, sin, interleaved_in, interleaved_out, inverse)
        out.append(torch.cat((rope, nope) if rope_first else (nope, rope), -1))
    return tuple(out)


def agree(got, want, tolerance=1e-14):
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < tolerance


# What `opcheck` asks depends on no two of these together.
PAIRS = pairwise(BOTH, BOTH, BOTH, BOTH)


@pytest.mark.parametrize("full", [False, True], ids=["half_tables", "full_tables"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(rand, layout, full):
    """opcheck, gradcheck and the formula, forward and inverse."""
    (q, k), (cos, sin) = operands(rand, grad=True), tables(rand, full=full)
    if (*layout, full) in PAIRS:
        opcheck(rope_qk, (q, k, cos, sin, NOPE, *layout, False, torch.float64))
    for inverse in (False, True):
        args = (cos, sin, NOPE, *layout, inverse, torch.float64)
        assert torch.autograd.gradcheck(lambda q, k, args=args: rope_qk(q, k, *args), (q, k), fast_mode=True)
        agree(rope_qk(q, k, *args), formula(q, k, *args))


@pytest.mark.parametrize("shape", TABLE_SHAPES)
def test_table_shapes(rand, shape):
    (q, k), (cos, sin) = operands(rand, grad=True), tables(rand, TABLE_SHAPES[shape](B, S, H))
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    opcheck(rope_qk, (q, k, *args))
    assert torch.autograd.gradcheck(lambda q, k: rope_qk(q, k, *args), (q, k), fast_mode=True)
    agree(rope_qk(q, k, *args), formula(q, k, *args))


@pytest.mark.parametrize(("outer", "nope"), [((0, S), NOPE), ((B, 1), NOPE), ((S,), NOPE), ((B, S), 0)], ids=str)
def test_shapes(rand, outer, nope):
    """No batch, one position, fewer dimensions, whole heads."""
    q, k = operands(rand, nope, outer, grad=True)
    args = (*tables(rand, (*[1] * (len(outer) - 1), outer[-1], 1)), nope, False, False, False, False, torch.float64)
    opcheck(rope_qk, (q, k, *args))
    for got, want in zip(rope_qk(q, k, *args), formula(q, k, *args), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_inputs(rand, kind):
    q, k = (strided(rand, kind, B, S, h, NOPE + R) for h in (H, KV_HEADS))
    cos, sin = (t.expand(B, S, 1, -1) for t in tables(rand))
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    opcheck(rope_qk, (q, k, *args))
    out = rope_qk(q, k, *args)
    assert all(t.is_contiguous() for t in out)
    agree(out, formula(q, k, *args))
    seeds = [strided(rand, kind, *t.shape).detach() for t in (q, k)]
    agree(*(torch.autograd.grad(f(q, k, *args), (q, k), seeds) for f in (rope_qk, formula)))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(rand, dtype, out_dtype):
    """Computed in float32 whatever comes in; one rounding at the end. The gradients have the dtype of q and k."""
    (q, k), (cos, sin) = operands(rand, dtype=dtype, grad=True), tables(rand, dtype=torch.float32)
    args = (cos, sin, NOPE, True, False, False, False, out_dtype)
    opcheck(rope_qk, (q, k, *args))
    out, want = rope_qk(q, k, *args), formula(q, k, *args)
    assert [t.dtype for t in out] == [out_dtype] * 2
    agree(out, want, 2 * torch.finfo(out_dtype).eps)
    seeds = [rand(*t.shape, dtype=out_dtype) for t in (q, k)]
    got = torch.autograd.grad(out, (q, k), seeds)
    assert [t.dtype for t in got] == [dtype] * 2
    agree(got, torch.autograd.grad(want, (q, k), [s.double() for s in seeds]), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("used", [0, 1], ids=["q_only", "k_only"])
def test_outputs_that_nobody_reads(rand, used):
    (q, k), (cos, sin) = operands(rand, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)

    def grads(function):
        out = function(q, k, *args)[used].square().sum()
        return torch.autograd.grad(out, (q, k), allow_unused=True, materialize_grads=True)

    for got, want in zip(grads(rope_qk), grads(formula), strict=True):
        torch.testing.assert_close(got, want)


def test_keeps_the_tables_only(rand):
    (q, k), (cos, sin) = operands(rand, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    assert saved_by(rope_qk, q, k, *args) == addresses(cos, sin)


@pytest.mark.parametrize("nope", [0, NOPE])
def test_inputs_are_neither_written_nor_returned(rand, nope):
    (q, k), (cos, sin) = operands(rand, nope), tables(rand)
    before = q.clone(), k.clone()
    out = rope_qk(q, k, cos, sin, nope, False, False, False, False, torch.float64)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    assert not addresses(*out) & addresses(q, k, cos, sin) and len(addresses(*out)) == 2


def test_autocast_does_not_reach_inside(rand):
    (q, k), (cos, sin) = operands(rand, dtype=torch.float32), tables(rand, dtype=torch.float32)
    args = (q, k, cos, sin, NOPE, True, False, False, False, torch.float32)
    want = rope_qk(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(rope_qk(*args), want, strict=True))


def test_second_derivative(rand):
    """The op is its own backward, so it can be differentiated again."""
    (q, k), (cos, sin) = operands(rand, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    assert torch.autograd.gradgradcheck(lambda q, k: [t.square() for t in rope_qk(q, k, *args)], (q, k))


def test_q_and_k_of_different_dtypes_get_their_own_gradients(rand):
    """autograd wants each gradient in its operand's dtype."""
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
