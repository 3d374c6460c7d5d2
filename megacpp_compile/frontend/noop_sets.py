"""Tensors set to the memory they have: `self.experts.to(x.device)` in a forward, where they are on that device.

`Module.to` sets each parameter to what `to` returns, under `no_grad`: the parameter itself, where neither device nor
dtype is another. Nothing is written, so that autograd sees what it would have seen.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from megacpp_compile.fx.copies import changed
from megacpp_compile.fx.edit import called, replace
from megacpp_compile.reader.links import through

_ITSELF = ("to", "detach", "_get_data_attr")


def without_noop_sets(gm: GraphModule) -> GraphModule:
    """Dynamo's graph `gm` without `set_` of a tensor to what it is; itself where there is none. Never changes `gm`."""
    return changed(gm, [n for n in gm.graph.nodes if _is_idle(n)], _drop)


def _drop(node: Node) -> None:
    for user in list(node.users):
        if called(user) == "_lower_version_count_by_1":  # of the write that is none
            node.graph.erase_node(user)
    replace(node, node.args[0])


def _is_idle(node: Node) -> bool:
    """Whether `node` sets a tensor to what `to` returns of it, perhaps detached: itself, as what a tensor is set to has
    its dtype and its device. The fake tensors tell nothing, which are what they are behind the frame."""
    if called(node) != "set_" or len(node.args) != 2 or node.kwargs:
        return False
    written, given = node.args
    return through(given, lambda n: n is not written and called(n) in _ITSELF and not _copies(n)) is written


def _copies(node: Node) -> bool:
    """Whether `node` asks for a copy, or for elements in another order."""
    return any(a is True or isinstance(a, torch.memory_format) for a in (*node.args, *node.kwargs.values()))
