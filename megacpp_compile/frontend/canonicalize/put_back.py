"""Rows written to their places by a permutation are as many as the permutation has numbers.

Before: `order = argsort(ids); y = empty_like(rows); y[order] = rows; y.view(tokens, k, -1)` of a number of rows that is
        known at run time only, as of experts' outputs that are concatenated
After:  `y = rows.new_empty([slots, d]); y[order] = rows; ..` of as many as there are `ids`, and views of as many
A permutation of n places needs n of them, and n rows: with any other number of rows the write fails.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, same_size, value

_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.new_empty.default, aten.new_zeros.default)


def put_back(graph: fx.Graph, fake_mode: FakeTensorMode) -> int:
    """Give every such write its number of rows, and what is computed from it its sizes; returns how many there are."""
    count = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.index_put.default)):
        buffer, places, rows, *more = node.args
        if more or len(places) != 1 or not _counts_later(rows) or value(rows).dim() != value(buffer).dim():
            continue
        order, channels = places[0], value(buffer).shape[1:]
        # With a place for each of the rows there are no more places than numbers, and no row is put everywhere.
        whole = buffer.target in _LIKE and same_size(value(buffer).shape[0], value(rows).shape[0])
        if not whole or not _is_permutation(order) or not all(isinstance(n, int) for n in channels):
            continue
        old, read = {n: (value(n), n.args, n.kwargs) for n in graph.nodes}, _readers(rows)
        build = Builder(graph, fake_mode, min((node, *read)), node)
        slots = build.size(order, 0)
        build.anchor = node
        empty = build(aten.new_empty.default, rows, [slots, *channels], dtype=value(buffer).dtype)
        node.args = (empty, places, rows)
        sized = {user for reader in read for user in reader.users}
        for reader in read:
            reader.replace_all_uses_with(slots) if isinstance(slots, fx.Node) else _write(reader, slots)
        if _sized_anew({node, *sized}, fake_mode):
            count += 1
            continue
        for n, (fake, args, kwargs) in old.items():
            n.meta["val"], n.args, n.kwargs = fake, args, kwargs
    return count


def _readers(rows: fx.Node) -> list[fx.Node]:
    """The nodes that read how many `rows` there are."""
    return [n for n in rows.users if n.target is aten.sym_size.int and n.args[1] == 0]


def _write(reader: fx.Node, number: int) -> None:
    """Put `number` in the place of `reader`."""
    for user in list(reader.users):
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda n: number if n is reader else n  # type: ignore[return-value]
        )


def _counts_later(rows: Any) -> bool:
    """Whether the number of `rows` is known at run time only."""
    fake = value(rows)
    return isinstance(fake, torch.Tensor) and fake.dim() > 0 and bool(free_unbacked_symbols(fake.shape[:1]))


def _is_permutation(order: Any) -> bool:
    """Whether `order` holds every number below its length once, and its length is known."""
    if not isinstance(order, fx.Node) or value(order).dim() != 1 or free_unbacked_symbols(value(order).shape):
        return False
    if order.target is operator.getitem:
        return order.args[1] == 1 and order.args[0].target in (aten.sort.default, aten.sort.stable)  # type: ignore[union-attr]
    return order.target in (aten.argsort.default, aten.argsort.stable)


def _sized_anew(starts: set[fx.Node], fake_mode: FakeTensorMode) -> bool:
    """Compute the fake values of `starts` anew, and those that depend on them, as far as sizes change; False where one
    fails."""
    changed, node = set[fx.Node](), min(starts)
    while node.op != "root":
        if node.op == "call_function" and (node in starts or not changed.isdisjoint(node.all_input_nodes)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            try:
                with fake_mode, torch.no_grad():
                    new = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception:
                return False
            if not _alike(new, value(node)):
                node.meta["val"] = new
                changed.add(node)
        node = node.next
    return True


def _alike(new: Any, old: Any) -> bool:
    """Whether sizes are the same, and said by the same symbols: what has been checked at run time makes them equal, and
    leaves those behind that it was said by."""
    if isinstance(new, Sequence) and isinstance(old, Sequence):
        return len(new) == len(old) and all(map(_alike, new, old))
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return type(new) is type(old) and (not isinstance(new, torch.SymInt) or _same_symbols(new, old))
    return new.dim() == old.dim() and all(map(_same_symbols, new.shape, old.shape))


def _same_symbols(new: Any, old: Any) -> bool:
    return same_size(new, old) and free_unbacked_symbols(new) == free_unbacked_symbols(old)
