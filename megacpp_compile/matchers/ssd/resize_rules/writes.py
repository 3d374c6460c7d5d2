"""What is written into part of a tensor: a row of a matrix, a chunk's results or its state."""

from __future__ import annotations

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import argument, same_size, value
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat, pin
from megacpp_compile.matchers.ssd.tensor_ops import ResizeContext, axis, broadcast, rule_table

RULES, rule = rule_table()
SCATTERS = {aten.select_scatter.default, aten.slice_scatter.default}


@rule(aten.select_scatter.default)
def _select_scatter(r: ResizeContext, n: Node) -> list[Dim]:
    dims, written = list(r.dims[n.args[0]]), r.dims[n.args[1]]
    dim = axis(n.args[2], len(dims))  # type: ignore[arg-type]
    if flat(dims[dim]):
        pin([dims[dim]])
        size = value(n).shape[dim]
        r.axes.pick(dims[dim], n.args[3] % size if isinstance(size, int) else n.args[3], n.args[1])  # type: ignore[operator, arg-type]
    others = broadcast(r, [[*dims[:dim], *dims[dim + 1 :]], written])
    return [*others[:dim], dims[dim], *others[dim:]]


@rule(aten.slice_scatter.default)
def _slice_scatter(r: ResizeContext, n: Node) -> list[Dim]:
    dims, written = list(r.dims[n.args[0]]), list(r.dims[n.args[1]])
    dim = axis(argument(n, 2, "dim", 0), len(dims))
    whole = same_size(value(n).shape[dim], value(n.args[1]).shape[dim])
    if not whole:
        NoAxes.when(argument(n, 5, "step", 1) != 1, "rows written with a step")
        pin([dims[dim], written[dim]])
        r.axes.pick(dims[dim], (argument(n, 3, "start", 0) or 0, value(n.args[1]).shape[dim]), n.args[1])  # type: ignore[arg-type]
    others = broadcast(r, [[*d[:dim], *([d[dim]] if whole else [[]]), *d[dim + 1 :]] for d in (dims, written)])
    return [*others[:dim], dims[dim], *others[dim + 1 :]]
