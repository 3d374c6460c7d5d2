"""Packed documents: several in one row of tokens, told apart by the offsets at which they begin.

Models have the offsets as FlashAttention does, `cu_seqlens` [documents + 1], ascending from 0, and make of them each
token's position in its document, or the number of its document. Both are read here from what they are computed by. A
document without tokens is one too, so what counts distinct offsets (flags that are set, not added up) is not taken.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.filled import ONES, ZEROS, padded_with
from megacpp_compile.fx.views import CASTS, EXPANSIONS, IDENTITIES, PADS, RESHAPES, UNIT_DIMS
from megacpp_compile.fx.walks import ancestors, descendants, reached
from megacpp_compile.matchers.linear import is_projection
from megacpp_compile.reader.links import through

_LAST = 1 << 62
_ARANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_CHOICES = {aten.masked_fill.Scalar, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther}
_COMPARISONS = {aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.ge.Scalar}
_FULL = {aten.full.default, aten.full_like.default, aten.new_full.default}


@dataclasses.dataclass(frozen=True)
class Offsets:
    """The ascending offsets `base[first : len(base) - dropped]`; `base` is a row of integers."""

    base: Node
    first: int = 0
    dropped: int = 0


@or_none
def positions(node: Any) -> Offsets | None:
    """The offsets such that `node` [tokens] is each token's distance from the last offset at or before it."""
    node = NoMatch.unless(_row(node))
    if _is_floor_at_zero(node):
        return positions(node.args[0])
    NoMatch.when(node.target is not aten.sub.Tensor or node.kwargs or not is_counting(node.args[0]))
    return _starts(_row(node.args[1]))


@or_none
def document_numbers(node: Any) -> Offsets | None:
    """The offsets such that `node` [tokens] is the number of the last one at or before each token."""
    node = NoMatch.unless(_row(node))
    if _is_floor_at_zero(node):
        return document_numbers(node.args[0])
    if node.target is aten.sub.Tensor and not node.kwargs and _is_number(node.args[1], 1):
        counted = _count_until(_row(node.args[0]))
        return counted if counted is not None and counted.first == 0 else None
    if node.target is aten.repeat_interleave.self_Tensor:
        return _lengths(node.args[1]) if is_counting(node.args[0]) and _flat(node) else None
    if node.target is aten.repeat_interleave.Tensor:
        return _lengths(node.args[0])
    counted = _count_until(node)
    return Offsets(counted.base, 0, counted.dropped) if counted is not None and counted.first == 1 else None


def compared_documents(node: Node) -> Node | None:
    """A comparison of integers of the model's inputs that `node` is computed by, on this side of projections and of
    ops of this package: documents' numbers, as a rule, or positions that are 0 where a large negative number is
    written. None where there is none."""
    for n in reached([node], lambda n: [] if _ends(n) else n.all_input_nodes):
        if n.target in (aten.eq.Tensor, aten.ne.Tensor) and not any(map(_fractional, n.args)) and not is_constant(n):
            return n
        if (start := decayed_away(n)) is not None:
            return start
    return None


def _ends(node: Node) -> bool:
    return node.op != "call_function" or is_projection(node) or str(node.target).startswith("megacpp.")


def masked_by_documents(node: Node, most: int = 5) -> Node | None:
    """The comparison, as `compared_documents` has it, of a mask that is applied to `node` or to what is made of it, in
    the next `most` nodes on each way."""
    seen, ahead = {node}, [node]
    for _ in range(most):
        ahead = [u for n in ahead for u in n.users if u not in seen and u.op == "call_function"]
        ahead = [u for u in ahead if not is_projection(u)]
        masks = [a for u in ahead for a in u.all_input_nodes if a not in seen and a not in ahead]
        flags = [a for a in masks if getattr(value(a), "dtype", None) is torch.bool]
        if (found := next(filter(None, map(compared_documents, flags)), None)) is not None:
            return found
        seen.update(ahead)
    return None


@or_none
def decayed_away(node: Node) -> Node | None:
    """The comparison of an input's integers with a number that says where `node` is a large negative number."""
    NoMatch.when(node.target not in _CHOICES)
    asked, *_ = [a for a in node.all_input_nodes if getattr(value(a), "dtype", None) is torch.bool] or [None]
    filled = [a for a in node.args if isinstance(a, float | int) and not isinstance(a, bool) and a <= -10]
    asked = through(asked, RESHAPES, UNIT_DIMS, EXPANSIONS, IDENTITIES)
    NoMatch.when(not filled or asked is None or asked.target not in _COMPARISONS or _fractional(asked.args[0]))
    return None if is_constant(asked) else asked


