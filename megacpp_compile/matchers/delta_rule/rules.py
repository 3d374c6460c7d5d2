"""How ops that spell a delta rule, beside those of a scan, run at other sizes: rows written into a matrix, triangular
systems and inverses, l2 norms, pieces of a split.

All are rational in their operands or roots of such, and branch on no data, as those of a scan (`ssd/tensor_ops.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.ssd.axes import Dim, NoAxes, equal, flat, is_one, length, pin
from megacpp_compile.matchers.ssd.resize_rules import RULES as SCAN_RULES
from megacpp_compile.matchers.ssd.tensor_ops import ResizeContext, RuleTable, argument, axis, broadcast, rule_table

aten = torch.ops.aten
_own, rule = rule_table()

ROOTS = {aten.sqrt.default, aten.rsqrt.default}
POWERS = {aten.pow.Tensor_Scalar, aten.square.default}
SOLVES = {aten.linalg_solve_triangular.default, aten.linalg_inv.default, aten.inverse.default}
SCATTERS = {aten.select_scatter.default, aten.slice_scatter.default}
PIECES = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}


@rule(*ROOTS, *POWERS, aten.reciprocal.default)
def _elementwise(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


@rule(aten.linalg_vector_norm.default)
def _norm(r: ResizeContext, n: Node) -> list[Dim]:
    dims, over = r.dims[n.args[0]], argument(n, 2, "dim")
    if not over:
        raise NoAxes("a norm of everything")
    gone = {axis(d, len(dims)) for d in over}
    keep = argument(n, 3, "keepdim", False)
    return [[] if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]


@rule(aten.linalg_solve_triangular.default)
def _solve(r: ResizeContext, n: Node) -> list[Dim]:
    a, b = (r.dims[x] for x in n.args[:2])
    if argument(n, 3, "left", True) is False:
        raise NoAxes("a system solved from the right")
    r.axes.same(a[-1], a[-2])
    r.axes.same(a[-1], b[-2])
    return [*broadcast(r, [a[:-2], b[:-2]]), b[-2], b[-1]]


@rule(aten.linalg_inv.default, aten.inverse.default)
def _inverse(r: ResizeContext, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    r.axes.same(dims[-1], dims[-2])
    return dims


@rule(aten.select_scatter.default)
def _select_scatter(r: ResizeContext, n: Node) -> list[Dim]:
    dims, written = list(r.dims[n.args[0]]), r.dims[n.args[1]]
    dim = axis(n.args[2], len(dims))  # type: ignore[arg-type]
    if flat(dims[dim]):
        pin([dims[dim]])
        r.axes.pick(dims[dim], n.args[3])
    others = broadcast(r, [[*dims[:dim], *dims[dim + 1 :]], written])
    return [*others[:dim], dims[dim], *others[dim:]]


@rule(aten.slice_scatter.default)
def _slice_scatter(r: ResizeContext, n: Node) -> list[Dim]:
    dims, written = list(r.dims[n.args[0]]), list(r.dims[n.args[1]])
    dim = axis(argument(n, 2, "dim", 0), len(dims))
    whole = equal(value(n).shape[dim], value(n.args[1]).shape[dim])
    if not whole:
        if argument(n, 5, "step", 1) != 1:
            raise NoAxes("rows written with a step")
        pin([dims[dim], written[dim]])
        r.axes.pick(dims[dim], (argument(n, 3, "start", 0) or 0, value(n.args[1]).shape[dim]))
    others = broadcast(r, [[*d[:dim], *([d[dim]] if whole else [[]]), *d[dim + 1 :]] for d in (dims, written)])
    return [*others[:dim], dims[dim], *others[dim + 1 :]]


def _run_pieces(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    dim = axis(argument(n, 2, "dim", 0), args[0].dim())
    return args[0].split([r.shape(piece)[dim] for piece in r.dims[n]], dim)


@rule(*PIECES, run=_run_pieces)
def _pieces(r: ResizeContext, n: Node) -> list[list[Dim]]:
    """What was put together before, or else pieces of their sizes."""
    dims = list(r.dims[n.args[0]])
    dim = axis(argument(n, 2, "dim", 0), len(dims))
    sizes = [v.shape[dim] for v in value(n)]
    known = (eq.parts for eq in r.axes.lengths if flat(eq.whole) == flat(dims[dim]))
    parts = next((one for one in known if _of(one, sizes)), None)
    if parts is None:
        pin([dims[dim]] * (len(sizes) > 1))
        r.axes.pick(dims[dim], *((sum(sizes[:i]), size) for i, size in enumerate(sizes)))
        parts = [[] if is_one(s) else r.axes.shorter(dims[dim], s) for s in sizes] if len(sizes) > 1 else [dims[dim]]
    return [[*dims[:dim], part, *dims[dim + 1 :]] for part in parts]


def _of(parts: list[Dim], sizes: list[Any]) -> bool:
    return len(parts) == len(sizes) and all(equal(length(p), s) for p, s in zip(parts, sizes, strict=True))


def _run_baddbmm(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    beta, alpha = n.kwargs.get("beta", 1), n.kwargs.get("alpha", 1)
    return beta * args[0] + alpha * (args[1] @ args[2])


@rule(aten.baddbmm.default, run=_run_baddbmm)
def _baddbmm(r: ResizeContext, n: Node) -> list[Dim]:
    first, a, b = (r.dims[x] for x in n.args)
    r.axes.same(a[-1], b[-2])
    return broadcast(r, [first, [*broadcast(r, [a[:-2], b[:-2]]), a[-2], b[-1]]])


RULES: RuleTable = {**SCAN_RULES, **_own}
__all__ = ["PIECES", "POWERS", "ROOTS", "RULES", "SCATTERS", "SOLVES"]
