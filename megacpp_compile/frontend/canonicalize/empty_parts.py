"""What is concatenated with an empty tensor alone: `cat((torch.tensor([]), k), -2)`, the first write to a cache.

Before: `keys = cat((empty, k), -2); attend(q, keys); return keys`
After:  `keys = cat((empty, k), -2); attend(q, k); return keys`
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import CASTS, DETACH, IDENTITIES
from megacpp_compile.reader.links import through

_COPIES = IDENTITIES | CASTS | {DETACH}
_MAKERS = {
    aten.empty.memory_format, aten.zeros.default, aten.new_empty.default, aten.new_zeros.default,
    aten.empty_like.default, aten.zeros_like.default,
}  # fmt: skip


def empty_parts(graph: fx.Graph) -> None:
    """Let readers have what is concatenated with nothing. What is returned has memory of its own."""
    returned = graph.output_node().all_input_nodes
    strided = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts: Any = node.args[0]
        left = [p for p in parts if not _is_nothing(p)]
        if len(left) != 1 or len(parts) == 1 or value(left[0]).dtype != value(node).dtype:
            continue
        if any(memory_of(r) is node and r is not node for r in (*returned, *strided)):
            continue  # a view of it would become one of what was concatenated, which may lie otherwise
        node.replace_all_uses_with(left[0], delete_user_cb=lambda user: user.op != "output")


def _is_nothing(node: Node) -> bool:
    """Whether `node` is an empty tensor of one dimension that has no gradient."""
    fake = value(node)
    if fake.dim() != 1 or not isinstance(fake.shape[0], int) or fake.shape[0] != 0:
        return False
    node = through(node, _COPIES)
    return node.op == "get_attr" or node.target in _MAKERS
