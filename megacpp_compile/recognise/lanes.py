"""What a subgraph does to the last dimension of a tensor, lane by lane.

RoPE is spelled in dozens of ways: even/odd slices, rotate_half, complex products, stack/flatten, writes into an empty
tensor. They differ in syntax only. So instead of a pattern a spelling, this module *executes* the subgraph on symbols:
every element of a feature dimension (a "lane") becomes a sum of terms

    coefficient * source[lane] * table[lane]

over a few source tensors, and the rules of RoPE are then checked on that result (`rotation.py`). Whatever is proved
equal matches, however it is written; whatever is not equal can't match, however alike it looks.

A value's dimensions are of two kinds: *outer* (batch, sequence, heads: carried along, permuted, broadcast) and *lane*
(the feature dimension and what views split it into). Terms are numpy arrays over the lane dimensions.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile.graph_edit import same_size, value

aten = torch.ops.aten
NONE, UNDEFINED = -1, -2  # source ids: no table in this term; memory nothing was written to
MAX_TERMS = 4
MAX_LANES = 1 << 15


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor terms refer to.

    dims: for every outer dimension of the value that refers to it, the tensor's own dimension, or -1 where it is
    broadcast. lane_dims: the tensor's dimensions its lanes index, row-major. part: "re"/"im" of a complex table.
    """

    node: Node
    dims: tuple[int, ...]
    lane_dims: tuple[int, ...]
    part: str = ""


@dataclasses.dataclass
class Term:
    coef: np.ndarray
    src: np.ndarray
    lane: np.ndarray
    tab: np.ndarray
    tlane: np.ndarray

    def map(self, f: Callable[[np.ndarray], np.ndarray]) -> Term:
        return Term(*(f(getattr(self, x.name)) for x in dataclasses.fields(Term)))

    def scaled(self, c: float) -> Term:
        return dataclasses.replace(self, coef=self.coef * c)


@dataclasses.dataclass
class Lanes:
    """kinds: "o" or "l" per dimension; sizes: its sizes; terms: arrays over the "l" dimensions (plus, when `complex`,
    a last axis of real and imaginary part)."""

    kinds: str
    sizes: tuple[Any, ...]
    terms: list[Term]
    complex: bool = False

    @property
    def lane_axes(self) -> list[int]:
        return [i for i, k in enumerate(self.kinds) if k == "l"]

    def axis(self, dim: int) -> int:
        """The array axis of lane dimension `dim`."""
        return self.kinds[:dim].count("l")

    def outer(self, dim: int) -> int:
        """The outer position of outer dimension `dim`."""
        return self.kinds[:dim].count("o")

    def map(self, f: Callable[[np.ndarray], np.ndarray]) -> list[Term]:
        return [t.map(f) for t in self.terms]


class _Opaque(Exception):
    """This node is not interpreted: it becomes a source of its own."""


_ATTENTION_FREE_CASTS = {aten._to_copy.default, aten.to.dtype}
_SAME = {
    aten.type_as.default,
    aten.clone.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    *_ATTENTION_FREE_CASTS,
}
_EMPTY = {
    aten.new_empty.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}


