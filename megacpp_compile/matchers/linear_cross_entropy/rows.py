"""Views of logits that choose or arrange rows and leave the vocabulary whole, and the same views of hidden states.

A view is a `RowView`: the node, and where the vocabulary stands before and behind it. `replay` applies one to another
tensor of the same rows, whose channels stand last.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node, map_arg

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.views import RESHAPES, SPLITS, SQUEEZES, UNIT_DIMS, UNSQUEEZE, is_identity
from megacpp_compile.reader.dims import permutation


@dataclasses.dataclass(frozen=True)
class RowView:
    """A view or selection of rows. `before`, `behind`: the vocabulary's dimension in its operand and in its result.

    A `gather` of one word a row stands for the rows that it reads: of each dimension as many as it has indices."""

    node: Node
    before: int
    behind: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for views that do the same to the same rows, () for one that leaves all rows in their order."""
        target, arguments = _call(self.node)
        if is_identity(self.node) or target in RESHAPES or target in UNIT_DIMS or self._moves_words_only():
            return ()
        item = self.node.args[1] if self.node.target is operator.getitem else None
        return target, str(arguments), item, self.before, str(value(self.source).shape)

    def _moves_words_only(self) -> bool:
        order = permutation(self.node)
        rows = [d for d in order or () if d != self.before]
        return order is not None and rows == sorted(rows)

    @property
    def source(self) -> Node:
        """What it is a view of."""
        return self.node.args[0].args[0] if self.node.target is operator.getitem else self.node.args[0]  # type: ignore

    @property
    def index(self) -> int | None:
        """Which entry of the first dimension it is, as `rows[3]` or what iterating over rows gives; None otherwise."""
        entry = first_of(self.node) if self.before != 0 else None
        return entry and entry[1]

    def chosen_by(self) -> list[Node]:
        """The nodes beside what it is a view of: masks, indices, sizes."""
        call = self.node.args[0] if self.node.target is operator.getitem else self.node
        return [n for n in call.all_input_nodes if n is not self.source]  # type: ignore[union-attr]


def first_of(node: Node) -> tuple[Node, int] | None:
    """(tensor, i) where `node` is entry i of the tensor's first dimension."""
    target, arguments = _call(node)
    if target is aten.unbind.int and node.target is operator.getitem and arguments[0] == 0:
        return node.args[0].args[0], node.args[1]  # type: ignore
    if target is aten.select.int and arguments[0] == 0 and isinstance(arguments[1], int):
        return node.args[0], arguments[1]  # type: ignore
    return None


def row_view(node: Node, dim: int) -> RowView | None:
    """`node` as a view of the rows of its first argument, where the vocabulary is dimension `dim`; None where it is no
    such view. An item of a split stands for both nodes."""
    source = node.args[0].args[0] if node.target is operator.getitem else node.args[0]  # type: ignore[union-attr]
    old, new = value(source).shape, value(node).shape
    behind = _behind(node, dim, old, new)
    if behind is None or not 0 <= behind < len(new) or not same_size(old[dim], new[behind]):
        return None
    return RowView(node, dim, behind)


def _behind(node: Node, dim: int, old: Sequence[Any], new: Sequence[Any]) -> int | None:
    target, n = node.target, len(old)
    if is_identity(node):
        return dim
    if target in RESHAPES:
        return _in_reshape(dim, old, new)
    if target is UNSQUEEZE:
        return dim + (node.args[1] % (n + 1) <= dim)  # type: ignore[operator]
    if target in SQUEEZES:
        gone = _squeezed(node, old)
        return None if gone is None or dim in gone else dim - sum(d < dim for d in gone)
    if (order := permutation(node)) is not None:
        return order.index(dim)
    target, arguments = _call(node)
    if target is aten.index.Tensor:
        taken = sum(value(i).dim() if i is not None and value(i).dtype == torch.bool else 1 for i in arguments[0])
        return len(new) - 1 if dim == n - 1 and taken <= dim else None
    along = arguments[0] % n if target in _ALONG else arguments[1] % n if target in SPLITS else None
    if along is None or along == dim:
        return None
    return dim - (along < dim) if target in (aten.select.int, aten.unbind.int) else dim


