"""Writes to DTensors that are made to be written to: `zeros_like(scores).scatter_(...)`, a router's map of which token
goes where. They are calls that return a new tensor (`scatter`)."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from megacpp_compile.frontend.dtensors import is_dtensor
from megacpp_compile.fx.copies import changed
from megacpp_compile.fx.edit import called, dynamo_value

_MAKERS = frozenset(
    "zeros_like ones_like full_like empty_like zeros ones full empty new_zeros new_ones new_full".split()
)
# Those whose result without the underscore has the dtype of what is written to, too.
_WRITES = frozenset(
    "scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_put_ masked_fill_".split()
)


def without_writes_to_new_tensors(gm: GraphModule) -> GraphModule:
    """`gm` with writes to DTensors that it made for the purpose as calls that return a new one; itself without any."""
    return changed(gm, [n for n in gm.graph.nodes if _to_a_new_tensor(n)], _out_of_place)


def _out_of_place(node: Node) -> None:
    node.target = str(node.target).removesuffix("_")


def _to_a_new_tensor(node: Node) -> bool:
    if node.op != "call_method" or node.target not in _WRITES or not isinstance(made := node.args[0], Node):
        return False
    return called(made) in _MAKERS and set(made.users) == {node} and is_dtensor(dynamo_value(made))
