"""`megacpp::mla_rope_q`: what rotations keep alike, its inverse, and its shapes."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.mla_rope_q import mla_rope_q

from .rotations import FULL, LAYOUT, NOPE, B, R, Rotation, S, tables, turned

H = 2


def formula(q, cos, sin, *settings):
    return turned(q, cos, sin, *settings[:-1])


class TestRotation(Rotation):
    op, formula, heads = mla_rope_q, staticmethod(formula), H

    def shapes(self, nope=NOPE, outer=(B, S)):
        return [(*outer, H, nope + R)]


def test_a_table_for_each_head(rand):
    rotation = TestRotation()
    rotation.check(rand, rotation.operands(rand, grad=True), (*tables(rand, (B, S, H)), *rotation.settings()))


@FULL
@LAYOUT
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("outer", "nope"),
                         [((0, S, H), NOPE), ((B, 1, H), NOPE), ((1, 1, 1), NOPE), ((S, H), NOPE), ((B, S, H), 0)],
                         ids=str)
def test_shapes(rand, outer, nope):
    """No batch, one position, fewer dimensions, no unrotated channels."""
    q = rand(*outer, nope + R, grad=True)
    args = (*tables(rand, (*[1] * (len(outer) - 2), outer[-2], 1)), nope, False, False, False, False, torch.float64)
    opcheck(mla_rope_q, (q, *args))
    torch.testing.assert_close(mla_rope_q(q, *args), formula(q, *args))
    assert torch.autograd.grad(mla_rope_q(q, *args).sum(), q)[0].shape == q.shape
