"""Joined tensors that kernels write their results to, in the place of a `cat` that copies them there.

The gradient of an input projection that a mixer splits is the concatenation of its parts' gradients, which kernels
give: 0.35 ms of a Mamba-2 mixer's 7 for 16384 tokens on an H100. Here these kernels write columns of the joined tensor,
one after the other. Each takes it and returns it, so the graph stays functional; nobody reads it in between, so that
Inductor runs each on the same memory. What no kernel writes, like the gradient of step sizes, is copied to its columns.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import replace, value
from megacpp_compile.fx.views import RESHAPES
from megacpp_compile.lowerings._registry import choose, semantic_ops
from megacpp_compile.reader.links import above, through

# Rows of kernels' results begin at multiples of so many bytes, as they do in memory of their own.
ALIGNED = 16


@dataclasses.dataclass(eq=False)
class Join:
    """A `cat` along the last dimension, with the first column of each of its pieces; and of ops, by results, those
    where their kernels write. whole: the joined tensor as far as it is written; None before the first kernel."""

    cat: Node
    firsts: list[int]
    written: dict[Node, dict[int, int]]
    whole: Node | None = None

    @property
    def width(self) -> int:
        return int(value(self.cat).shape[-1])

    @property
    def columns(self) -> set[int]:
        """Where kernels' results begin."""
        return {first for places in self.written.values() for first in places.values()}

    def write(self, op: Node, whole: Node) -> None:
        """`whole` is the joined tensor with the results of `op`, whose views come out of the graph."""
        self.whole = whole
        pieces = list(self.cat.args[0])  # type: ignore[arg-type]
        for first in self.written[op].values():
            at = self.firsts.index(first)
            node, pieces[at] = pieces[at], whole
            self.cat.args = (list(pieces), *self.cat.args[1:])
            for view in above(node, op):
                view.graph.erase_node(view)

    def finish(self, copy: Callable[[Node, Node, int], Node]) -> None:
        """Put the joined tensor in the place of the `cat`. copy(whole, piece, first): copies a piece, ahead of the
        `cat`, to the columns that begin at `first`, and returns the joined tensor."""
        if self.whole is None:
            return
        whole, columns, cat = self.whole, self.columns, self.cat
        for first, piece in zip(self.firsts, cat.args[0], strict=True):  # type: ignore[arg-type]
            if first not in columns:
                whole = copy(whole, piece, first)
        if value(whole).shape != value(cat).shape:
            with cat.graph.inserting_before(cat):
                whole = cat.graph.call_function(aten.reshape.default, (whole, list(value(cat).shape)))
            whole.meta["val"] = value(cat)
        replace(cat, whole)


def find(graph: fx.Graph, target: str, late: bool) -> dict[Node, Join]:
    """The joins by the ops whose lowerings are to write to them, in a graph that is not lowered yet. late: a joined
    tensor is not to be there before its last kernel, which a prediction of the peak does not know of."""
    found: dict[Node, Join] = {}
    for node in graph.nodes:
        if node.target is aten.cat.default and (join := _join(node, target, found, late)):
            found |= dict.fromkeys(join.written, join)
    return found


def _join(cat: Node, target: str, taken: Mapping[Node, Join], late: bool) -> Join | None:
    """Where kernels write at least half of it; taken: those of ops that write to another."""
    pieces, whole = cat.args[0], value(cat)
    by_channels = (cat.args[1] if len(cat.args) > 1 else 0) in (-1, whole.dim() - 1)
    widths = [value(piece).shape[-1] for piece in pieces]
    known = all(isinstance(width, int) and width for width in widths) and whole.dim() > 1
    if whole.device.type != "cuda" or not (by_channels and known and _rows_are_apart(whole, whole.shape[-1])):
        return None
    firsts = [sum(widths[:i]) for i in range(len(widths))]
    made: dict[Node, dict[int, int]] = {}
    for piece, first in zip(pieces, firsts, strict=True):
        source = _source(piece, whole) if pieces.count(piece) == 1 else None
        if source is not None and source.args[0] not in taken and first * whole.itemsize % ALIGNED == 0:
            made.setdefault(source.args[0], {})[source.args[1]] = first
    written = {op: places for op, results in made.items() if (places := _places(op, results, len(widths), target))}
    if late and written:
        latest = next(node for node in reversed(cat.graph.nodes) if node in written)
        written = {latest: written[latest]}
    join = Join(cat, firsts, written)
    share = sum(width for width, first in zip(widths, firsts, strict=True) if first in join.columns)
    return join if 2 * share >= join.width else None


def _rows_are_apart(t: torch.Tensor, width: int) -> bool:
    """Whether t is contiguous, as far as is known, and its rows begin at aligned addresses."""
    steps, expected = list(t.stride()), 1
    for size, step in zip(reversed(t.shape), reversed(steps), strict=True):
        if not statically_known_true(step == expected):
            return False
        expected = expected * size
    return width * t.itemsize % ALIGNED == 0


def _source(piece: Node, whole: torch.Tensor) -> Node | None:
    """The result of an op that is all of `piece`, if nobody else reads it, and its elements are so in memory."""
    node, width = piece, value(piece).shape[-1]
    node = through(node, lambda n: n.target in RESHAPES and len(n.users) == 1)
    of_op = node.target is operator.getitem and node.args[0].target in semantic_ops()  # type: ignore[union-attr]
    if not of_op or len(node.users) != 1:
        return None
    result = value(node)
    alike = result.dtype == whole.dtype and _rows_are_apart(result, width)
    return node if alike and (_is_known(whole) or _same_rows(result, whole)) else None


def _is_known(t: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in t.shape)


def _same_rows(result: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether the result's first dimensions are the joined tensor's: those of no size that is known can't be folded."""
    rows = zip(result.shape, whole.shape[:-1], strict=False)
    return result.dim() >= whole.dim() and all(statically_known_true(a == b) for a, b in rows)


def _places(op: Node, results: Mapping[int, int], pieces: int, target: str) -> dict[int, int]:
    """Those of an op's `results` that its lowering can write there, with their first columns."""
    choice = choose(op.target, target, fx.map_arg(op.args, value))
    can = choice.writes_into if choice.traced else ()
    whole = len(can) == 1 or len(can) == pieces
    return {result: results[result] for result in can} if whole and all(result in results for result in can) else {}
