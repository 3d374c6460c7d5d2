"""Chains of views: the node that a view shows, and the nodes that read a value through views."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from megacpp_compile.fx.views import is_view


def base_of(node: Node, through_items: bool = True) -> Any:
    """The node whose result `node` is a view of; with `through_items` also the one it is an item of."""
    while isinstance(node, Node) and (is_view(node) or through_items and node.target is operator.getitem):
        node = node.args[0]  # type: ignore[assignment]
    return node


def beyond_views(node: Node, through_items: bool = True) -> Iterator[Node]:
    """The nodes that read `node` or a view of it; with `through_items` also those that read an item of it."""
    for user in node.users:
        if is_view(user) or through_items and user.target is operator.getitem:
            yield from beyond_views(user, through_items)
        else:
            yield user
