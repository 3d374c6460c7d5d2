"""How ops that spell a delta rule, beside those of a scan, run at other sizes: triangular systems and inverses, l2
norms.

All are rational in their operands or roots of such, and branch on no data, as those of a scan (`ssd/tensor_ops.py`);
but for a clamp at 0 of what is summed of gates. Where no gate is over 0, such a sum is at most 0 or at least 0 whatever
they are, or else a trial shows that it may be either. Who rests on it has to know that of the gates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import SUMS_OF_TENSORS
from megacpp_compile.fx.edit import argument, of_tensors
from megacpp_compile.fx.views import PARTS, SAME_VALUES
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes
from megacpp_compile.matchers.ssd.resize_rules import RULES as SCAN_RULES
from megacpp_compile.matchers.ssd.resize_rules.writes import SCATTERS
from megacpp_compile.matchers.ssd.tensor_ops import (
    REPEATS,
    VIEWS,
    ResizeContext,
    RuleTable,
    axis,
    broadcast,
    rule_table,
)

_own, rule = rule_table()

ROOTS = {aten.sqrt.default, aten.rsqrt.default}
POWERS = {aten.pow.Tensor_Scalar, aten.square.default}
SOLVES = {
    aten.linalg_solve_triangular.default, aten.triangular_solve.default, aten.linalg_solve.default,
    aten.linalg_solve_ex.default, aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.inverse.default,
}  # fmt: skip
CLAMPS = {aten.clamp.default, aten.clamp_max.default, aten.clamp_min.default}


@rule(*ROOTS, *POWERS, *CLAMPS, aten.reciprocal.default)
def _elementwise(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


@rule(aten.linalg_vector_norm.default)
def _norm(r: ResizeContext, n: Node) -> list[Dim]:
    dims, over = r.dims[n.args[0]], argument(n, 2, "dim")
    NoAxes.when(not over, "a norm of everything")
    gone = {axis(d, len(dims)) for d in over}
    keep = argument(n, 3, "keepdim", False)
    return [[] if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]


def _of_system(r: ResizeContext, a: list[Dim], b: list[Dim], left: bool = True) -> list[Dim]:
    r.axes.same(a[-1], a[-2])
    r.axes.same(a[-1], b[-2 if left else -1])
    return [*broadcast(r, [a[:-2], b[:-2]]), b[-2], b[-1]]


@rule(aten.linalg_solve_triangular.default)
def _solve_triangular(r: ResizeContext, n: Node) -> list[Dim]:
    a, b = (r.dims[x] for x in n.args[:2])
    return _of_system(r, a, b, argument(n, 3, "left", True))


@rule(aten.triangular_solve.default)
def _solve_and_copy(r: ResizeContext, n: Node) -> list[list[Dim]]:
    b, a = (r.dims[x] for x in n.args[:2])
    return [_of_system(r, a, b), a]


@rule(aten.linalg_solve.default)
def _solve(r: ResizeContext, n: Node) -> list[Dim]:
    a, b = (r.dims[x] for x in n.args[:2])
    NoAxes.when(
        len(b) != len(a) or argument(n, 2, "left", True) is False, "a system of one vector, or solved from the right"
    )
    return _of_system(r, a, b)


@rule(aten.linalg_solve_ex.default)
def _solve_and_tell(r: ResizeContext, n: Node) -> list[list[Dim]]:
    return [_solve(r, n), r.dims[n.args[0]][:-2]]


@rule(aten.linalg_inv.default, aten.inverse.default)
def _inverse(r: ResizeContext, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    r.axes.same(dims[-1], dims[-2])
    return dims


@rule(aten.linalg_inv_ex.default)
def _inverse_and_tell(r: ResizeContext, n: Node) -> list[list[Dim]]:
    return [_inverse(r, n), r.dims[n.args[0]][:-2]]


def _run_baddbmm(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    beta, alpha = n.kwargs.get("beta", 1), n.kwargs.get("alpha", 1)
    return beta * args[0] + alpha * (args[1] @ args[2])


@rule(aten.baddbmm.default, run=_run_baddbmm)
def _baddbmm(r: ResizeContext, n: Node) -> list[Dim]:
    first, a, b = (r.dims[x] for x in n.args)
    r.axes.same(a[-1], b[-2])
    return broadcast(r, [first, [*broadcast(r, [a[:-2], b[:-2]]), a[-2], b[-1]]])


_LINEAR = VIEWS | REPEATS | SAME_VALUES | PARTS | SUMS_OF_TENSORS | {aten.neg.default, aten.mul.Scalar}


def _clamps_sums(n: Node, steps: int = 12) -> bool:
    """Whether `n` is a clamp at 0 alone of differences of what is summed over positions."""
    bounds = [*n.args[1:], *n.kwargs.values()]
    if any(b is not None and (isinstance(b, Node) or b != 0) for b in bounds) or len(bounds) - bounds.count(None) != 1:
        return False
    pending, summed = [n.args[0]], False
    for _ in range(steps):
        if not pending:
            break
        m = pending.pop()
        if m.target is aten.cumsum.default:  # type: ignore[union-attr]
            summed = True
        elif m.target not in _LINEAR or m.target in SUMS_OF_TENSORS and not of_tensors(m):  # type: ignore[union-attr, arg-type]
            return False
        else:
            pending += m.all_input_nodes  # type: ignore[union-attr]
    return summed and not pending


RULES: RuleTable = {**SCAN_RULES, **_own}
WHEN = dict.fromkeys(CLAMPS, _clamps_sums)
__all__ = ["CLAMPS", "POWERS", "ROOTS", "RULES", "SCATTERS", "SOLVES", "WHEN"]
