"""Matches an expert's part of rows that their gates multiply before they are cut."""

from __future__ import annotations

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors
from megacpp_compile.matchers.moe.combines import gates_in_order
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.moe.index_reads import indexed
from megacpp_compile.matchers.moe.rows import order_of
from megacpp_compile.matchers.moe.slot_parts import whole_of

aten = torch.ops.aten


def weighted_part(rows: Node) -> tuple[Node, Node] | None:
    """(all rows, gates in the order of slots) where `rows` is a part of their product, in the order of experts."""
    whole = whole_of(rows)
    product = None if whole is None else strip_row_views(whole)
    if product is None or product.target is not aten.mul.Tensor or not of_tensors(product):
        return None
    for a, b in (product.args, product.args[::-1]):
        read = indexed(strip_row_views(a))  # type: ignore[arg-type]
        order = None if read is None or len(read[1]) != 1 else order_of(read[1][0])
        gates = None if order is None else gates_in_order(b, order)  # type: ignore[arg-type]
        if isinstance(gates, Node):
            return strip_row_views(a), gates  # type: ignore[arg-type]
    return None
