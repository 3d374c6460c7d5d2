"""Reads and sums of rows by index tensors, in any spelling: which tensor, and which rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import EXPANSIONS, IDENTITIES, PERMUTATIONS, REPETITIONS, RESHAPES, UNIT_DIMS
from megacpp_compile.reader.links import through

_SEEN = RESHAPES | UNIT_DIMS | PERMUTATIONS | EXPANSIONS | REPETITIONS | IDENTITIES
READS = (aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.embedding.default)
SCATTERS = (aten.scatter_add.default, aten.scatter_reduce.two)
SUMS_OF_ROWS = (*SCATTERS, aten.index_add.default, aten.index_put.default)


@or_none
def indexed(node: Node) -> tuple[Node, list[Any]] | None:
    """(tensor, its leading indices) of a read by index tensors: `t[i, j]`, `t[None, i]`, `t[i, j, None]`,
    `index_select`, `embedding`. A new dimension in the read is left out."""
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[0], [node.args[2]]  # type: ignore[return-value]
    if node.target is aten.embedding.default and len(node.args) == 2:
        return node.args[0], [node.args[1]]  # type: ignore[return-value]
    if node.target is aten.gather.default and node.args[1] == 0:
        token = repeated_over_channels(node.args[2])  # type: ignore[arg-type]
        whole = same_size(value(node).shape[-1], value(node.args[0]).shape[-1])
        return (node.args[0], [token]) if whole and token is not None else None  # type: ignore[return-value]
    NoMatch.when(node.target is not aten.index.Tensor)
    tensor, indices = node.args
    positions = list(indices)  # type: ignore[arg-type]
    if tensor.target is aten.unsqueeze.default:  # type: ignore[union-attr]
        source = tensor.args[0]  # type: ignore[union-attr]
        at = tensor.args[1] % (value(source).dim() + 1)  # type: ignore[union-attr, operator]
        if at < len(positions):
            NoMatch.when(positions[at] is not None)
            del positions[at]
        tensor = source
    NoMatch.when(not positions or any(p is None for p in positions))
    return tensor, positions  # type: ignore[return-value]


def row_read(node: Node) -> tuple[Node, Node] | None:
    """(tensor, numbers) where `node` is `tensor[numbers]`."""
    read = indexed(node)
    if read is None or len(read[1]) != 1 or not isinstance(read[1][0], Node):
        return None
    return read[0], read[1][0]


def read_of_every(node: Node) -> tuple[Node, Node] | None:
    """(tensor, numbers) where `node` reads rows of the tensor by numbers that count up to as many as it has, in
    whatever shape these are seen; `gather` has a number for every channel."""
    tensor: Node
    numbers: Node
    if node.target is aten.gather.default and node.args[1] == 0:
        tensor, _, numbers = node.args  # type: ignore[assignment]
        if not all(map(same_size, value(numbers).shape[1:], value(tensor).shape[1:])):
            return None
    elif (read := row_read(node)) is not None:
        tensor, numbers = read
    else:
        return None
    last = through(numbers, _SEEN)
    whole = counts_up(last) and same_size(value(last).shape[0], value(tensor).shape[0])
    return (tensor, numbers) if whole else None


def counts_up(node: Node) -> bool:
    """Whether `node` is 0, 1, 2, ..."""
    starts = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
    first = starts.get(node.target)
    return first is not None and (first == 0 or node.args[0] == 0) and node.args[2:] in ((), (1,))


def repeated_over_channels(index: Node) -> Node | None:
    """The numbers [..] of which `index` [.., d] repeats each over all channels."""
    one: Any = index.args[0] if index.target in (aten.expand.default, aten.repeat.default) else None
    if one is None or not _is_column(one, index):
        return None
    views = RESHAPES | {aten.unsqueeze.default}
    numbers = through(one, lambda n: n.target in views and _is_column(n, index))
    whole = value(numbers).dim() == value(index).dim() - 1
    return numbers if whole and all(map(same_size, value(numbers).shape, value(index).shape)) else None


def _is_column(node: Node, index: Node) -> bool:
    """Whether `node` has one entry where `index` has its last dimension, and its other dimensions."""
    *outer, last = value(node).shape or (0,)
    alike = value(node).dim() == value(index).dim() and all(map(same_size, outer, value(index).shape))
    return alike and same_size(last, 1)


@or_none
def added_rows(node: Node, to_zeros: bool = False) -> tuple[Node, Node, Node] | None:
    """(base, rows' numbers [R], what is added to each [R, d]) of a sum of whole rows, which counts a row as often as it
    comes: by `index_add`, `scatter_add`, `scatter_reduce`, or `index_put` that accumulates. `to_zeros` takes sums that
    leave the base's rows out, which are zeros; in a loop they are another expert's from the second one on."""
    args, sums = node.args, node.kwargs.get("alpha", 1) == 1
    if node.target is aten.index_add.default and len(args) == 4 and sums and _is_first(args[1], args[0]):
        return args[0], args[2], args[3]  # type: ignore[return-value]
    if node.target is aten.index_put.default and len(args) == 4 and args[3] and len(args[1]) == 1:  # type: ignore[arg-type]
        base, (token,), rows, _ = args  # type: ignore[misc]
        return (base, token, rows) if _whole_rows(base, token, rows) else None  # type: ignore[return-value, arg-type]
    NoMatch.when(node.target not in SCATTERS or not _is_first(args[1], args[0]) or not adds(node, to_zeros))
    base, _, index, rows = args[:4]
    NoMatch.when(value(base).dim() != 2)
    token = repeated_over_channels(index)  # type: ignore[arg-type]
    # A scatter takes the rows that the index has, of as many as there may be, and its channels.
    alike = all(map(same_size, value(index).shape, value(rows).shape)) and _whole_rows(base, token, rows)  # type: ignore[arg-type]
    return (base, token, rows) if alike else None  # type: ignore[return-value]


def adds(scatter: Node, to_zeros: bool = False) -> bool:
    """Whether `scatter` adds rows to those of its base; or `to_zeros` that it leaves out."""
    if scatter.target is aten.scatter_add.default:
        return not scatter.kwargs
    own = scatter.args[5] if len(scatter.args) > 5 else scatter.kwargs.get("include_self", True)
    return scatter.args[4] == "sum" and (own is True or to_zeros and is_filled(scatter.args[0], 0.0))


def _is_first(dim: Any, base: Any) -> bool:
    return dim in (0, -value(base).dim())


def _whole_rows(base: Node, token: Any, rows: Any) -> bool:
    """Whether `rows` [R, d] has one of `base` [T, d] for each of the numbers `token` [R]."""
    if not isinstance(token, Node) or not isinstance(rows, Node) or value(token).dtype is torch.bool:
        return False
    if value(base).dim() != 2 or value(rows).dim() != 2 or value(token).dim() != 1:
        return False
    return all(map(same_size, value(rows).shape, (value(token).shape[0], value(base).shape[1])))
