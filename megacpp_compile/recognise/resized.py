"""Runs a subgraph at other sizes: a rule per op says what it does to dimensions (`axes.py`) and how it is run again.

The ops known here are those of tensor algebra: sums, products, contractions, exponentials, views, and masks made of
constants. All of them are analytic in their operands, so that two compositions of them which agree on random operands
agree on all (a polynomial identity test). What branches on data (clamp, max, comparisons of operands) has no rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.graph_edit import value
from megacpp_compile.recognise.axes import Axes, Dim, NoAxes, equal, flat, fresh, is_one, length, pin

aten = torch.ops.aten
DimsRule = Callable[["Resized", Node], Any]
RunRule = Callable[["Resized", Node, tuple[Any, ...]], Any]
RULES: dict[Any, tuple[DimsRule, RunRule]] = {}

CREATION = {
    aten.ones.default, aten.zeros.default, aten.full.default, aten.arange.default, aten.arange.start,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.scalar_tensor.default,
}  # fmt: skip
LIKE = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
# These make booleans, or branch on them: of constants only.
MASKS = {
    aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor, aten.ge.Scalar, aten.gt.Scalar,
    aten.le.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.bitwise_not.default, aten.logical_not.default,
    aten.bitwise_and.Tensor, aten.logical_and.default, aten.bitwise_or.Tensor, aten.logical_or.default,
    aten.__and__.Tensor, aten.__or__.Tensor,
}  # fmt: skip
ELEMENTWISE = {
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar,
    aten.rsub.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.exp.default, aten.exp2.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.where.Scalar,
}  # fmt: skip
# Which operand of these must be a constant.
CONDITION = {
    aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1, aten.where.self: 0, aten.where.ScalarSelf: 0,
    aten.where.ScalarOther: 0, aten.where.Scalar: 0,
}  # fmt: skip
SAME = {
    aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.alias.default, aten.contiguous.default,
    aten.type_as.default, aten.lift_fresh_copy.default,
}  # fmt: skip
VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.movedim.int, aten.movedim.intlist, aten.mT.default,
}  # fmt: skip
# Each element of the result is an element of the operand, or zero.
REPEATS = {
    aten.expand.default, aten.broadcast_to.default, aten.repeat.default, aten.repeat_interleave.self_int,
    aten.constant_pad_nd.default, aten.pad.default,
}  # fmt: skip


class Resized:
    """The subgraph of `nodes` (in graph order) between `leaves`, with axes inferred, ready to be run.

    Raises `NoAxes` where a node's dimensions can't be followed.
    """

    def __init__(self, nodes: Sequence[Node], leaves: Sequence[Node]) -> None:
        self.axes, self.nodes, self.leaves = Axes(), nodes, leaves
        self.dims: dict[Node, Any] = {n: [fresh(s) for s in value(n).shape] for n in leaves}
        for n in nodes:
            try:
                self.dims[n] = RULES[n.target][0](self, n)
            except KeyError as e:
                raise NoAxes(f"{n.name} computes with a size") from e
        self.axes.close()

    def of(self, node: Node) -> list[Dim]:
        return [flat(d) for d in self.dims[node]]

    def shape(self, dims: Sequence[Dim]) -> list[int]:
        return [self.axes.size(d) for d in dims]

    def solve(self, turn: int) -> None:
        self.axes.solve([d for dims in self.dims.values() for d in dims if isinstance(d, list)], turn)

    def run(self, operands: dict[Node, Tensor], wanted: Sequence[Node]) -> list[Tensor]:
        """Values of `wanted` for `operands`, float64 tensors of the leaves' small shapes."""
        values: dict[Node, Any] = dict(operands)
        for n in self.nodes:
            try:  # what lends only its shape has no value
                result = RULES[n.target][1](self, n, fx.map_arg(n.args, values.get))
            except RuntimeError as e:
                raise NoAxes(f"{n.name} can't be run at another size") from e
            if isinstance(result, Tensor) and list(result.shape) != self.shape(self.dims[n]):
                raise NoAxes(f"{n.name} comes out in another shape")
            values[n] = result
        return [values[n] for n in wanted]


def rule(*targets: Any, run: RunRule | None = None) -> Callable[[DimsRule], DimsRule]:
    def register(dims: DimsRule) -> DimsRule:
        for t in targets:
            RULES[t] = dims, run or _again
        return dims

    return register


