"""Where a graph takes tensors apart token by token, and where it puts results together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.views import RESHAPES
from megacpp_compile.matchers.ssd.atoms import number
from megacpp_compile.matchers.ssd.tensor_ops import argument
from megacpp_compile.reader.parts import part_of


@dataclasses.dataclass(frozen=True)
class Read:
    """Position `at` of dimension `dim` of `source`, which has `count`; kept: as a dimension of size 1."""

    source: Node
    dim: int
    at: int
    count: int
    kept: bool


@dataclasses.dataclass(frozen=True)
class Collected:
    """`node` is made of one of `parts` for every position of its dimension `dim`; between: nodes on the way, which
    nothing else reads; merged: positions are the outer part of that dimension, whose inner part each of `parts` has."""

    node: Node
    parts: tuple[Node, ...]
    dim: int
    kept: bool
    between: frozenset[Node] = frozenset()
    merged: bool = False


def positions(size: Any) -> int | None:
    """How many `size` is: what loops over one input fix there, another may leave a symbol. Who takes each of them for a
    step of a loop has to `fix` it."""
    return size if isinstance(size, int) else size.node.hint


def read_of(node: Node) -> Read | None:
    """`node` as one position of a dimension of several."""
    part = part_of(node)
    count = None if part is None else positions(part.whole)
    if part is None or count is None or count < 2 or not isinstance(part.start, int):
        return None
    if part.kept and (part.step != 1 or positions(part.size) != 1):
        return None
    return Read(part.source, part.dim, part.start % count, count, part.kept)


def part_of_several(node: Node) -> int | None:
    """Of how many parts of a tensor, each of several positions, `node` is one; None where it is no such part."""
    part = part_of(node) if node.target is aten.slice.Tensor else None
    whole, own = (None, None) if part is None else map(number, (part.whole, part.size))
    if part is None or whole is None or own is None or own < 2 or whole % own or not part.is_run or part.start % own:
        return None
    return whole // own


def _of_whole(read: Read) -> Read:
    """`read`, of parts of a tensor that a loop over these takes, as one of that tensor."""
    while (cut := _cut(read.source, read.dim)) is not None:
        source, start, count = cut
        read = Read(source, read.dim, start + read.at, count, read.kept)
    return read


def _cut(node: Node, dim: int) -> tuple[Node, int, int] | None:
    """(source, first position, how many the source has) of `node`, several positions in a row of dimension `dim`."""
    if (row := read_of(node)) is not None:
        return _cut_to_rows(row, node) if row.dim == dim and not row.kept else None
    part = part_of(node)
    if part is None or not part.kept or part.dim != dim or part.step != 1 or isinstance(part.start, Node):
        return None
    start, count = positions(part.start), positions(part.whole)
    return None if start is None or count is None else (part.source, start + count * (start < 0), count)


def _cut_to_rows(row: Read, node: Node) -> tuple[Node, int, int] | None:
    """As `_cut`, where `node` is a row of a view that makes two dimensions of one."""
    view, dim = row.source, row.dim
    if view.target not in RESHAPES:
        return None
    source, inner = view.args[0], positions(value(node).shape[dim])
    whole, parted = list(value(source).shape), list(value(view).shape)
    rest = [*parted[:dim], *parted[dim + 2 :]]
    if inner is None or len(whole) != len(rest) + 1 or not all(map(same_size, [*whole[:dim], *whole[dim + 1 :]], rest)):
        return None
    return source, row.at * inner, row.count * inner  # type: ignore[return-value]


def reads_by_count(nodes: Iterable[Node], begin: int = 0) -> dict[int, dict[Node, Read]]:
    """All reads of tensors every position of which is read, from `begin` on, by how many positions there are: of whole
    tensors rather than of parts."""
    direct = {node: read for node in nodes if (read := read_of(node)) is not None}
    whole = _complete({node: _of_whole(read) for node, read in direct.items()}, begin)
    taken = {node for reads in whole.values() for node in reads}
    parts = _complete({node: read for node, read in direct.items() if node not in taken}, begin)
    return {count: whole.get(count, {}) | parts.get(count, {}) for count in whole | parts}


def _complete(reads: Mapping[Node, Read], begin: int) -> dict[int, dict[Node, Read]]:
    groups = by_key(((read.source, read.dim, read.count), node) for node, read in reads.items())
    whole = ((kind[2], n) for kind, own in groups.items() if {reads[n].at for n in own} == {*range(begin, kind[2])}
             for n in own)  # fmt: skip
    return {count: {n: reads[n] for n in own} for count, own in by_key(whole).items()}


def collected(nodes: Iterable[Node], count: int) -> list[Collected]:
    """What is put together of `count` parts, in order: stacks, concatenations, also of what is put together of some of
    them, and writes into each position of one tensor."""
    found = []
    for node in nodes:
        if node.target in (aten.stack.default, aten.cat.default):
            joined = _joined(node, count)
            found += [joined] if joined is not None else []
        elif _writes_into(node) and not any(map(_writes_into, node.users)):
            found += _writes(node, count)
    return found


@or_none
def _joined(node: Node, count: int) -> Collected | None:
    parts: tuple[Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
    dim = argument(node, 1, "dim", 0) % value(node).dim()
    # An empty tensor of fewer dimensions may be concatenated with any.
    NoMatch.when(
        not all(isinstance(p, Node) and value(p).dim() > dim - (node.target is aten.stack.default) for p in parts)
    )
    if node.target is aten.stack.default:
        return Collected(node, parts, dim, kept=False) if len(parts) == count else None
    sizes = [value(p).shape[dim] for p in parts]
    if len(parts) == count:
        kept = all(same_size(size, 1) for size in sizes)
        alike = kept or all(map(same_shape, parts[1:], parts[:-1]))
        return Collected(node, parts, dim, kept, merged=not kept) if alike else None
    each = zip(parts, map(positions, sizes), strict=True)
    inner = [c for p, n in each for c in collected([p], n or 0) if c.dim == dim]
    NoMatch.when(len(inner) != len(parts) or any(c.merged or len(c.node.users) > 1 for c in inner))
    every = tuple(p for c in inner for p in c.parts)
    NoMatch.when(len(every) != count or len({c.kept for c in inner}) > 1)
    return Collected(node, every, dim, inner[0].kept, frozenset().union(*({c.node, *c.between} for c in inner)))


def _writes_into(node: Node) -> bool:
    return _written(node) is not None or _overwrites(node)


def _overwrites(node: Node) -> bool:
    """Whether `node` writes its second argument over all of its first: the end of a write into a view of everything."""
    if node.target is not aten.slice_scatter.default:
        return False
    whole = all(map(same_size, value(node.args[1]).shape, value(node).shape))
    return whole and value(node.args[1]).dtype == value(node).dtype


def _written(node: Node) -> tuple[int, int, bool] | None:
    """(dimension, position, whether it is kept) that `node` writes its second argument to."""
    if node.target is aten.select_scatter.default:
        dim, at, kept = node.args[2] % value(node).dim(), node.args[3], False  # type: ignore[operator]
    elif node.target is aten.slice_scatter.default:
        of, start, end, step = [*node.args[2:], *(None,) * 4][:4]
        dim, kept = (of or 0) % value(node).dim(), True  # type: ignore[operator]
        size = positions(value(node).shape[dim])
        if size is None or not all(isinstance(v, int | None) for v in (start, end, step)):
            return None
        at, last, step = slice(start, end, step).indices(size)
        if last - at != 1 or step != 1:
            return None
    else:
        return None
    size = positions(value(node).shape[dim])
    return (dim, at % size, kept) if size and isinstance(at, int) else None


def _writes(last: Node, count: int) -> list[Collected]:
    """`last` as the end of writes into every position, if it is."""
    chain, between, node = [], set[Node](), last
    while _writes_into(node):
        between.add(node)
        to = None if _overwrites(node) else _written(node)
        if to is not None:
            chain.append((node, to))
        base = node.args[0 if to is not None else 1]
        if not isinstance(base, Node):
            return []
        node = base
    places = [to for _, to in reversed(chain)]
    dims = {(dim, kept) for dim, _, kept in places}
    if len(dims) > 1 or [at for _, at, _ in places] != list(range(count)):
        return []
    if positions(value(last).shape[next(iter(dims))[0]]) != count:
        return []  # what is not written stays what it was
    (dim, kept), parts = dims.pop(), [n.args[1] for n, _ in reversed(chain)]
    if any(u is not last and u not in between for n in between - {last} for u in n.users):
        return []
    if not all(isinstance(p, Node) and value(p).dtype == value(last).dtype for p in parts):
        return []
    return [Collected(last, tuple(parts), dim, kept, frozenset(between - {last}))]  # type: ignore[arg-type]