class LaneInterpreter:
    """Evaluates nodes of one graph. `activations` are the nodes computed from weights; the others are tables.

    `stops` are nodes to take as sources although they could be interpreted (a head split that looks like a pair split).
    """

    def __init__(self, activations: set[Node], stops: frozenset[Node] = frozenset()) -> None:
        self.activations, self.stops = activations, stops
        self.sources: list[Source] = []
        self._ids: dict[Source, int] = {}
        self._memo: dict[Node, Lanes | None] = {}
        self._opaque: set[Node] = set()
        self._numbering = _ValueNumbering()
        self.table_views: LaneInterpreter | None = None  # reads views of tables, made on first use

    # -- public -------------------------------------------------------------------------------------------------

    def __call__(self, node: Node) -> Lanes | None:
        """The lanes of `node`, or None for a value without a static feature dimension."""
        if node in self._memo:
            return self._memo[node]
        result = None
        if isinstance(value(node), torch.Tensor):
            # Graphs are deep: collect what is needed, then evaluate in graph order, without recursion.
            order, stack = [], [node]
            seen = set(self._memo)
            while stack:
                n = stack.pop()
                if n in seen:
                    continue
                seen.add(n)
                order.append(n)
                if (n.target in _RULES or _multi(n)) and n not in self.stops and not self._is_table(n):
                    stack.extend(n.all_input_nodes)
            for n in sorted(order):
                self._memo[n] = self._evaluate(n)
            result = self._memo[node]
        return result

    def opaque(self, node: Node) -> bool:
        """Whether `node` was taken as a source rather than interpreted."""
        return node in self._opaque

    def cone(self, root: Node) -> set[Node]:
        """The interpreted nodes `root` is made of, itself included."""
        found, stack = set(), [root]
        while stack:
            n = stack.pop()
            if n in found or n not in self.activations or self.opaque(n) or self._memo.get(n) is None and not _multi(n):
                continue
            found.add(n)
            if n.target not in _EMPTY:  # its argument lends shape and dtype only
                stack.extend(n.all_input_nodes)
        return found

    def source_id(self, source: Source) -> int:
        key = dataclasses.replace(source, node=self._numbering.leader(source.node))
        if key not in self._ids:
            self._ids[key] = len(self.sources)
            self.sources.append(source)
        return self._ids[key]

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _is_table(self, node: Node) -> bool:
        return node not in self.activations

    def _evaluate(self, node: Node) -> Lanes | None:
        if not isinstance(value(node), torch.Tensor):
            return None
        rule = _RULES.get(node.target)
        if rule is not None and node not in self.stops and not self._is_table(node):
            try:
                lanes = rule(self, node)
                if len(lanes.terms) <= MAX_TERMS:
                    return lanes
            except _Opaque:
                pass
        self._opaque.add(node)
        return self.leaf(node)

    def leaf(self, node: Node) -> Lanes | None:
        """`node` as a source: its last dimension is the lanes, or its last two where the last holds pairs."""
        fake = value(node)
        if fake.dim() == 0 or fake.is_complex():
            return None
        sizes = tuple(fake.shape)
        count = 2 if len(sizes) > 2 and isinstance(sizes[-1], int) and sizes[-1] == 2 else 1
        shape = sizes[len(sizes) - count :]
        if not all(isinstance(n, int) for n in shape) or not 2 <= (d := math.prod(shape)) <= MAX_LANES:
            return None
        outer = sizes[: len(sizes) - count]
        dims = tuple(-1 if _one(n) else i for i, n in enumerate(outer))
        sid = self.source_id(Source(node, dims, tuple(range(len(outer), len(sizes)))))
        term = _term(np.ones(shape), sid, np.arange(d).reshape(shape))
        return Lanes("o" * len(outer) + "l" * count, sizes, [term])

    def get(self, node: Any) -> Lanes:
        lanes = self._memo.get(node) if isinstance(node, Node) else None
        if lanes is None:
            raise _Opaque
        return lanes

    def redim(self, lanes: Lanes, f: Callable[[tuple[int, ...]], tuple[int, ...]]) -> list[Term]:
        """Terms with every source's outer dimension map sent through `f`."""
        ids = {int(i) for t in lanes.terms for a in (t.src, t.tab) for i in np.unique(a) if i >= 0}
        table = {}
        for i in ids:
            s = self.sources[i]
            table[i] = self.source_id(dataclasses.replace(s, dims=f(s.dims)))
        if all(k == v for k, v in table.items()):
            return lanes.terms

        def remap(a: np.ndarray) -> np.ndarray:
            out = a.copy()
            for k, v in table.items():
                out[a == k] = v
            return out

        return [dataclasses.replace(t, src=remap(t.src), tab=remap(t.tab)) for t in lanes.terms]


