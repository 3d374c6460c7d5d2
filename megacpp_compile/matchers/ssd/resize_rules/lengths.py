"""What makes dimensions longer or shorter: padding, slices, pieces of a split, concatenation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import argument, same_size, value
from megacpp_compile.fx.filled import padded_with
from megacpp_compile.fx.views import SPLITS
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat, fresh, is_one, length, pin
from megacpp_compile.matchers.ssd.tensor_ops import ResizeContext, axis, broadcast, rule_table
from megacpp_compile.reader.parts import part_of

RULES, rule = rule_table()


def _padding(n: Node) -> list[tuple[int, Any, Any]]:
    """(dimension, in front, behind) of what is padded."""
    amounts, rank = n.args[1], value(n).dim()
    NoAxes.when(padded_with(n) != 0, "padding with other than zeros")
    pairs = zip(amounts[0::2], amounts[1::2], strict=True)  # type: ignore[index]
    found = [(rank - 1 - i, value(front), value(behind)) for i, (front, behind) in enumerate(pairs)]
    return [(d, f, b) for d, f, b in found if not (_is(f, 0) and _nothing(b))]


def _nothing(size: Any) -> bool:
    """Known to be 0, such as what fills up the last chunk where the model has asked whether there is any."""
    return _is(size, 0) or not isinstance(size, int) and all(map(statically_known_true, (size <= 0, size >= 0)))


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _padded(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    out, want = args[0], r.shape(r.dims[n])
    for dim, front, _ in _padding(n):
        amounts = [0] * (2 * out.dim())
        where = 2 * (out.dim() - 1 - dim)
        amounts[where], amounts[where + 1] = front, want[dim] - out.shape[dim] - front
        out = torch.nn.functional.pad(out, amounts)
    return out


@rule(aten.constant_pad_nd.default, aten.pad.default, run=_padded)
def _pad(r: ResizeContext, n: Node) -> list[Dim]:
    dims = list(r.dims[n.args[0]])
    for dim, front, behind in _padding(n):
        NoAxes.when(not (_is(front, 0) or _is(front, 1)), "padding in front")
        NoAxes.when(not (_is(front, 0) or _is(behind, 0)), "padding on both sides")
        whole = value(n).shape[dim]
        known = next((eq for eq in r.axes.lengths if _same_padding(eq, dims[dim], whole)), None)
        dims[dim] = known.whole if known else r.axes.longer([dims[dim]], front + behind, whole)
    return dims


def _same_padding(eq: Any, dim: Dim, size: Any) -> bool:
    return len(eq.parts) == 1 and flat(eq.parts[0]) == flat(dim) and same_size(length(eq.whole), size)


def _bounds(n: Node) -> tuple[int, Any, Any]:
    """(dimension, start, size of the result) of a slice."""
    part = NoAxes.unless(part_of(n), "a slice with a step")
    NoAxes.when(part.step != 1, "a slice with a step")
    start = value(part.start)
    return part.dim, start + part.whole if isinstance(start, int) and start < 0 else start, part.size


def _sliced(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    dim, start, result = _bounds(n)
    have, want = args[0].shape[dim], r.shape(r.dims[n])[dim]
    at_end = not _is(start, 0) and same_size(start + result, value(n.args[0]).shape[dim])
    return args[0].narrow(dim, have - want if at_end else start, want)


@rule(aten.slice.Tensor, run=_sliced)
def _slice(r: ResizeContext, n: Node) -> list[Dim]:
    dims = list(r.dims[n.args[0]])
    dim, start, result = _bounds(n)
    size = value(n.args[0]).shape[dim]
    if same_size(size, result):
        return dims
    at_end = same_size(start + result, size)
    if (part := _first_or_last_part(r, dims[dim], start, result, at_end)) is not None:
        r.axes.pick(dims[dim], (start, result), n)
        dims[dim] = part
        return dims
    if not _is(start, 0) and not at_end or _is(size, 2):
        pin([dims[dim]])  # from the middle; or of two, where "the first" and "all but the last" are one
    r.axes.pick(dims[dim], (start, result), n)
    dims[dim] = [] if is_one(result) else r.axes.shorter(dims[dim], result)
    return dims


def _first_or_last_part(r: ResizeContext, dim: Dim, start: Any, result: Any, at_end: bool) -> Dim | None:
    """What was put together with others to `dim`, where a slice takes it out again."""
    for eq in r.axes.lengths:
        if len(eq.parts) > 1 and flat(eq.whole) == flat(dim):
            ends = [eq.parts[0]] * _is(start, 0) + [eq.parts[-1]] * at_end
            part = next((one for one in ends if same_size(length(one), result)), None)
            if part is not None:
                return part
    return None


def _selected(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    dim, index, _ = n.args[1], n.args[2], None
    last = index in (-1, value(n.args[0]).shape[dim] - 1)  # type: ignore[operator, index]
    return args[0].select(dim, -1 if last and index != 0 else index)


@rule(aten.select.int, run=_selected)
def _select(r: ResizeContext, n: Node) -> list[Dim]:
    dims = list(r.dims[n.args[0]])
    dim, index = axis(n.args[1], len(dims)), n.args[2]  # type: ignore[arg-type]
    if index not in (0, -1):
        pin([dims[dim]])
    size = value(n.args[0]).shape[dim]
    r.axes.pick(dims[dim], index % size if isinstance(size, int) else index, n)  # type: ignore[operator]
    del dims[dim]
    return dims


@rule(aten.unbind.int)
def _unbind(r: ResizeContext, n: Node) -> list[list[Dim]]:
    dims = list(r.dims[n.args[0]])
    dim = axis(argument(n, 1, "dim", 0), len(dims))
    pin([dims[dim]])
    r.axes.pick_each(dims[dim], range(len(value(n))), n)
    return [[*dims[:dim], *dims[dim + 1 :]] for _ in value(n)]


@rule(operator.getitem)
def _getitem(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims[n.args[0]][n.args[1]]


def _run_pieces(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    dim = axis(argument(n, 2, "dim", 0), args[0].dim())
    return args[0].split([r.shape(piece)[dim] for piece in r.dims[n]], dim)


@rule(*SPLITS, run=_run_pieces)
def _pieces(r: ResizeContext, n: Node) -> list[list[Dim]]:
    """What was put together before, or else pieces of their sizes."""
    dims = list(r.dims[n.args[0]])
    dim = axis(argument(n, 2, "dim", 0), len(dims))
    sizes = [v.shape[dim] for v in value(n)]
    known = (eq.parts for eq in r.axes.lengths if flat(eq.whole) == flat(dims[dim]))
    parts = next((one for one in known if _of(one, sizes)), None)
    if parts is None:
        pin([dims[dim]] * (len(sizes) > 1))
        r.axes.pick_each(dims[dim], [(sum(sizes[:i]), size) for i, size in enumerate(sizes)], n)
        parts = [[] if is_one(s) else r.axes.shorter(dims[dim], s) for s in sizes] if len(sizes) > 1 else [dims[dim]]
    return [[*dims[:dim], part, *dims[dim + 1 :]] for part in parts]


def _of(parts: list[Dim], sizes: list[Any]) -> bool:
    return len(parts) == len(sizes) and all(same_size(length(p), s) for p, s in zip(parts, sizes, strict=True))


@rule(aten.cat.default)
def _cat(r: ResizeContext, n: Node) -> list[Dim]:
    parts = [r.dims[a] for a in n.args[0]]  # type: ignore[union-attr]
    if len(parts) == 1:
        return parts[0]
    dim = axis(argument(n, 1, "dim", 0), len(parts[0]))
    others = broadcast(r, [[*p[:dim], [], *p[dim + 1 :]] for p in parts])
    each = flat(parts[0][dim])
    if each and all(flat(p[dim]) == each for p in parts):
        others[dim] = r.axes.repeated(parts[0][dim], n.args[0])  # type: ignore[arg-type]
    else:
        others[dim] = r.axes.longer([p[dim] for p in parts], 0, value(n).shape[dim])
    sizes = [value(a).shape[dim] for a in n.args[0]]  # type: ignore[union-attr]
    for i, part in enumerate(n.args[0]):  # type: ignore[arg-type]
        r.axes.pick(others[dim], (sum(sizes[:i]), sizes[i]), part)
    return others


@rule(aten.stack.default)
def _stack(r: ResizeContext, n: Node) -> list[Dim]:
    parts = [r.dims[a] for a in n.args[0]]  # type: ignore[union-attr]
    dim = axis(argument(n, 1, "dim", 0), len(parts[0]) + 1)
    out = broadcast(r, parts)
    count = fresh(len(parts))
    pin([count])
    for i, part in enumerate(n.args[0]):  # type: ignore[arg-type]
        r.axes.pick(count, i, part)
    return [*out[:dim], count, *out[dim:]]