def _again(r: Resized, n: Node, args: tuple[Any, ...]) -> Any:
    """The same op; dtypes are float64's affair, devices the CPU's."""
    kwargs = {k: v for k, v in n.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")}
    return n.target(*args, **kwargs)  # type: ignore[operator]


def _reshape(r: Resized, n: Node, args: tuple[Any, ...]) -> Any:
    return args[0].reshape(r.shape(r.dims[n]))


def axis(dim: int, n: int) -> int:
    return dim + n if dim < 0 else dim


def argument(n: Node, index: int, name: str, default: Any = None) -> Any:
    return n.args[index] if len(n.args) > index else n.kwargs.get(name, default)


# --- elementwise


def broadcast(r: Resized, operands: Sequence[list[Dim]]) -> list[Dim]:
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


@rule(*ELEMENTWISE)
def _elementwise(r: Resized, n: Node) -> list[Dim]:
    return broadcast(r, [r.dims[a] for a in n.all_input_nodes])


@rule(*MASKS)
def _masks(r: Resized, n: Node) -> list[Dim]:
    if any(not isinstance(a, Node) and a not in (0, 1, -1) for a in n.args):
        pin(d for a in n.all_input_nodes for d in r.dims[a])
    return _elementwise(r, n)


def _float(r: Resized, n: Node, args: tuple[Any, ...]) -> Any:
    return args[0].double() if value(n).is_floating_point() else args[0].to(value(n).dtype)


@rule(*SAME, run=_float)
def _same(r: Resized, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


# --- constants


def _create(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    fake, shape = value(n), r.shape(r.dims[n])
    dtype = torch.float64 if fake.is_floating_point() else fake.dtype
    if n.target in (aten.arange.default, aten.arange.start):
        return torch.arange(shape[0], dtype=dtype)
    fill = argument(n, 1, "fill_value")
    if n.target in (aten.new_full.default,):
        fill = argument(n, 2, "fill_value")
    if n.target is aten.scalar_tensor.default:
        fill = n.args[0]
    if "ones" in str(n.target):
        fill = 1
    elif "zeros" in str(n.target):
        fill = 0
    if not isinstance(fill, (bool, int, float)):
        raise NoAxes("a constant that is no number")
    return torch.full(shape, fill, dtype=dtype)


@rule(*CREATION, run=_create)
def _creation(r: Resized, n: Node) -> list[Dim]:
    if n.target is aten.arange.start and n.args[0] != 0:
        raise NoAxes("positions that do not begin at 0")
    return [fresh(s) for s in value(n).shape]


@rule(*LIKE, run=_create)
def _like(r: Resized, n: Node) -> list[Dim]:
    return r.dims.get(n.args[0]) or [fresh(s) for s in value(n).shape]


@rule(aten.tril.default, aten.triu.default)
def _triangle(r: Resized, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    if argument(n, 1, "diagonal", 0) not in (-1, 0, 1):
        pin(dims[-2:])
    return dims


# --- views


@rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    run=_reshape,
)  # fmt: skip
def _view(r: Resized, n: Node) -> list[Dim]:
    return r.axes.regroup(r.dims[n.args[0]], value(n).shape)


def _permuted(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    return args[0].permute(_order(n))


def _order(n: Node) -> list[int]:
    rank = value(n).dim()
    order = list(range(rank))
    if n.target is aten.permute.default:
        return [axis(d, rank) for d in n.args[1]]  # type: ignore[union-attr]
    if n.target in (aten.movedim.int, aten.movedim.intlist):
        return torch.empty([1] * rank).as_strided([1] * rank, order).movedim(*n.args[1:]).stride()  # type: ignore
    a, b = (-2, -1) if n.target is aten.mT.default else (0, 1) if n.target is aten.t.default else n.args[1:3]
    if rank > 1:
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order


@rule(
    aten.permute.default, aten.transpose.int, aten.t.default, aten.movedim.int, aten.movedim.intlist, aten.mT.default,
    run=_permuted,
)  # fmt: skip
def _permute(r: Resized, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    return [dims[i] for i in _order(n)]


@rule(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, run=_reshape)
def _unit_dims(r: Resized, n: Node) -> list[Dim]:
    source = [d for d in r.dims[n.args[0]] if flat(d)]
    it = iter(source)
    return [[] if is_one(s) else next(it) for s in value(n).shape]


def _expanded(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    return args[0].expand(r.shape(r.dims[n]))


@rule(aten.expand.default, aten.broadcast_to.default, run=_expanded)
def _expand(r: Resized, n: Node) -> list[Dim]:
    dims, shape = r.dims[n.args[0]], value(n).shape
    dims = [*([[]] * (len(shape) - len(dims))), *dims]
    return [d if flat(d) else fresh(s) for d, s in zip(dims, shape, strict=True)]


def _repeated(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    have, want = args[0].shape, r.shape(r.dims[n])
    have = [1] * (len(want) - len(have)) + list(have)
    times = [w // h for h, w in zip(have, want, strict=True)]
    if n.target is aten.repeat.default:
        return args[0].repeat(times)
    out = args[0]
    for dim, count in enumerate(times):
        out = out.repeat_interleave(count, dim) if count > 1 else out
    return out


@rule(aten.repeat.default, aten.repeat_interleave.self_int, run=_repeated)
def _repeat(r: Resized, n: Node) -> list[Dim]:
    dims, shape = r.dims[n.args[0]], value(n).shape
    if n.target is not aten.repeat.default and argument(n, 2, "dim") is None:
        raise NoAxes("a repetition of all elements")
    dims = [*([[]] * (len(shape) - len(dims))), *dims]
    out = []
    for d, s in zip(dims, shape, strict=True):
        have = length(d)
        if equal(have, s):
            out.append(d)
            continue
        if not isinstance(have, int) or not isinstance(s, int):
            raise NoAxes("a repetition of symbolic size")
        times = fresh(s // have)
        out.append([*times, *d] if n.target is aten.repeat.default else [*d, *times])
    return out


# --- padding, slices, concatenation


def _padding(n: Node) -> list[tuple[int, Any, Any]]:
    """(dimension, in front, behind) of what is padded."""
    amounts, rank = n.args[1], value(n).dim()
    fill = argument(n, 3 if n.target is aten.pad.default else 2, "value", 0)
    if n.target is aten.pad.default and argument(n, 2, "mode", "constant") != "constant" or fill not in (0, None):
        raise NoAxes("padding with other than zeros")
    pairs = zip(amounts[0::2], amounts[1::2], strict=True)  # type: ignore[index]
    found = [(rank - 1 - i, value(front), value(behind)) for i, (front, behind) in enumerate(pairs)]
    return [(d, f, b) for d, f, b in found if not (_is(f, 0) and _is(b, 0))]


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _padded(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    out, want = args[0], r.shape(r.dims[n])
    for dim, front, _ in _padding(n):
        amounts = [0] * (2 * out.dim())
        where = 2 * (out.dim() - 1 - dim)
        amounts[where], amounts[where + 1] = front, want[dim] - out.shape[dim] - front
        out = torch.nn.functional.pad(out, amounts)
    return out


@rule(aten.constant_pad_nd.default, aten.pad.default, run=_padded)
def _pad(r: Resized, n: Node) -> list[Dim]:
    dims = list(r.dims[n.args[0]])
    for dim, front, behind in _padding(n):
        if not (_is(front, 0) or _is(front, 1)):
            raise NoAxes("padding in front")
        if not (_is(front, 0) or _is(behind, 0)):
            raise NoAxes("padding on both sides")
        whole = value(n).shape[dim]
        known = next((eq for eq in r.axes.lengths if _same_padding(eq, dims[dim], whole)), None)
        dims[dim] = known.whole if known else r.axes.longer([dims[dim]], front + behind, whole)
    return dims


def _same_padding(eq: Any, dim: Dim, size: Any) -> bool:
    return len(eq.parts) == 1 and flat(eq.parts[0]) == flat(dim) and equal(length(eq.whole), size)


def _bounds(n: Node) -> tuple[int, Any, Any]:
    """(dimension, start, size of the result) of a slice."""
    source, args = value(n.args[0]), [*n.args[1:], *(None,) * 4][:4]
    dim = axis(args[0] or 0, source.dim())  # type: ignore[call-overload]
    if args[3] not in (None, 1):
        raise NoAxes("a slice with a step")
    start, size, result = value(args[1]) or 0, source.shape[dim], value(n).shape[dim]
    if isinstance(start, int) and start < 0:
        start = 0 if isinstance(size, int) and -start > size else size + start
    return dim, start, result


def whole(n: Node) -> bool:
    """Whether a slice leaves out nothing."""
    return (
        n.target is aten.slice.Tensor
        and argument(n, 4, "step", 1) == 1
        and all(equal(a, b) for a, b in zip(value(n).shape, value(n.args[0]).shape, strict=True))
    )


def _sliced(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    dim, start, result = _bounds(n)
    have, want = args[0].shape[dim], r.shape(r.dims[n])[dim]
    at_end = not _is(start, 0) and equal(start + result, value(n.args[0]).shape[dim])
    return args[0].narrow(dim, have - want if at_end else start, want)


@rule(aten.slice.Tensor, run=_sliced)
def _slice(r: Resized, n: Node) -> list[Dim]:
    dims = list(r.dims[n.args[0]])
    dim, start, result = _bounds(n)
    size = value(n.args[0]).shape[dim]
    if equal(size, result):
        return dims
    at_end = equal(start + result, size)
    if not _is(start, 0) and not at_end or _is(size, 2):
        pin([dims[dim]])  # from the middle; or of two, where "the first" and "all but the last" are one
    dims[dim] = [] if is_one(result) else r.axes.shorter(dims[dim], result)
    return dims


def _selected(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    dim, index, _ = n.args[1], n.args[2], None
    last = index in (-1, value(n.args[0]).shape[dim] - 1)  # type: ignore[operator, index]
    return args[0].select(dim, -1 if last and index != 0 else index)


@rule(aten.select.int, run=_selected)
def _select(r: Resized, n: Node) -> list[Dim]:
    dims = list(r.dims[n.args[0]])
    dim, index = axis(n.args[1], len(dims)), n.args[2]  # type: ignore[arg-type]
    if index not in (0, -1):
        pin([dims[dim]])
    del dims[dim]
    return dims


@rule(aten.unbind.int)
def _unbind(r: Resized, n: Node) -> list[list[Dim]]:
    dims = list(r.dims[n.args[0]])
    dim = axis(argument(n, 1, "dim", 0), len(dims))
    pin([dims[dim]])
    return [[*dims[:dim], *dims[dim + 1 :]] for _ in value(n)]


@rule(operator.getitem)
def _getitem(r: Resized, n: Node) -> list[Dim]:
    return r.dims[n.args[0]][n.args[1]]


@rule(aten.cat.default)
def _cat(r: Resized, n: Node) -> list[Dim]:
    parts = [r.dims[a] for a in n.args[0]]  # type: ignore[union-attr]
    dim = axis(argument(n, 1, "dim", 0), len(parts[0]))
    others = broadcast(r, [[*p[:dim], [], *p[dim + 1 :]] for p in parts])
    others[dim] = r.axes.longer([p[dim] for p in parts], 0, value(n).shape[dim])
    return others


@rule(aten.stack.default)
def _stack(r: Resized, n: Node) -> list[Dim]:
    parts = [r.dims[a] for a in n.args[0]]  # type: ignore[union-attr]
    dim = axis(argument(n, 1, "dim", 0), len(parts[0]) + 1)
    out = broadcast(r, parts)
    count = fresh(len(parts))
    pin([count])
    return [*out[:dim], count, *out[dim:]]


# --- sums and contractions


@rule(aten.sum.dim_IntList)
def _sum(r: Resized, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    over = n.args[1]
    if not over:
        raise NoAxes("a sum of everything")
    gone = {axis(d, len(dims)) for d in over}  # type: ignore[union-attr]
    keep = argument(n, 2, "keepdim", False)
    return [[] if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]


@rule(aten.cumsum.default)
def _cumsum(r: Resized, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


@rule(aten.flip.default)
def _flip(r: Resized, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def _matmul(r: Resized, n: Node) -> list[Dim]:
    a, b = (r.dims[x] for x in n.args[:2])
    left, right = ([[], *a] if len(a) == 1 else a), ([*b, []] if len(b) == 1 else b)
    r.axes.same(left[-1], right[-2])
    out = [*broadcast(r, [left[:-2], right[:-2]]), *([left[-2]] if len(a) > 1 else []),
           *([right[-1]] if len(b) > 1 else [])] if len(left) > 2 or len(right) > 2 else [  # fmt: skip
        *([left[-2]] if len(a) > 1 else []), *([right[-1]] if len(b) > 1 else [])]  # fmt: skip
    return out


def _einsum_again(r: Resized, n: Node, args: tuple[Any, ...]) -> Tensor:
    return torch.einsum(args[0], *args[1])


@rule(aten.einsum.default, run=_einsum_again)
def _einsum(r: Resized, n: Node) -> list[Dim]:
    equation, operands = str(n.args[0]).replace(" ", ""), [r.dims[a] for a in n.args[1]]  # type: ignore[union-attr]
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        raise NoAxes("an einsum without an output")
    letters: dict[str, Dim] = {}
    dots: list[list[Dim]] = []

    def meet(letter: str, dim: Dim) -> None:
        if not flat(letters.setdefault(letter, dim)):
            letters[letter] = dim
        elif flat(dim):
            r.axes.same(letters[letter], dim)

    for term, dims in zip(terms, operands, strict=True):
        before, ellipsis, after = term.partition("...")
        count = len(dims) - len(before) - len(after)
        for letter, dim in zip(before, dims, strict=False):
            meet(letter, dim)
        for letter, dim in zip(after, dims[len(dims) - len(after) :], strict=True):
            meet(letter, dim)
        if ellipsis:
            dots.append(dims[len(before) : len(before) + count])
    before, ellipsis, after = output.partition("...")
    middle = broadcast(r, dots) if ellipsis and dots else []
    return [*(letters[c] for c in before), *middle, *(letters[c] for c in after)]
