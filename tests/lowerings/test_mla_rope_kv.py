"""`megacpp::mla_rope_kv`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.mla_rope_kv import mla_rope_kv, mla_rope_kv_backward

from . import BOTH, LAYOUTS, STRIDES, TABLE_SHAPES, addresses, pairwise, relative_error, saved_by, strided, turn

B, S, H, NOPE, V, R = 2, 3, 2, 5, 4, 6


def tables(rand, leading=(1, S, 1), full=False, **kw):
    """Arbitrary numbers, no angles: a lowering may not lean on cos² + sin² = 1."""
    return tuple(rand(*leading, R if full else R // 2, **kw) for _ in range(2))


def operands(rand, outer=(B, S, H), shared=(B, S, 1), v=V, **kw):
    return rand(*outer, NOPE + v, **kw), rand(*shared, R, **kw)


def formula(kv, k_rope, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, out_dtype):
    """The op by its definition, in float64."""
    nope = kv.double()[..., :nope_dim]
    rope = turn(k_rope, cos, sin, interleaved_in, interleaved_out, False)
    rope = rope.expand(*nope.shape[:-1], rope.shape[-1])
    return torch.cat((rope, nope) if rope_first else (nope, rope), -1), kv.double()[..., nope_dim:]


def agree(got, want, tolerance=1e-14):
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < tolerance


# What `opcheck` asks depends on no two of these together.
PAIRS = pairwise(BOTH, BOTH, BOTH, BOTH)


@pytest.mark.parametrize("full", [False, True], ids=["half_tables", "full_tables"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(rand, layout, full):
    """opcheck, gradcheck and the formula."""
    (kv, k_rope), (cos, sin) = operands(rand, grad=True), tables(rand, full=full)
    args = (cos, sin, NOPE, *layout, torch.float64)
    if (*layout, full) in PAIRS:
        opcheck(mla_rope_kv, (kv, k_rope, *args))
    assert torch.autograd.gradcheck(lambda kv, k: mla_rope_kv(kv, k, *args), (kv, k_rope), fast_mode=True)
    agree(mla_rope_kv(kv, k_rope, *args), formula(kv, k_rope, *args))


@pytest.mark.parametrize("shape", TABLE_SHAPES)
def test_table_shapes(rand, shape):
    (kv, k_rope), (cos, sin) = operands(rand, grad=True), tables(rand, TABLE_SHAPES[shape](B, S, H))
    args = (cos, sin, NOPE, True, False, False, torch.float64)
    opcheck(mla_rope_kv, (kv, k_rope, *args))
    assert torch.autograd.gradcheck(lambda kv, k: mla_rope_kv(kv, k, *args), (kv, k_rope), fast_mode=True)
    agree(mla_rope_kv(kv, k_rope, *args), formula(kv, k_rope, *args))


# (kv's leading dimensions, k_rope's): heads first or last, one head, one position, no batch, a row for every head, a
# row shared by the whole batch
SHAPES = [
    ((B, H, S), (B, 1, S)),
    ((B, S, 1), (B, S, 1)),
    ((B, 1, H), (B, 1, 1)),
    ((0, S, H), (0, S, 1)),
    ((1, 1, 1), (1, 1, 1)),
    ((B, S, H), (B, S, H)),
    ((B, S, H), (1, S, 1)),
    ((S, H), (S, 1)),
]


@pytest.mark.parametrize(("outer", "shared"), SHAPES, ids=str)
def test_shapes(rand, outer, shared):
    kv, k_rope = operands(rand, outer, shared, grad=True)
    args = (*tables(rand, [n if n == S else 1 for n in shared]), NOPE, False, False, False, torch.float64)
    opcheck(mla_rope_kv, (kv, k_rope, *args))
    for got, want in zip(mla_rope_kv(kv, k_rope, *args), formula(kv, k_rope, *args), strict=True):
        torch.testing.assert_close(got, want)
    seeds = [rand(*outer, NOPE + R), rand(*outer, V)]
    got, want = (torch.autograd.grad(f(kv, k_rope, *args), (kv, k_rope), seeds) for f in (mla_rope_kv, formula))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_without_values(rand):
    """v_dim 0: the keys come from a projection of their own."""
    kv, k_rope = operands(rand, v=0, grad=True)
    args = (*tables(rand), NOPE, False, False, False, torch.float64)
    opcheck(mla_rope_kv, (kv, k_rope, *args))
    k, v = mla_rope_kv(kv, k_rope, *args)
    assert v.shape == (B, S, H, 0)
    assert relative_error(k, formula(kv, k_rope, *args)[0]) < 1e-14
    assert torch.autograd.gradcheck(lambda kv, k: mla_rope_kv(kv, k, *args)[0], (kv, k_rope))


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_inputs(rand, kind):
    kv, k_rope = strided(rand, kind, B, S, H, NOPE + V), strided(rand, kind, B, S, 1, R)
    cos, sin = (t.expand(B, S, 1, -1) for t in tables(rand))
    args = (cos, sin, NOPE, True, False, False, torch.float64)
    opcheck(mla_rope_kv, (kv, k_rope, *args))
    out = mla_rope_kv(kv, k_rope, *args)
    assert out[0].is_contiguous()
    agree(out, formula(kv, k_rope, *args))
    seeds = [strided(rand, kind, *t.shape).detach() for t in out]
    agree(*(torch.autograd.grad(f(kv, k_rope, *args), (kv, k_rope), seeds) for f in (mla_rope_kv, formula)))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(rand, dtype, rope_dtype, out_dtype):
    """Keys in `out_dtype`, values as they came, every gradient in its operand's dtype."""
    kv, k_rope = operands(rand)
    kv, k_rope = kv.to(dtype).requires_grad_(), k_rope.to(rope_dtype).requires_grad_()
    args = (*tables(rand, dtype=torch.float32), NOPE, True, False, False, out_dtype)
    if (dtype, rope_dtype, out_dtype) in pairwise(*[(torch.float32, torch.bfloat16)] * 3):
        opcheck(mla_rope_kv, (kv, k_rope, *args))
    (k, v), (want_k, want_v) = mla_rope_kv(kv, k_rope, *args), formula(kv, k_rope, *args)
    assert (k.dtype, v.dtype) == (out_dtype, dtype)
    assert torch.equal(v.double(), want_v)
    assert relative_error(k, want_k) < 2 * torch.finfo(out_dtype).eps
    seeds = rand(*k.shape, dtype=out_dtype), rand(*v.shape, dtype=dtype)
    got = torch.autograd.grad((k, v), (kv, k_rope), seeds)
    want = torch.autograd.grad((want_k, want_v), (kv, k_rope), [s.double() for s in seeds])
    for g, w, t in zip(got, want, (kv, k_rope), strict=True):
        assert g.dtype == t.dtype
        assert relative_error(g, w) < 2 * torch.finfo(t.dtype).eps


