"""Reads and sums of rows by index tensors, in any spelling: which tensor, and which rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.matchers.views import RESHAPES

aten = torch.ops.aten


def indexed(node: Node) -> tuple[Node, list[Any]] | None:
    """(tensor, its leading indices) of a read by index tensors: `t[i, j]`, `t[None, i]`, `t[i, j, None]`,
    `index_select`, `embedding`. A new dimension in the read is left out."""
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[0], [node.args[2]]  # type: ignore[return-value]
    if node.target is aten.embedding.default and len(node.args) == 2:
        return node.args[0], [node.args[1]]  # type: ignore[return-value]
    if node.target is aten.gather.default and node.args[1] == 0:
        token = repeated_over_channels(node.args[2])  # type: ignore[arg-type]
        return None if token is None else (node.args[0], [token])  # type: ignore[return-value]
    if node.target is not aten.index.Tensor:
        return None
    tensor, indices = node.args
    positions = list(indices)  # type: ignore[arg-type]
    if tensor.target is aten.unsqueeze.default:  # type: ignore[union-attr]
        source = tensor.args[0]  # type: ignore[union-attr]
        at = tensor.args[1] % (value(source).dim() + 1)  # type: ignore[union-attr, operator]
        if at < len(positions):
            if positions[at] is not None:
                return None
            del positions[at]
        tensor = source
    if not positions or any(p is None for p in positions):
        return None
    return tensor, positions  # type: ignore[return-value]


def repeated_over_channels(index: Node) -> Node | None:
    """The numbers [R] of which `index` [R, d] repeats each over all channels."""
    once = index.target is aten.repeat.default and list(index.args[1])[:-1] == [1] * (value(index).dim() - 1)  # type: ignore[arg-type]
    if not once and index.target is not aten.expand.default:
        return None
    index = index.args[0]  # type: ignore[assignment]
    if value(index).dim() != 2 or value(index).shape[1] != 1:
        return None
    while index.target is aten.unsqueeze.default or index.target in RESHAPES:
        if value(index).dim() != 2 or value(index).shape[1] != 1:
            break
        index = index.args[0]  # type: ignore[assignment]
    return index if value(index).dim() == 1 else None


def added_rows(node: Node) -> tuple[Node, Node, Node] | None:
    """(base, rows' numbers [R], what is added to each [R, d]) of an `index_add` or `scatter_add` of whole rows, which
    counts a row as often as it comes."""
    args = node.args
    if node.target is aten.index_add.default and args[1] == 0 and node.kwargs.get("alpha", 1) == 1 and len(args) == 4:
        return args[0], args[2], args[3]  # type: ignore[return-value]
    if node.target is not aten.scatter_add.default or args[1] != 0:
        return None
    base, _, index, rows = args
    if value(base).dim() != 2:
        return None
    token = repeated_over_channels(index)  # type: ignore[arg-type]
    # scatter_add takes the rows that the index has, of as many as there may be
    alike = same_size(value(base).shape[1], value(rows).shape[1])
    alike = alike and all(map(same_size, value(index).shape, value(rows).shape))
    return (base, token, rows) if token is not None and alike else None  # type: ignore[return-value]
