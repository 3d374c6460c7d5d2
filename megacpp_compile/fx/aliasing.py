"""Which nodes of a graph share memory, and after which reader that memory is free."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.walks import descendants


def overwritable(tensor: Any, reader: Node) -> bool:
    """Whether `tensor`'s memory is free after `reader`: this graph allocates it, and neither it nor any view of it is
    read later or returned. Chooses the cheaper kernel; correctness does not rest on it."""
    base = memory_of(tensor)
    if not isinstance(base, Node) or base.op != "call_function":
        return False
    memory = list(descendants([base], lambda user: user is not reader and _viewed(user) is not None))
    return not any(user > reader for n in memory for user in n.users if user not in memory)


def memory_of(tensor: Any) -> Any:
    """The node that allocates the memory of `tensor`."""
    while isinstance(tensor, Node) and (source := _viewed(tensor)) is not None:
        tensor = source
    return tensor


def _viewed(node: Node) -> Node | None:
    """The node that `node` is a view, or one of several views, of; else None."""
    if node.target is operator.getitem:
        parts = node.args[0]
        return parts if isinstance(parts, Node) and _viewed(parts) is not None else None
    if node.target is aten._unsafe_view.default:  # its schema promises new memory, and it makes none
        return node.args[0] if isinstance(node.args[0], Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
        return None
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None
