"""`megacpp::mla_rope_kv`: what rotations keep alike, its values, and its shapes."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.mla_rope_kv import mla_rope_kv, mla_rope_kv_backward

from . import BOTH, pairwise, relative_error, turn
from .rotations import NOPE, B, R, Rotation, S, tables

H, V = 2, 4


def formula(kv, k_rope, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, out_dtype):
    """The op by its definition, in float64."""
    nope = kv.double()[..., :nope_dim]
    rope = turn(k_rope, cos, sin, interleaved_in, interleaved_out, False)
    rope = rope.expand(*nope.shape[:-1], rope.shape[-1])
    return torch.cat((rope, nope) if rope_first else (nope, rope), -1), kv.double()[..., nope_dim:]


class TestRotation(Rotation):
    op, formula, inverts, heads = mla_rope_kv, staticmethod(formula), False, H

    def shapes(self, nope=NOPE, outer=(B, S)):
        return [(*outer, H, nope + V), (*outer, 1, R)]


def operands(rand, outer=(B, S, H), shared=(B, S, 1), v=V, **kw):
    return rand(*outer, NOPE + v, **kw), rand(*shared, R, **kw)


# (kv's leading dimensions, k_rope's): heads first or last, one head, one position, no batch, a row for every head, a
# row shared by the whole batch
SHAPES = [((B, H, S), (B, 1, S)), ((B, S, 1), (B, S, 1)), ((B, 1, H), (B, 1, 1)), ((0, S, H), (0, S, 1)),
          ((1, 1, 1), (1, 1, 1)), ((B, S, H), (B, S, H)), ((B, S, H), (1, S, 1)), ((S, H), (S, 1))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("outer", "shared"), SHAPES, ids=str)
def test_shapes(rand, outer, shared):
    kv, k_rope = operands(rand, outer, shared, grad=True)
    args = (*tables(rand, [n if n == S else 1 for n in shared]), NOPE, False, False, False, torch.float64)
    opcheck(mla_rope_kv, (kv, k_rope, *args))
    torch.testing.assert_close(mla_rope_kv(kv, k_rope, *args), formula(kv, k_rope, *args))
    seeds = [rand(*outer, NOPE + R), rand(*outer, V)]
    got, want = (torch.autograd.grad(f(kv, k_rope, *args), (kv, k_rope), seeds) for f in (mla_rope_kv, formula))
    torch.testing.assert_close(got, want)


def test_without_values(rand):
    """v_dim 0: the keys come from a projection of their own."""
    kv, k_rope = operands(rand, v=0, grad=True)
    args = (*tables(rand), NOPE, False, False, False, torch.float64)
    opcheck(mla_rope_kv, (kv, k_rope, *args))
    k, v = mla_rope_kv(kv, k_rope, *args)
    assert v.shape == (B, S, H, 0)
    assert relative_error(k, formula(kv, k_rope, *args)[0]) < 1e-14
    assert torch.autograd.gradcheck(lambda kv, k: mla_rope_kv(kv, k, *args)[0], (kv, k_rope))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(rand, dtype, rope_dtype, out_dtype):
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", pairwise(BOTH, BOTH, BOTH), ids=str)
def test_opcheck_backward(rand, layout):
    grads = rand(B, S, H, NOPE + R), rand(B, S, H, V)
    opcheck(mla_rope_kv_backward, (*grads, *tables(rand), NOPE, *layout, [2], torch.float64, torch.float32))