class _ValueNumbering:
    """Names nodes that compute the same thing alike: `cos.unsqueeze(1)` written twice is one table."""

    def __init__(self) -> None:
        self._key: dict[Node, Any] = {}
        self._leader: dict[Any, Node] = {}

    def leader(self, node: Node) -> Node:
        if node not in self._key:
            stack = [node]
            while stack:
                n = stack[-1]
                missing = [a for a in n.all_input_nodes if a not in self._key]
                if missing and self._pure(n):
                    stack.extend(missing)
                    continue
                stack.pop()
                if n in self._key:
                    continue
                self._key[n] = self._leader.setdefault(self._hash(n), n)
        return self._key[node]

    @staticmethod
    def _pure(n: Node) -> bool:
        if n.op != "call_function":
            return False
        if isinstance(n.target, torch._ops.OpOverload):
            tags = n.target.tags
            return torch.Tag.nondeterministic_seeded not in tags and not n.target._schema.is_mutable
        return n.target is operator.getitem

    def _hash(self, n: Node) -> Any:
        if not self._pure(n):
            return id(n)
        key = (n.target, _freeze(n.args, self._key), _freeze(sorted(n.kwargs.items()), self._key))
        try:
            hash(key)
        except TypeError:
            return id(n)
        return key


def _freeze(x: Any, names: dict[Node, Any]) -> Any:
    if isinstance(x, Node):
        return ("node", id(names[x]))
    if isinstance(x, (list, tuple)):
        return tuple(_freeze(v, names) for v in x)
    if isinstance(x, slice):
        return ("slice", x.start, x.stop, x.step)
    return (type(x).__name__, x)


def _multi(n: Node) -> bool:
    return isinstance(value(n), (tuple, list))


def _term(coef: np.ndarray, src: int, lane: np.ndarray) -> Term:
    none = np.full(coef.shape, NONE)
    return Term(coef, np.full(coef.shape, src), lane, none, none.copy())


def _zero(shape: tuple[int, ...]) -> Term:
    z = np.full(shape, NONE)
    return Term(np.zeros(shape), z, z.copy(), z.copy(), z.copy())


# -- rules -------------------------------------------------------------------------------------------------------

_RULES: dict[Any, Callable[[LaneInterpreter, Node], Lanes]] = {}
_Rule = Callable[[LaneInterpreter, Node], Lanes]


def _rule(*targets: Any) -> Callable[[_Rule], _Rule]:
    def register(f: _Rule) -> _Rule:
        for t in targets:
            _RULES[t] = f
        return f

    return register


def _dim(dim: int, n: int) -> int:
    return dim + n if dim < 0 else dim


@_rule(*_SAME)
def _same(it: LaneInterpreter, node: Node) -> Lanes:
    if not value(node).is_floating_point():
        raise _Opaque
    return it.get(node.args[0])


@_rule(operator.getitem)
def _getitem(it: LaneInterpreter, node: Node) -> Lanes:
    parent, index = node.args
    assert isinstance(parent, Node)
    source = parent.args[0] if parent.args else None
    x = it.get(source)
    n = len(x.kinds)
    if parent.target is aten.unbind.int:
        return _select(x, _dim(parent.args[1] if len(parent.args) > 1 else 0, n), index)
    if parent.target not in (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
        raise _Opaque
    dim = _dim(parent.args[2] if len(parent.args) > 2 else 0, n)
    sizes = [v.shape[dim] for v in value(parent)]
    if x.kinds[dim] != "l" or not all(isinstance(s, int) for s in sizes):
        raise _Opaque
    start = sum(sizes[:index])
    return _take(x, dim, slice(start, start + sizes[index]))


def _take(x: Lanes, dim: int, index: slice) -> Lanes:
    key = (slice(None),) * x.axis(dim) + (index,)
    terms = x.map(lambda a: a[key])
    size = len(range(*index.indices(x.sizes[dim])))
    return Lanes(x.kinds, (*x.sizes[:dim], size, *x.sizes[dim + 1 :]), terms, x.complex)


def _select(x: Lanes, dim: int, index: Any) -> Lanes:
    if x.kinds[dim] != "l" or not isinstance(index, int):
        raise _Opaque
    key = (slice(None),) * x.axis(dim) + (index,)
    kinds, sizes = x.kinds[:dim] + x.kinds[dim + 1 :], (*x.sizes[:dim], *x.sizes[dim + 1 :])
    return Lanes(kinds, sizes, x.map(lambda a: a[key]), x.complex)


@_rule(aten.select.int)
def _select_rule(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    return _select(x, _dim(node.args[1], len(x.kinds)), node.args[2])


def _bounds(node: Node, first: int, sizes: tuple[Any, ...]) -> tuple[int, slice, bool]:
    """(dim, range, whether the range is everything) of slice-like arguments from position `first` on."""
    args = [*node.args[first:], *(None,) * 4][:4]
    dim = _dim(args[0] or 0, len(sizes))
    start, end, step = args[1], args[2], args[3] or 1
    whole = start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62))
    if not whole and start in (None, 0) and step == 1:
        whole = same_size(value(end) if isinstance(end, Node) else end, sizes[dim])
    if not whole and not all(isinstance(v, int) or v is None for v in (start, end, step)):
        raise _Opaque
    return dim, slice(start, end, step), whole


