"""The ops a subgraph may consist of to be run at other sizes (`resize.py`), and what their rules are given.

They are those of tensor algebra: sums, products, contractions, exponentials, views, and masks made of constants. All of
them are analytic in their operands, so that two compositions of them which agree on random operands agree on all (a
polynomial identity test). What branches on data (clamp, max, comparisons of operands) has no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import argument, same_size, value
from megacpp_compile.fx.views import (
    COMPOSITE_PERMUTATIONS,
    EXPANSIONS,
    FOLDS,
    PADS,
    PERMUTATIONS,
    REPETITIONS,
    RESHAPES,
    UNIT_DIMS,
)
from megacpp_compile.matchers.ssd.atoms import Dim, flat, is_one
from megacpp_compile.matchers.ssd.axes import AxisEquations

CREATION = {
    aten.ones.default, aten.zeros.default, aten.full.default, aten.arange.default, aten.arange.start,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.scalar_tensor.default, aten.eye.default,
    aten.empty.memory_format, aten.new_empty.default,
}  # fmt: skip
LIKE = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default}
# These make booleans, or branch on them: of constants only, or of documents (`packed.py`).
MASKS = {
    aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.ge.Scalar,
    aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar, aten.bitwise_not.default,
    aten.logical_not.default, aten.bitwise_and.Tensor, aten.logical_and.default, aten.bitwise_or.Tensor,
    aten.logical_or.default, aten.__and__.Tensor, aten.__or__.Tensor,
}  # fmt: skip
ELEMENTWISE = {
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar,
    aten.rsub.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.exp.default, aten.exp2.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.where.Scalar,
}  # fmt: skip
# Which operand of these must be such a one.
CONDITION = {
    aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1, aten.where.self: 0, aten.where.ScalarSelf: 0,
    aten.where.ScalarOther: 0, aten.where.Scalar: 0,
}  # fmt: skip
VIEWS = RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | COMPOSITE_PERMUTATIONS - {aten.numpy_T.default}
# Each element of the result is an element of the operand, or zero; of the steps that stand for a loop's, all are.
REPEATS = EXPANSIONS | REPETITIONS | PADS | set(short_loops.MARKS)
CONTRACTIONS = {aten.matmul.default, aten.bmm.default, aten.einsum.default}
EXPONENTIALS = {aten.exp.default, aten.exp2.default}


class ResizeContext(Protocol):
    """What a rule may ask of the subgraph that is resized."""

    axes: AxisEquations
    dims: dict[Node, Any]  # of every node before the rule's: the dimensions of a tensor, or those of several

    def shape(self, dims: Sequence[Dim]) -> list[int]:
        """The sizes of `dims` in the resized subgraph."""
        ...


DimsRule = Callable[[ResizeContext, Node], Any]
RunRule = Callable[[ResizeContext, Node, tuple[Any, ...]], Any]
RuleTable = dict[Any, tuple[DimsRule, RunRule]]


def rule_table() -> tuple[RuleTable, Callable[..., Callable[[DimsRule], DimsRule]]]:
    """An empty table of rules by op, and the decorator that enters a rule for its ops."""
    table: RuleTable = {}

    def rule(*targets: Any, run: RunRule = run_same_op) -> Callable[[DimsRule], DimsRule]:
        def register(dims: DimsRule) -> DimsRule:
            table.update(dict.fromkeys(targets, (dims, run)))
            return dims

        return register

    return table, rule


def run_same_op(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Any:
    """Run the same op, on whatever dtype and device its operands have: float64 on the CPU."""
    kwargs = {k: v for k, v in n.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")}
    return n.target(*args, **kwargs)  # type: ignore[operator]


def run_reshape(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Any:
    return args[0].reshape(r.shape(r.dims[n]))


def axis(dim: int, n: int) -> int:
    return dim + n if dim < 0 else dim


def broadcast(r: ResizeContext, operands: Sequence[list[Dim]]) -> list[Dim]:
    rank = max(map(len, operands))
    out: list[Dim] = [[] for _ in range(rank)]
    for dims in operands:
        for i, dim in enumerate(dims, rank - len(dims)):
            if not flat(dim):
                continue
            if flat(out[i]):
                r.axes.same(out[i], dim)
            else:
                out[i] = dim
    return out


def whole(n: Node) -> bool:
    """Whether `n` is a slice of everything."""
    return (
        n.target is aten.slice.Tensor
        and argument(n, 4, "step", 1) == 1
        and all(same_size(a, b) for a, b in zip(value(n).shape, value(n.args[0]).shape, strict=True))
    )


def only(n: Node) -> bool:
    """Whether `n` is the one element of a dimension."""
    return n.target is aten.select.int and is_one(value(n.args[0]).shape[n.args[1]])  # type: ignore[index]
