"""Chains of casts, copies and views: what a value is one of, and what alone reads it by way of such."""

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


def onward(node: Node, *links: Any) -> list[Node]:
    """`node`, its only user if that is one of `links`, as in `chain`, the only user of that if it is one, and so on."""
    found = [node]
    while (user := only_user(found[-1])) is not None and _source(user, links):
        found.append(user)
    return found


def only_user(node: Node) -> Node | None:
    """The node that alone reads `node`, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


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
