"""What the three rotations keep alike: registration, gradients, the formula, what is kept and what is left alone."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from . import BOTH, LAYOUTS, STRIDES, TABLE_SHAPES, addresses, pairwise, strided, turn
from .agreement import tensors_of
from .contract import agree, assert_is, assert_keeps, assert_unread, differentiate, gradcheck

B, S, NOPE, R = 2, 3, 5, 6
FLAGS = (True, False, False)
# What `opcheck` asks depends on no two of these together.
PAIRS = pairwise(BOTH, BOTH, BOTH, BOTH)
FULL = pytest.mark.parametrize("full", [False, True], ids=["half_tables", "full_tables"])
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def tables(rand: Any, leading: Any = (1, S, 1), full: bool = False, **kw: Any) -> tuple[Tensor, ...]:
    """Arbitrary numbers, no angles: a lowering may not lean on cos² + sin² = 1."""
    return tuple(rand(*leading, R if full else R // 2, **kw) for _ in range(2))


def turned(t: Tensor, cos: Tensor, sin: Tensor, nope_dim: int, into: bool, out: bool, first: bool, inverse: bool):
    """One operand by the definition, in float64."""
    t, r = t.double(), t.shape[-1] - nope_dim
    nope, rope = (t[..., r:], t[..., :r]) if first else (t[..., :nope_dim], t[..., nope_dim:])
    rope = turn(rope, cos, sin, into, out, inverse)
    return torch.cat((rope, nope) if first else (nope, rope), -1)


class Rotation:
    """The tests of one of them. inverts: it has a flag for the inverse, and is its own backward."""

    op: ClassVar[Any]
    inverts: ClassVar[bool] = True
    heads: ClassVar[int]

    def formula(self, *args: Any) -> Any:
        """The op by its definition, in float64."""
        raise NotImplementedError

    def shapes(self, nope: int = NOPE, outer: tuple[int, ...] = (B, S)) -> list[tuple[int, ...]]:
        """Those of its operands."""
        raise NotImplementedError

    def operands(self, rand: Any, *shape: Any, **kw: Any) -> list[Tensor]:
        return [rand(*one, **kw) for one in self.shapes(*shape)]

    def settings(self, layout: Any = FLAGS, inverse: bool = False, nope: int = NOPE, dtype: Any = torch.float64):
        return nope, *layout, *([inverse] if self.inverts else []), dtype

    def check(self, rand: Any, operands: list[Tensor], behind: tuple[Any, ...]) -> None:
        args = (*operands, *behind)
        opcheck(self.op, args)
        assert_is(self.op, self.formula, rand, args, 1e-14, len(operands))

    @FULL
    @LAYOUT
    def test_layouts(self, rand, layout, full):
        operands, own = self.operands(rand, grad=True), tables(rand, full=full)
        if (*layout, full) in PAIRS:
            opcheck(self.op, (*operands, *own, *self.settings(layout)))
        for inverse in (False, True)[: 1 + self.inverts]:
            args = (*operands, *own, *self.settings(layout, inverse))
            gradcheck(self.op, args, fast_mode=True)
            agree(tensors_of(self.op(*args)), tensors_of(self.formula(*args)))

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("shape", TABLE_SHAPES)
    def test_table_shapes(self, rand, shape):
        own = tables(rand, TABLE_SHAPES[shape](B, S, self.heads))
        self.check(rand, self.operands(rand, grad=True), (*own, *self.settings()))

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("kind", STRIDES)
    def test_strided_inputs(self, rand, kind):
        operands = [strided(rand, kind, *shape) for shape in self.shapes()]
        args = (*operands, *(t.expand(B, S, 1, -1) for t in tables(rand)), *self.settings())
        opcheck(self.op, args)
        outs = tensors_of(self.op(*args))
        assert outs[0].is_contiguous() and (not self.inverts or all(t.is_contiguous() for t in outs))
        seeds = [strided(rand, kind, *t.shape).detach() for t in outs]
        agree(*(differentiate(f, args, seeds) for f in (self.op, self.formula)))

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
    def test_dtypes(self, rand, dtype, table_dtype, out_dtype):
        """Computed in float32 whatever comes in; one rounding at the end. Gradients have their operands' dtypes."""
        operands = self.operands(rand, dtype=dtype, grad=True)
        args = (*operands, *tables(rand, dtype=table_dtype), *self.settings(dtype=out_dtype))
        opcheck(self.op, args)
        outs, want = tensors_of(self.op(*args)), tensors_of(self.formula(*args))
        assert [t.dtype for t in outs] == [out_dtype, *([out_dtype if self.inverts else dtype] * (len(outs) - 1))]
        agree(outs, want, 2 * torch.finfo(out_dtype).eps)
        seeds = [rand(*t.shape, dtype=t.dtype) for t in outs]
        got = torch.autograd.grad(outs, operands, seeds)
        assert [t.dtype for t in got] == [dtype] * len(operands)
        agree(got, torch.autograd.grad(want, operands, [s.double() for s in seeds]), 2 * torch.finfo(dtype).eps)

    def test_outputs_that_nobody_reads(self, rand):
        args = (*self.operands(rand, grad=True), *tables(rand), *self.settings())
        for used in range(len(tensors_of(self.op(*args)))):
            assert_unread(self.op, self.formula, args, used)

    def test_keeps_the_tables_only(self, rand):
        own = tables(rand)
        assert_keeps(self.op, (*self.operands(rand, grad=True), *own, *self.settings()), own)

    @pytest.mark.parametrize("nope", [0, NOPE])
    def test_inputs_are_neither_written_nor_returned(self, rand, nope):
        """In float64 nothing needs converting, so the body could be tempted to hand back its input's memory."""
        operands, own = self.operands(rand, nope), tables(rand)
        before = [t.clone() for t in operands]
        outs = tensors_of(self.op(*operands, *own, *self.settings((False,) * 3, nope=nope)))
        assert all(map(torch.equal, operands, before))
        assert not addresses(*outs) & addresses(*operands, *own) and len(addresses(*outs)) == len(outs)

    def test_second_derivative(self, rand):
        if self.inverts:
            args = (*tables(rand), *self.settings())
            operands = self.operands(rand, grad=True)
            square = lambda *given: [t.square() for t in tensors_of(self.op(*given, *args))]  # noqa: E731
            assert torch.autograd.gradgradcheck(square, operands)