# Ops that act along the dimension in args[1]; a split has it in args[2].
_ALONG = (aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.unbind.int)


def _call(node: Node) -> tuple[Any, list[Any]]:
    """(what is called, its arguments behind the tensor, with the dimension spelled out); of an item, those of the split
    or unbind. (None, []) of an input."""
    node = node.args[0] if node.target is operator.getitem else node  # type: ignore[assignment]
    if node.op != "call_function":
        return None, []
    arguments = list(node.args[1:])
    if node.target in SPLITS:
        arguments = [arguments[0], arguments[1] if len(arguments) > 1 else 0]
    elif node.target in _ALONG and not arguments:
        arguments = [0]
    return node.target, arguments


def _in_reshape(dim: int, old: Sequence[Any], new: Sequence[Any]) -> int | None:
    """Where dimension `dim` is behind a reshape that leaves it whole: as the last, or with the same dimensions in front
    of it or behind it."""
    if dim == len(old) - 1:
        return len(new) - 1
    if len(new) > dim and all(map(same_size, old[: dim + 1], new[: dim + 1])):
        return dim
    tail = len(old) - dim
    return len(new) - tail if len(new) >= tail and all(map(same_size, old[-tail:], new[-tail:])) else None


def _squeezed(node: Node, old: Sequence[Any]) -> list[int] | None:
    n = len(old)
    given = node.args[1] if len(node.args) > 1 else range(n)
    dims = [d % n for d in ([given] if isinstance(given, int) else given)]  # type: ignore[union-attr]
    if not all(isinstance(old[d], int) for d in dims):
        return None
    return [d for d in dims if old[d] == 1]


def keys(views: Sequence[RowView]) -> tuple[Any, ...]:
    """Equal for views of the same logits that show the same rows in the same order, under whatever shape."""
    return tuple(key for view in views if (key := view.key))


def outer(d: int, words: int) -> int:
    """Dimension `d` of logits with `words` as the vocabulary's, among rows alone."""
    return d - (d > words)


def replay(build: Builder, view: RowView, x: Node, given: Callable[[Node], Node]) -> Node:
    """The rows of `x` [..., h] that `view` shows of logits with the same rows, in the same order, h last. given: the
    node that stands for one of `chosen_by`."""
    node, dim = view.node, view.before
    if is_identity(node):
        return x
    target, arguments = _call(node)
    arguments = list(map_arg(arguments, given))
    n = value(x).dim()
    if target in RESHAPES:
        sizes = list(arguments[0])
        del sizes[view.behind]
        return build(aten.reshape.default, x, [*sizes, value(x).shape[-1]])
    if target is UNSQUEEZE:
        at = arguments[0] % (n + 1)
        return build(target, x, outer(at, dim))
    if target in SQUEEZES:
        source = value(node.args[0])
        gone = [outer(d, dim) for d in _squeezed(node, source.shape) or ()]
        return build.squeezed(x, gone)
    if (order := permutation(node)) is not None:
        rows = [outer(d, dim) for d in order if d != dim]
        return build.permuted(x, [*rows, n - 1])
    if target is aten.index.Tensor:
        return build(target, x, *arguments)
    if target is aten.gather.default:
        return _first_rows(build, x, arguments[1], dim)
    if target in SPLITS:
        return build.item(build(target, x, arguments[0], outer(arguments[1] % n, dim)), node.args[1])  # type: ignore[arg-type]
    new = build(target, x, outer(arguments[0] % n, dim), *arguments[1:])
    return build.item(new, node.args[1]) if target is aten.unbind.int else new  # type: ignore[arg-type]


def _first_rows(build: Builder, x: Node, index: Node, dim: int) -> Node:
    """As many rows of `x` as `index` has, along each dimension but its own `dim`."""
    for d, n in enumerate(value(index).shape):
        if d != dim and not same_size(n, value(x).shape[outer(d, dim)]):
            x = build(aten.slice.Tensor, x, outer(d, dim), 0, build.size(index, d))
    return x