def is_constant(node: Node) -> bool:
    """Whether `node` is computed from no input of the model."""
    inputs = (n for n in ancestors([node]) if n.op in ("placeholder", "get_attr"))
    return not any(isinstance(value(n), torch.Tensor) for n in inputs)


def plain(node: Any) -> Any:
    """`node` before casts between integers, copies, and views that insert or drop dimensions of size 1."""
    return through(node, _is_plain)


def _is_plain(node: Node) -> bool:
    if node.target in IDENTITIES | CASTS | {aten.detach.default}:
        return not _fractional(node) and not _fractional(node.args[0])
    return node.target in RESHAPES | UNIT_DIMS | EXPANSIONS and _wide(node) == _wide(node.args[0]) <= 1


def _row(node: Any) -> Node | None:
    """`plain(node)` where that is a row of integers."""
    node = plain(node)
    return node if isinstance(node, Node) and not _fractional(node) and _wide(node) <= 1 else None


def is_counting(node: Any) -> bool:
    """Whether `node` is 0, 1, 2, ... in integers."""
    node = _row(node)
    if node is None or node.target not in _ARANGES:
        return False
    if node.target is aten.arange.default:
        return True
    return _is_number(node.args[0], 0) and (len(node.args) < 3 or _is_number(node.args[2], 1))


@or_none
def offsets(node: Any) -> Offsets | None:
    """A row of integers as part of the longest row that it is cut from at its ends."""
    node = NoMatch.unless(_row(node))
    cut = _cut(node)
    if cut is None:
        return Offsets(node)
    whole = offsets(cut[0])
    return whole and Offsets(whole.base, whole.first + cut[1], whole.dropped + cut[2])


@or_none
def _cut(node: Node) -> tuple[Node, int, int] | None:
    """(tensor, elements cut off in front, behind) of a slice of a row."""
    NoMatch.when(node.target is not aten.slice.Tensor)
    arguments: Any = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
    x, dim, start, end, step = arguments
    sizes = value(x).shape
    size = sizes[dim]
    others = [n for i, n in enumerate(sizes) if i != dim % len(sizes)]
    NoMatch.when(
        step != 1 or not isinstance(start, (int, type(None))) or (start or 0) < 0 or any(n != 1 for n in others)
    )
    if end is None or isinstance(end, int) and end >= _LAST:
        return x, start or 0, 0
    if isinstance(end, int) and end < 0:
        return x, start or 0, -end
    if isinstance(end, int) and isinstance(size, int):
        return x, start or 0, max(size - end, 0)
    return None


def _starts(node: Node | None) -> Offsets | None:
    """The offsets of which `node` [tokens] is, for each token, the last one at or before it."""
    if node is None:
        return None
    if node.target is aten.repeat_interleave.self_Tensor and _flat(node):
        begins, lengths = offsets(node.args[0]), _lengths(node.args[1])
        if begins is None:
            return None
        if lengths is not None and begins.base is lengths.base and begins.first == lengths.first:
            return lengths if begins.dropped == lengths.dropped + 1 else None
        return begins if begins == Offsets(begins.base) and _sums_before(begins.base, node.args[1]) else None
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        table, numbers = node.args[0], node.args[1][0]  # type: ignore[index]
    elif node.target in (aten.index_select.default, aten.gather.default) and value(node.args[0]).dim() == 1:
        table, numbers = node.args[0], node.args[2]
    else:
        return None
    found, held = document_numbers(numbers), offsets(table)
    return found if found and held and held.base is found.base and held.first == found.first else None


@or_none
def _lengths(node: Any) -> Offsets | None:
    """The offsets between which `node` [documents] are the distances."""
    node = NoMatch.unless(_row(node))
    if node.target is aten.diff.default and len(node.args) == 1 and not node.kwargs:
        return offsets(node.args[0])
    if node.target is aten.sub.Tensor and not node.kwargs:
        ends, begins = (offsets(a) for a in node.args[:2])
        if ends is None or begins is None or ends.base is not begins.base:
            return None
        neighbours = ends.first == begins.first + 1 and begins.dropped == ends.dropped + 1
        return Offsets(begins.base, begins.first, ends.dropped) if neighbours else None
    return next((Offsets(n) for n in _sums_of(node)), None)


def _sums_of(lengths: Node) -> list[Node]:
    """The rows of offsets made of `lengths`: 0 and the sums up to each of them."""
    made = descendants([lengths], lambda n: n.target in {*IDENTITIES, *CASTS, aten.cumsum.default, *_JOINS})
    return [n for n in made if n.target in _JOINS and _sums_before(n, lengths, behind=True)]


