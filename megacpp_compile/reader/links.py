"""Chains of first arguments: what a value is a cast, a copy or a view of."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import is_cast


def chain(node: Any, *links: Any) -> list[Any]:
    """`node`, what it is made of if it is one of `links`, what that is made of if it is one, and so on; what is no node
    ends the chain.

    links: each an op, a set of ops, or a function of a node. What a link is made of is its first argument, or the node
    that the function returns.
    """
    found = [node]
    while isinstance(node, Node) and (source := _source(node, links)):
        node = node.args[0] if source is True else source
        found.append(node)
    return found


def through(node: Any, *links: Any) -> Any:
    """What `node` is `links` of: the end of its chain."""
    return chain(node, *links)[-1]


def above(node: Any, base: Any) -> list[Node]:
    """The nodes from `node` down to `base`, without it, by first arguments."""
    found = []
    while node is not base:
        found.append(node)
        node = node.args[0]
    return found


def widens(node: Node) -> bool:
    """Whether `node` is a cast to no fewer bits."""
    return is_cast(node) and value(node).dtype.itemsize >= value(node.args[0]).dtype.itemsize


def _source(node: Node, links: tuple[Any, ...]) -> Any:
    """What the first of `links` that `node` is says it is made of: True for its first argument; None for no link."""
    for link in links:
        if isinstance(link, OpOverload):
            source = node.target is link
        else:
            source = link(node) if callable(link) else node.target in link
        if source:
            return source if isinstance(source, Node) else True
    return None
