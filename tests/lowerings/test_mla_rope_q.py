"""`megacpp::mla_rope_q`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.mla_rope_q import mla_rope_q

from . import LAYOUTS, STRIDES, TABLE_SHAPES, addresses, relative_error, saved_by, strided, turn

B, S, H, NOPE, R = 2, 3, 2, 5, 6


def tables(rand, leading=(1, S, 1), full=False, **kw):
    """Arbitrary numbers, no angles: a lowering may not lean on cos² + sin² = 1."""
    return tuple(rand(*leading, R if full else R // 2, **kw) for _ in range(2))


def formula(q, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, inverse, out_dtype):
    """The op by its definition, in float64."""
    q = q.double()
    r = q.shape[-1] - nope_dim
    nope, rope = (q[..., r:], q[..., :r]) if rope_first else (q[..., :nope_dim], q[..., nope_dim:])
    rope = turn(rope, cos, sin, interleaved_in, interleaved_out, inverse)
    return torch.cat((rope, nope) if rope_first else (nope, rope), -1)


@pytest.mark.parametrize("full", [False, True], ids=["half_tables", "full_tables"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(rand, layout, full):
    """opcheck, gradcheck and the formula, forward and inverse."""
    q, (cos, sin) = rand(B, S, H, NOPE + R, grad=True), tables(rand, full=full)
    opcheck(mla_rope_q, (q, cos, sin, NOPE, *layout, False, torch.float64))
    for inverse in (False, True):
        args = (cos, sin, NOPE, *layout, inverse, torch.float64)
        assert torch.autograd.gradcheck(lambda q, args=args: mla_rope_q(q, *args), (q,), fast_mode=True)
        assert relative_error(mla_rope_q(q, *args), formula(q, *args)) < 1e-14


@pytest.mark.parametrize("full", [False, True], ids=["half_tables", "full_tables"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_inverse_is_the_transpose(rand, layout, full):
    q, (cos, sin) = rand(B, S, H, NOPE + R), tables(rand, full=full)
    g = rand(*q.shape)
    turned, back = (
        mla_rope_q(t, cos, sin, NOPE, *layout, inverse, torch.float64) for t, inverse in ((q, False), (g, True))
    )
    torch.testing.assert_close((turned * g).sum(), (q * back).sum())


@pytest.mark.parametrize("layout", [(False, False, False), (True, False, False), (True, True, False)], ids=str)
def test_inverse_undoes_a_rotation_by_angles(rand, layout):
    q, angle = rand(B, S, H, NOPE + R), rand(1, S, 1, R // 2)
    there = mla_rope_q(q, angle.cos(), angle.sin(), NOPE, *layout, False, torch.float64)
    back = mla_rope_q(there, angle.cos(), angle.sin(), NOPE, *layout, True, torch.float64)
    torch.testing.assert_close(back, q)


@pytest.mark.parametrize("shape", [*TABLE_SHAPES, "one_for_each_head"])
def test_table_shapes(rand, shape):
    leading = TABLE_SHAPES[shape](B, S, H) if shape in TABLE_SHAPES else (B, S, H)
    q, (cos, sin) = rand(B, S, H, NOPE + R, grad=True), tables(rand, leading)
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    opcheck(mla_rope_q, (q, *args))
    assert torch.autograd.gradcheck(lambda q: mla_rope_q(q, *args), (q,))
    assert relative_error(mla_rope_q(q, *args), formula(q, *args)) < 1e-14


@pytest.mark.parametrize(
    ("outer", "nope"),
    [((0, S, H), NOPE), ((B, 1, H), NOPE), ((1, 1, 1), NOPE), ((S, H), NOPE), ((B, S, H), 0)],
    ids=str,
)
def test_shapes(rand, outer, nope):
    """No batch, one position, fewer dimensions, no unrotated channels."""
    q = rand(*outer, nope + R, grad=True)
    args = (*tables(rand, (*[1] * (len(outer) - 2), outer[-2], 1)), nope, False, False, False, False, torch.float64)
    opcheck(mla_rope_q, (q, *args))
    torch.testing.assert_close(mla_rope_q(q, *args), formula(q, *args))
    assert torch.autograd.grad(mla_rope_q(q, *args).sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_inputs(rand, kind):
    q = strided(rand, kind, B, S, H, NOPE + R)
    cos, sin = (t.expand(B, S, H, -1) for t in tables(rand))
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    opcheck(mla_rope_q, (q, *args))
    out = mla_rope_q(q, *args)
    assert out.is_contiguous() and relative_error(out, formula(q, *args)) < 1e-14
    grad = strided(rand, kind, *q.shape).detach()
    (got,), (want,) = (torch.autograd.grad(f(q, *args), q, grad) for f in (mla_rope_q, formula))
    assert relative_error(got, want) < 1e-14


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_dtypes(rand, dtype, table_dtype, out_dtype):
    """Computed in float32 whatever comes in; one rounding at the end. The gradient has the dtype of q."""
    q, (cos, sin) = rand(B, S, H, NOPE + R, dtype=dtype, grad=True), tables(rand, dtype=table_dtype)
    args = (cos, sin, NOPE, True, False, False, False, out_dtype)
    opcheck(mla_rope_q, (q, *args))
    out, want = mla_rope_q(q, *args), formula(q, *args)
    assert out.dtype == out_dtype
    assert relative_error(out, want) < 2 * torch.finfo(out_dtype).eps
    grad = rand(*q.shape, dtype=out_dtype)
    (got,) = torch.autograd.grad(out, q, grad)
    (wanted,) = torch.autograd.grad(want, q, grad.double())
    assert got.dtype == dtype
    assert relative_error(got, wanted) < 2 * torch.finfo(dtype).eps


def test_keeps_the_tables_only(rand):
    q, (cos, sin) = rand(B, S, H, NOPE + R, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    assert saved_by(mla_rope_q, q, *args) == addresses(cos, sin)


@pytest.mark.parametrize("nope", [0, NOPE])
def test_the_input_is_neither_written_nor_returned(rand, nope):
    """In float64 nothing needs converting, so the body could be tempted to hand back its input's memory."""
    q, (cos, sin) = rand(B, S, H, nope + R), tables(rand)
    before = q.clone()
    out = mla_rope_q(q, cos, sin, nope, False, False, False, False, torch.float64)
    assert torch.equal(q, before) and not addresses(out) & addresses(q, cos, sin)


def test_autocast_does_not_reach_inside(rand):
    q, (cos, sin) = rand(B, S, H, NOPE + R, dtype=torch.float32), tables(rand, dtype=torch.float32)
    args = (q, cos, sin, NOPE, True, False, False, False, torch.float32)
    want = mla_rope_q(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mla_rope_q(*args), want)


def test_second_derivative(rand):
    """The op is its own backward, so it can be differentiated again."""
    q, (cos, sin) = rand(B, S, H, NOPE + R, grad=True), tables(rand)
    args = (cos, sin, NOPE, True, False, False, False, torch.float64)
    assert torch.autograd.gradgradcheck(lambda q: mla_rope_q(q, *args).square(), (q,))