_JOINS = PADS | {aten.cat.default}


def _sums_before(node: Node, lengths: Any, behind: bool = False) -> bool:
    """Whether `node` is the sum of the lengths before each document; with `behind`, and the sum of all."""
    lengths = plain(lengths)
    if not behind:
        return node.target is aten.sub.Tensor and _is_sum(node.args[0], lengths) and plain(node.args[1]) is lengths
    if node.target is aten.cat.default:
        parts: Any = node.args[0]
        begins_at_zero = len(parts) == 2 and _is_zeros(parts[0]) and value(parts[0]).shape == (1,)
        return begins_at_zero and _is_sum(parts[1], lengths)
    return padded_with(node) == 0 and list(node.args[1]) == [1, 0] and _is_sum(node.args[0], lengths)  # type: ignore[arg-type]


def _is_sum(node: Any, lengths: Any) -> bool:
    node = plain(node)
    return isinstance(node, Node) and node.target is aten.cumsum.default and plain(node.args[0]) is lengths


def _count_until(node: Any) -> Offsets | None:
    """The offsets of which `node` [tokens] counts those at or before each token."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in (aten.searchsorted.Tensor, aten.bucketize.Tensor):
        listed, tokens = node.args[:2] if node.target is aten.searchsorted.Tensor else node.args[1::-1]
        right = node.kwargs.get("right") or node.kwargs.get("side") == "right"
        return offsets(listed) if right and not node.kwargs.get("sorter") and is_counting(tokens) else None
    if node.target is aten.sum.dim_IntList and isinstance(node.args[0], Node):
        return _counted_comparisons(node)
    if node.target is aten.cumsum.default:
        return _counted_flags(_row(node.args[0]))
    return None


def _counted_comparisons(node: Node) -> Offsets | None:
    compared: Any = node.args[0]
    if compared.target not in (aten.ge.Tensor, aten.le.Tensor):
        return None
    tokens, listed = compared.args[:: 1 if compared.target is aten.ge.Tensor else -1]
    rank = value(compared).dim()
    along = [i for i, n in enumerate(_aligned(listed, rank)) if n != 1]
    summed = [d % rank for d in node.args[1]]  # type: ignore[union-attr]
    across = all(_aligned(tokens, rank)[i] == 1 for i in summed)
    return offsets(listed) if is_counting(tokens) and across and along == summed else None


def _aligned(node: Any, rank: int) -> list[Any]:
    shape = value(node).shape
    return [1] * (rank - len(shape)) + list(shape)


def _counted_flags(node: Node | None) -> Offsets | None:
    """The offsets at which ones were added to zeros, as often as there are."""
    while node is not None and (cut := _cut(node)) is not None and cut[1] == 0:
        node = _row(cut[0])  # flags behind the last token are none of any token's
    if node is None:
        return None
    if node.target is aten.index_put.default:
        flags, (at, *more), ones, *accumulate = node.args  # type: ignore[misc]
        if more or not (accumulate and accumulate[0] or node.kwargs.get("accumulate")):
            return None
    elif node.target in (aten.index_add.default, aten.scatter_add.default) and not node.kwargs:
        flags, _, at, ones = node.args
    else:
        return None
    return offsets(at) if _is_zeros(flags) and _is_ones(ones) else None


def _is_zeros(node: Any) -> bool:
    node = plain(node)
    return isinstance(node, Node) and (node.target in ZEROS or node.target in _FULL and _is_number(node.args[-1], 0))


def _is_ones(node: Any) -> bool:
    node = plain(node)
    return isinstance(node, Node) and (node.target in ONES or node.target in _FULL and _is_number(node.args[-1], 1))


def _is_floor_at_zero(node: Node) -> bool:
    """Whether `node` is its operand where that is not negative."""
    if node.target is aten.clamp_min.default:
        return _is_number(node.args[1], 0)
    low, high = [*node.args[1:], *(None, None)][:2] if node.target is aten.clamp.default else (None, None)
    return high is None and "max" not in node.kwargs and _is_number(node.kwargs.get("min", low), 0)


def _flat(repeat: Node) -> bool:
    return len(repeat.args) < 3 or repeat.args[2] in (None, 0, -1)


def _is_number(x: Any, wanted: int) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x == wanted


def _fractional(node: Any) -> bool:
    fake = value(node)
    return not isinstance(fake, torch.Tensor) or fake.is_floating_point() or fake.is_complex()


def _wide(node: Any) -> int:
    """How many dimensions are not known to be 1 wide."""
    return sum(not (isinstance(n, int) and n == 1) for n in value(node).shape)
