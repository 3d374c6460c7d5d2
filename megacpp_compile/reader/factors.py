"""Reads a contraction, in any spelling, as its factors and the axes that each of them runs over.

Works from the result down: every dimension of the result is an axis, and views, multiplications, sums and contractions
give the axes of their operands' dimensions. `einsum('ted,te->td', o, g)`, `(o * g[..., None]).sum(1)` and
`torch.bmm(o.mT, g[..., None])` are then the same two factors over the same axes. What is added by numbers that
count up, over and over, as in `arange(T).expand(E, -1).reshape(-1)`, is a sum over E.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import IDENTITIES, PERMUTATIONS, REPETITIONS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.reader.dims import below, reduced_dims, repetition
from megacpp_compile.reader.index_reads import READS, SCATTERS, added_rows, adds, counts_up, read_of_every
from megacpp_compile.reader.products import Product, contraction


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """One index of a contraction; two of one size are different axes."""

    size: Any


# For every dimension of a tensor the axes it runs over, outermost first; none where it is 1 long.
Dims = tuple[tuple[Axis, ...], ...]


@dataclasses.dataclass(frozen=True)
class Factor:
    """`node` over `dims`, a factor of the contraction or multiplication `by`."""

    node: Node
    dims: Dims
    by: Node

    @property
    def axes(self) -> set[Axis]:
        return {axis for dim in self.dims for axis in dim}


def over(node: Node) -> Dims:
    """The dimensions of `node`, with a new axis for each that is not 1 long."""
    return tuple(() if is_one(n) else (Axis(n),) for n in value(node).shape)


def factors(node: Node, dims: Dims, inner: Callable[[set[Axis]], bool]) -> list[Factor]:
    """The factors of `node`; one whose axes `inner` accepts is split into its own factors where it has any."""
    found: list[Factor] = []
    pending = [Factor(node, dims, node)]
    while pending:
        factor = pending.pop()
        below = step_into(factor.node, factor.dims) if inner(factor.axes) else None
        if below is None:
            found.append(factor)
        else:
            by = factor.by if _viewed(factor.node) else factor.node
            pending += [Factor(n, d, by) for n, d in below]
    return found


def seen_as(factor: Factor, *wanted: Dims) -> tuple[Node, int] | None:
    """(the innermost tensor of which `factor` is a view and whose dimensions are among `wanted`, their place there);
    where there is none, the innermost whose dimensions are so but for those that are 1 long."""
    found, alike = None, None
    longer = [longer_dims(dims) for dims in wanted]
    for node, dims in beneath(factor):
        if dims in wanted:
            found = node, wanted.index(dims)
        elif longer_dims(dims) in longer:
            alike = node, longer.index(longer_dims(dims))
    return found or alike


def longer_dims(dims: Dims) -> Dims:
    """`dims` without those that are 1 long."""
    return tuple(d for d in dims if d)


def beneath(factor: Factor) -> Iterator[tuple[Node, Dims]]:
    """(node, dimensions) of `factor`, of what it is a view of, and so on."""
    node, dims = factor.node, factor.dims
    while True:
        yield node, dims
        below = step_into(node, dims) if _viewed(node) else None
        if below is None:
            return
        ((node, dims),) = below


def step_into(node: Node, dims: Dims) -> list[tuple[Node, Dims]] | None:
    """The operands of `node`, whose dimensions are `dims`, each with its own; None for any other operation."""
    if node.op != "call_function":
        return None
    if _viewed(node):
        source = node.args[0]
        below = _through(node, dims)
        return None if below is None else [(source, below)]  # type: ignore[list-item]
    target, args = node.target, node.args
    if target is aten.mul.Tensor and of_tensors(node):
        return [(a, broadcast(a, dims)) for a in args]  # type: ignore[arg-type, misc]
    if target is aten.sum.dim_IntList and args[1]:
        return [(args[0], _summed(node, dims))]  # type: ignore[list-item]
    product = contraction(node)
    return None if product is None or product.bias is not None else factors_of(product, dims)


def factors_of(product: Product, dims: Dims) -> list[tuple[Node, Dims]]:
    """The factors of a product with dimensions `dims`, each with its own."""
    axes = dict(enumerate(dims))
    for factor in product.factors:
        for place, n in zip(factor.dims, value(factor.node).shape, strict=True):
            if place < 0 and not axes.get(place):
                axes[place] = _axis(n)
    return [(f.node, broadcast(f.node, tuple(axes[place] for place in f.dims))) for f in product.factors]


def is_one(n: Any) -> bool:
    """Whether the size `n` is 1, rather than a symbol that may be."""
    return isinstance(n, int) and n == 1


def _axis(n: Any) -> tuple[Axis, ...]:
    """A dimension of size `n` with an axis of its own."""
    return () if is_one(n) else (Axis(n),)


def broadcast(operand: Any, dims: Dims) -> Dims:
    """The dimensions of `operand`, which is broadcast to `dims`."""
    shape = value(operand).shape
    return tuple(() if is_one(n) else d for n, d in zip(shape, dims[len(dims) - len(shape) :], strict=True))


def _summed(node: Node, dims: Dims) -> Dims:
    """The dimensions of what the sum `node` runs over."""
    gone, keep = reduced_dims(node)
    rest = iter([d for i, d in enumerate(dims) if not keep or i not in gone])
    return tuple(_axis(n) if i in gone else next(rest) for i, n in enumerate(value(node.args[0]).shape))


_VIEWS = {
    *IDENTITIES, *RESHAPES, *UNIT_DIMS, *PERMUTATIONS, aten.numpy_T.default,
    aten.expand.default, *REPETITIONS,
}  # fmt: skip


def _viewed(node: Node) -> bool:
    """Whether `node` is a view, a copy, a cast or a repetition, by numbers that count up too."""
    if node.target is aten.select.int:
        return is_one(value(node.args[0]).shape[node.args[1]])  # type: ignore[index]
    if node.target in READS:
        return read_of_every(node) is not None
    return node.op == "call_function" and (node.target in _VIEWS or is_cast(node))


def _through(node: Node, dims: Dims) -> Dims | None:
    """The dimensions of what `node` is a view, a copy or a repetition of; None where they cannot be told."""
    target, args = node.target, node.args
    shape = value(args[0]).shape
    n = len(shape)
    if (own := below(node, dims, ())) is not None:
        return tuple(own)
    if (read := read_of_every(node)) is not None:
        tensor, numbers = read
        shown = value(numbers).dim()
        *_, (_, counted) = beneath(Factor(numbers, dims[:shown], numbers))
        behind = dims[1:] if target is aten.gather.default else dims[shown:]
        by_rows = len(counted) == 1 and not set(counted[0]) & {axis for dim in behind for axis in dim}
        return (*counted, *behind) if by_rows else None
    if (again := repetition(node)) is not None:
        times, inside = again
        rows = [_cut(d, r, inside) for d, r in zip(dims[len(dims) - n :], times[len(times) - n :], strict=True)]
        return None if None in rows else tuple(rows)  # type: ignore[arg-type]
    return _regroup([axis for d in dims for axis in d], shape)  # squeezes are reshapes, too, and so is the one of one


def _cut(dim: tuple[Axis, ...], times: Any, inside: bool) -> tuple[Axis, ...] | None:
    """`dim` without the axes, innermost or outermost, that a repetition `times` added."""
    if is_one(times):
        return dim
    for i in range(len(dim) + 1):
        gone, kept = (dim[i:], dim[:i]) if inside else (dim[:i], dim[i:])
        if gone and same_size(math.prod(a.size for a in gone), times):
            return kept
    return None


def _regroup(axes: list[Axis], shape: Sequence[Any]) -> Dims | None:
    """`axes` in their order as dimensions of `shape`; None where that would split one."""
    out = []
    for n in shape:
        dim: list[Axis] = []
        while not is_one(n) and axes and not (dim and same_size(math.prod(a.size for a in dim), n)):
            dim.append(axes.pop(0))
        if not is_one(n) and not same_size(math.prod(a.size for a in dim), n):
            return None
        out.append(tuple(dim))
    return None if axes else tuple(out)


@or_none
def added_to_every(node: Node) -> tuple[Node | None, Node, Dims, Dims] | None:
    """(base, None for zeros; rows; the dimensions of `node`; those of the rows) where `node` adds rows to every row of
    the base, as often to one as to any other."""
    found = NoMatch.unless(_added_rows(node))
    base, numbers, rows = found
    count, times = value(base).shape[0], whole_times(value(rows).shape[0], value(base).shape[0])
    NoMatch.when(times is None)
    t, e, c = (() if is_one(n) else (Axis(n),) for n in (count, times, value(rows).shape[1]))
    for order in ((*e, *t), (*t, *e)):
        dims = (order, c)
        *_, (last, seen) = beneath(Factor(numbers, dims[: value(numbers).dim()], numbers))
        if counts_up(last) and seen == (t,) and same_size(value(last).shape[0], count):
            return (None if is_filled(base, 0.0) else base), rows, (t, c), dims
    return None


def _added_rows(node: Node) -> tuple[Node, Node, Node] | None:
    """(base [T, d], numbers [R] or [R, d] of rows, rows [R, d]) where `node` adds these to those of the base."""
    if (found := added_rows(node)) is not None:
        base, numbers, rows = found
    elif node.target in SCATTERS and node.args[1] == 0 and adds(node, to_zeros=True):
        base, _, numbers, rows = node.args[:4]  # type: ignore[assignment]
        if not all(map(same_size, value(numbers).shape, value(rows).shape)):
            return None
    else:
        return None
    plain = value(base).dim() == value(rows).dim() == 2 and value(numbers).dtype in (torch.int64, torch.int32)
    return (base, numbers, rows) if plain and same_size(value(base).shape[1], value(rows).shape[1]) else None


def whole_times(rows: Any, tokens: Any) -> int | None:
    """How many times `tokens` the number `rows` is; None where that is no fixed whole number."""
    if isinstance(tokens, int) and not tokens:
        return None
    times = rows // tokens
    fixed = times if isinstance(times, int) else int(times.node.expr) if times.node.expr.is_Integer else None
    return fixed if fixed and same_size(tokens * fixed, rows) else None