@pytest.mark.parametrize("used", [0, 1], ids=["k_only", "v_only"])
def test_outputs_that_nobody_reads(rand, used):
    (kv, k_rope), (cos, sin) = operands(rand, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, torch.float64)

    def grads(function):
        out = function(kv, k_rope, *args)[used].square().sum()
        return torch.autograd.grad(out, (kv, k_rope), allow_unused=True, materialize_grads=True)

    for got, want in zip(grads(mla_rope_kv), grads(formula), strict=True):
        torch.testing.assert_close(got, want)


def test_keeps_the_tables_only(rand):
    (kv, k_rope), (cos, sin) = operands(rand, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, torch.float64)
    assert saved_by(mla_rope_kv, kv, k_rope, *args) == addresses(cos, sin)


def test_inputs_are_neither_written_nor_returned(rand):
    (kv, k_rope), (cos, sin) = operands(rand), tables(rand)
    before = kv.clone(), k_rope.clone()
    out = mla_rope_kv(kv, k_rope, cos, sin, NOPE, False, False, False, torch.float64)
    assert torch.equal(kv, before[0]) and torch.equal(k_rope, before[1])
    assert not addresses(*out) & addresses(kv, k_rope, cos, sin)


def test_autocast_does_not_reach_inside(rand):
    (kv, k_rope), (cos, sin) = operands(rand, dtype=torch.float32), tables(rand, dtype=torch.float32)
    args = (kv, k_rope, cos, sin, NOPE, True, False, False, torch.float32)
    want = mla_rope_kv(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(mla_rope_kv(*args), want, strict=True))


@pytest.mark.parametrize("layout", pairwise(BOTH, BOTH, BOTH), ids=str)
def test_opcheck_backward(rand, layout):
    grads = rand(B, S, H, NOPE + R), rand(B, S, H, V)
    opcheck(mla_rope_kv_backward, (*grads, *tables(rand), NOPE, *layout, [2], torch.float64, torch.float32))