@_rule(aten.slice.Tensor)
def _slice(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    dim, index, whole = _bounds(node, 1, x.sizes)
    if whole:
        return x
    if x.kinds[dim] != "l":
        raise _Opaque
    return _take(x, dim, index)


@_rule(aten.flip.default)
def _flip(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    for d in node.args[1]:
        dim = _dim(d, len(x.kinds))
        if x.kinds[dim] != "l":
            raise _Opaque
        axis = x.axis(dim)
        x = dataclasses.replace(x, terms=x.map(lambda a, axis=axis: np.flip(a, axis)))
    return x


@_rule(aten.roll.default)
def _roll(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    shifts, dims = node.args[1], node.args[2] if len(node.args) > 2 else []
    shifts = [shifts] if isinstance(shifts, int) else shifts
    if len(shifts) != len(dims):
        raise _Opaque
    for shift, d in zip(shifts, dims, strict=True):
        dim = _dim(d, len(x.kinds))
        if x.kinds[dim] != "l":
            raise _Opaque
        axis = x.axis(dim)
        x = dataclasses.replace(x, terms=x.map(lambda a, s=shift, axis=axis: np.roll(a, s, axis)))
    return x


def _permute(it: LaneInterpreter, x: Lanes, order: list[int]) -> Lanes:
    outer_order = [x.outer(d) for d in order if x.kinds[d] == "o"]
    axes = [x.axis(d) for d in order if x.kinds[d] == "l"]
    tail = [len(axes)] if x.complex else []
    y = Lanes("".join(x.kinds[d] for d in order), tuple(x.sizes[d] for d in order), x.terms, x.complex)
    if axes != sorted(axes):
        y.terms = y.map(lambda a: a.transpose(*axes, *tail))
    if outer_order != sorted(outer_order):
        y.terms = it.redim(y, lambda dims: tuple(dims[i] for i in outer_order))
    return y


@_rule(aten.transpose.int, aten.permute.default, aten.t.default)
def _transpose(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    order = list(range(len(x.kinds)))
    if node.target is aten.permute.default:
        order = [_dim(d, len(order)) for d in node.args[1]]
    elif node.target is aten.t.default:
        order.reverse()
    else:
        a, b = (_dim(d, len(order)) for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    return _permute(it, x, order)


def _insert_outer(it: LaneInterpreter, x: Lanes, dim: int) -> Lanes:
    at = x.outer(dim)
    terms = it.redim(x, lambda dims: (*dims[:at], -1, *dims[at:]))
    return Lanes(x.kinds[:dim] + "o" + x.kinds[dim:], (*x.sizes[:dim], 1, *x.sizes[dim:]), terms, x.complex)


def _drop(it: LaneInterpreter, x: Lanes, dim: int) -> Lanes:
    """Remove a dimension of size 1."""
    kinds, sizes = x.kinds[:dim] + x.kinds[dim + 1 :], (*x.sizes[:dim], *x.sizes[dim + 1 :])
    if x.kinds[dim] == "l":
        axis = x.axis(dim)
        return Lanes(kinds, sizes, x.map(lambda a: np.squeeze(a, axis)), x.complex)
    at = x.outer(dim)
    return Lanes(kinds, sizes, it.redim(x, lambda dims: (*dims[:at], *dims[at + 1 :])), x.complex)


@_rule(aten.unsqueeze.default)
def _unsqueeze(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    return _insert_outer(it, x, _dim(node.args[1], len(x.kinds) + 1))


def _one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


@_rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    n = len(x.kinds)
    dims = node.args[1] if len(node.args) > 1 else range(n)
    dims = [dims] if isinstance(dims, int) else dims
    for dim in sorted({_dim(d, n) for d in dims}, reverse=True):
        if _one(x.sizes[dim]):
            x = _drop(it, x, dim)
    return x


@_rule(aten.expand.default, aten.broadcast_to.default)
def _expand(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    sizes = tuple(value(node).shape)
    while len(x.kinds) < len(sizes):
        x = _insert_outer(it, x, 0)
    terms = x.terms
    for dim, (have, want) in enumerate(zip(x.sizes, sizes, strict=True)):
        if x.kinds[dim] == "l" and not same_size(have, want):
            if not isinstance(want, int):
                raise _Opaque
            axis = x.axis(dim)
            terms = [t.map(lambda a, axis=axis, want=want: np.repeat(a, want, axis)) for t in terms]
    return Lanes(x.kinds, sizes, terms, x.complex)


@_rule(aten.repeat.default)
def _repeat(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    repeats = node.args[1]
    while len(x.kinds) < len(repeats):
        x = _insert_outer(it, x, 0)
    if any(not _one(s) and not _one(r) for s, r in zip(x.sizes, repeats, strict=True)):
        raise _Opaque
    if any(k == "l" and not _one(r) for k, r in zip(x.kinds, repeats, strict=True)):
        raise _Opaque
    return Lanes(x.kinds, tuple(value(node).shape), x.terms, x.complex)


@_rule(aten.repeat_interleave.self_int)
def _repeat_interleave(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dim is None:
        raise _Opaque
    dim = _dim(dim, len(x.kinds))
    if x.kinds[dim] == "l":
        if not isinstance(node.args[1], int):
            raise _Opaque
        axis, n = x.axis(dim), node.args[1]
        return Lanes(x.kinds, tuple(value(node).shape), x.map(lambda a: np.repeat(a, n, axis)), x.complex)
    if not _one(x.sizes[dim]):
        raise _Opaque
    return Lanes(x.kinds, tuple(value(node).shape), x.terms, x.complex)


@_rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    return _reshape(it, x, tuple(value(node).shape))


def _reshape(it: LaneInterpreter, x: Lanes, new: tuple[Any, ...]) -> Lanes:
    """Views that insert or drop dimensions of size 1, or that split and merge lane dimensions among themselves."""
    for dim in reversed(range(len(x.kinds))):
        if _one(x.sizes[dim]):
            x = _drop(it, x, dim)
    want = [s for s in new if not _one(s)]
    kinds, shape, i = "", [], 0
    j = 0
    while j < len(want):
        if i < len(x.sizes) and same_size(x.sizes[i], want[j]):
            kinds += x.kinds[i]
            if x.kinds[i] == "l":
                shape.append(want[j])
            i, j = i + 1, j + 1
            continue
        # A group of lane dimensions with the same product on both sides.
        a, b, have, need = i, j, 1, 1
        while True:
            if have <= need and a < len(x.sizes) and x.kinds[a] == "l":
                have *= x.sizes[a]
                a += 1
            elif need < have and b < len(want) and isinstance(want[b], int):
                need *= want[b]
                b += 1
            else:
                raise _Opaque
            if have == need:
                break
        if not _pairs(x.sizes[i:a]) and not _pairs(want[j:b]):
            raise _Opaque  # heads, not pairs of lanes: the result is a tensor of its own
        kinds += "l" * (b - j)
        shape += want[j:b]
        i, j = a, b
    if i != len(x.sizes):
        raise _Opaque
    if "l" not in kinds:
        raise _Opaque
    tail = [2] if x.complex else []
    y = Lanes(kinds, tuple(want), x.map(lambda a: a.reshape(*shape, *tail)), x.complex)
    for dim, size in enumerate(new):
        if _one(size):
            y = _insert_outer(it, y, dim)
    return y


def _pairs(sizes: Any) -> bool:
    """Dimensions that spell pairs of lanes: (d/2, 2) or (2, d/2)."""
    return len(sizes) == 2 and 2 in sizes


def _align(it: LaneInterpreter, values: list[Lanes]) -> list[Lanes]:
    """Bring values to the same number and kinds of dimensions, as broadcasting does."""
    n = max(len(v.kinds) for v in values)
    out = []
    for v in values:
        while len(v.kinds) < n:
            v = _insert_outer(it, v, 0)
        out.append(v)
    for dim in range(n):
        kinds = {v.kinds[dim] for v in out}
        if len(kinds) == 2:
            out = [_as_lane(it, v, dim) if v.kinds[dim] == "o" else v for v in out]
    return out


def _as_lane(it: LaneInterpreter, v: Lanes, dim: int) -> Lanes:
    if not _one(v.sizes[dim]):
        raise _Opaque
    v = _drop(it, v, dim)
    axis = v.axis(dim)
    kinds, sizes = v.kinds[:dim] + "l" + v.kinds[dim:], (*v.sizes[:dim], 1, *v.sizes[dim:])
    return Lanes(kinds, sizes, v.map(lambda a: np.expand_dims(a, axis)), v.complex)


def _broadcast(values: list[Lanes]) -> tuple[tuple[Any, ...], list[Lanes]]:
    sizes = []
    for column in zip(*(v.sizes for v in values), strict=True):
        size = next((s for s in column if not _one(s)), 1)
        if any(not _one(s) and not same_size(s, size) for s in column):
            raise _Opaque
        sizes.append(size)
    shape = [s for s, k in zip(sizes, values[0].kinds, strict=True) if k == "l"]
    tail = [2] if values[0].complex else []
    out = []
    for v in values:
        terms = v.map(lambda a: np.broadcast_to(a, (*shape, *tail)))
        out.append(Lanes(v.kinds, tuple(sizes), terms, v.complex))
    return tuple(sizes), out


@_rule(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _add(it: LaneInterpreter, node: Node) -> Lanes:
    a, b = node.args[:2]
    sign = -1.0 if node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1.0
    alpha = sign * float(node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1))
    if not isinstance(b, Node):
        if b == 0:
            return it.get(a)
        raise _Opaque
    return _sum(it, it.get(a), it.get(b), alpha)


def _sum(it: LaneInterpreter, a: Lanes, b: Lanes, alpha: float) -> Lanes:
    if a.complex != b.complex:
        raise _Opaque
    a, b = _align(it, [a, b])
    sizes, (a, b) = _broadcast([a, b])
    if len(a.terms) + len(b.terms) > MAX_TERMS:
        raise _Opaque
    return Lanes(a.kinds, sizes, [*a.terms, *(t.scaled(alpha) for t in b.terms)], a.complex)


@_rule(aten.neg.default)
def _neg(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    return dataclasses.replace(x, terms=[t.scaled(-1.0) for t in x.terms])


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(it: LaneInterpreter, node: Node) -> Lanes:
    if not isinstance(node.args[1], (int, float)) or node.args[1] == 0:
        raise _Opaque
    x = it.get(node.args[0])
    return dataclasses.replace(x, terms=[t.scaled(1.0 / node.args[1]) for t in x.terms])


@_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(it: LaneInterpreter, node: Node) -> Lanes:
    return _product(it, node.args[0], node.args[1])


def _product(it: LaneInterpreter, a: Any, b: Any) -> Lanes:
    if not isinstance(a, Node):
        a, b = b, a
    if not isinstance(b, Node):
        if not isinstance(b, (int, float)):
            raise _Opaque
        x = it.get(a)
        return dataclasses.replace(x, terms=[t.scaled(float(b)) for t in x.terms])
    if it._is_table(a):
        a, b = b, a
    if it._is_table(a) or not it._is_table(b):
        raise _Opaque
    return times_table(it, it.get(a), b)


@_rule(aten.addcmul.default)
def _addcmul(it: LaneInterpreter, node: Node) -> Lanes:
    scale = float(node.kwargs.get("value", 1))
    return _sum(it, it.get(node.args[0]), _product(it, node.args[1], node.args[2]), scale)


def times_table(it: LaneInterpreter, x: Lanes, table: Node) -> Lanes:
    """x * table: table entries that meet a lane of x become part of its terms."""
    from megacpp_compile.recognise.tables import table_lanes

    if any((t.tab != NONE).any() for t in x.terms):
        raise _Opaque
    fake = value(table)
    if not isinstance(fake, torch.Tensor) or fake.dim() == 0 or fake.is_complex() != x.complex:
        raise _Opaque
    while len(x.kinds) < fake.dim():
        x = _insert_outer(it, x, 0)
    # A lane dimension of size 1 against a wider table dimension would mean the table widens the data.
    entries = table_lanes(it, table, x)
    shape = [s for s, k in zip(x.sizes, x.kinds, strict=True) if k == "l"]
    sizes = list(x.sizes)
    for i, n in enumerate(fake.shape):
        dim = len(sizes) - fake.dim() + i
        if _one(sizes[dim]) and not _one(n):
            if x.kinds[dim] == "l":
                raise _Opaque
            sizes[dim] = n
    if not x.complex:
        e = entries[0].map(lambda a: np.broadcast_to(a, shape))
        terms = [_attach(t, e) for t in x.terms]
        return Lanes(x.kinds, tuple(sizes), terms)
    if len(x.terms) != 1:
        raise _Opaque
    re, im = (e.map(lambda a: np.broadcast_to(a, shape)) for e in entries)
    xr, xi = (x.terms[0].map(lambda a, p=p: a[..., p]) for p in (0, 1))
    first = _stack_parts(_attach(xr, re), _attach(xr, im))
    second = _stack_parts(_attach(xi, im).scaled(-1.0), _attach(xi, re))
    return Lanes(x.kinds, tuple(sizes), [first, second], True)


def _attach(t: Term, e: Term) -> Term:
    """A term times a table entry (entry terms hold the table in src/lane)."""
    return Term(t.coef * e.coef, t.src, t.lane, np.where(t.coef == 0, NONE, e.src), np.where(t.coef == 0, NONE, e.lane))


def _stack_parts(a: Term, b: Term) -> Term:
    return Term(*(np.stack((getattr(a, f.name), getattr(b, f.name)), -1) for f in dataclasses.fields(Term)))


def _pad_terms(values: list[Lanes]) -> list[list[Term]]:
    count = max(len(v.terms) for v in values)
    return [[*v.terms, *(_zero(v.terms[0].coef.shape) for _ in range(count - len(v.terms)))] for v in values]


def _concat(values: list[Lanes], dim: int) -> Lanes:
    axis = values[0].axis(dim)
    columns = zip(*_pad_terms(values), strict=True)
    terms = [
        Term(*(np.concatenate([getattr(t, f.name) for t in c], axis) for f in dataclasses.fields(Term)))
        for c in columns
    ]
    sizes = list(values[0].sizes)
    sizes[dim] = sum(v.sizes[dim] for v in values)
    return Lanes(values[0].kinds, tuple(sizes), terms, values[0].complex)


@_rule(aten.cat.default)
def _cat(it: LaneInterpreter, node: Node) -> Lanes:
    parts = [p for p in node.args[0] if 0 not in value(p).shape]
    values = _align(it, [it.get(p) for p in parts])
    dim = _dim(node.args[1] if len(node.args) > 1 else 0, len(values[0].kinds))
    if values[0].kinds[dim] == "o" and all(_one(v.sizes[dim]) for v in values):
        values = [_as_lane(it, v, dim) for v in values]
    if values[0].kinds[dim] != "l" or len({v.complex for v in values}) != 1:
        raise _Opaque
    return _concat(values, dim)


@_rule(aten.stack.default)
def _stack(it: LaneInterpreter, node: Node) -> Lanes:
    values = [it.get(p) for p in node.args[0]]
    dim = _dim(node.args[1] if len(node.args) > 1 else 0, len(values[0].kinds) + 1)
    values = [_as_lane(it, _insert_outer(it, v, dim), dim) for v in values]
    if len({v.kinds for v in values}) != 1:
        raise _Opaque
    return _concat(values, dim)


@_rule(aten.view_as_complex.default)
def _view_as_complex(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    if x.kinds[-1] != "l" or x.sizes[-1] != 2:
        raise _Opaque
    return Lanes(x.kinds[:-1], x.sizes[:-1], x.terms, True)


@_rule(aten.complex.default)
def _complex(it: LaneInterpreter, node: Node) -> Lanes:
    re, im = _align(it, [it.get(node.args[0]), it.get(node.args[1])])
    if len(re.terms) != 1 or len(im.terms) != 1:
        raise _Opaque
    return Lanes(re.kinds, re.sizes, [_stack_parts(re.terms[0], im.terms[0])], True)


@_rule(aten.view_as_real.default)
def _view_as_real(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    if not x.complex:
        raise _Opaque
    return Lanes(x.kinds + "l", (*x.sizes, 2), x.terms)


@_rule(aten.real.default, aten.imag.default)
def _part(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    if not x.complex:
        raise _Opaque
    part = 0 if node.target is aten.real.default else 1
    return Lanes(x.kinds, x.sizes, x.map(lambda a: a[..., part]))


@_rule(aten._conj.default, aten.conj.default)
def _conj(it: LaneInterpreter, node: Node) -> Lanes:
    x = it.get(node.args[0])
    if not x.complex:
        raise _Opaque
    sign = np.array([1.0, -1.0])
    return dataclasses.replace(x, terms=[dataclasses.replace(t, coef=t.coef * sign) for t in x.terms])


@_rule(*_EMPTY)
def _empty(it: LaneInterpreter, node: Node) -> Lanes:
    fake = value(node)
    lanes = it.leaf(node)
    if lanes is None or not fake.is_floating_point():
        raise _Opaque
    shape = lanes.terms[0].coef.shape
    undefined = np.full(shape, UNDEFINED)
    return dataclasses.replace(lanes, terms=[_term(np.ones(shape), UNDEFINED, undefined)])


@_rule(aten.slice_scatter.default)
def _slice_scatter(it: LaneInterpreter, node: Node) -> Lanes:
    base = it.get(node.args[0])
    part = it.get(node.args[1])
    dim, index, whole = _bounds(node, 2, base.sizes)
    if whole:
        return part
    base, part = _align(it, [base, part])
    if base.kinds[dim] != "l":
        raise _Opaque
    base_terms, part_terms = _pad_terms([base, part])
    count = max(len(base_terms), len(part_terms))
    base_terms += [_zero(base_terms[0].coef.shape) for _ in range(count - len(base_terms))]
    part_terms += [_zero(part_terms[0].coef.shape) for _ in range(count - len(part_terms))]
    key = (slice(None),) * base.axis(dim) + (index,)

    def write(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = a.copy()
        out[key] = b
        return out

    terms = [
        Term(*(write(getattr(b, f.name), getattr(p, f.name)) for f in dataclasses.fields(Term)))
        for b, p in zip(base_terms, part_terms, strict=True)
    ]
    return Lanes(base.kinds, base.sizes, terms, base.complex)


def lane_count(lanes: Lanes) -> int:
    return math.prod(s for s, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "l")
