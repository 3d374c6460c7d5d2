"""Losses whose logits come into the frame from outside."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.views import is_cast
from megacpp_compile.matchers.linear_cross_entropy.rows import row_view
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.links import through

_ELEMENTWISE = (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default)


def logits_from_outside(graph: fx.Graph) -> Iterator[Node]:
    """Every cross entropy with a target a row whose logits are an input, but for views, casts, scales and a softcap."""
    for node in graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        source = through(node.args[0], _keeps_words)
        if source.op == "placeholder":
            yield node


def _keeps_words(node: Node) -> bool:
    if node.target in _ELEMENTWISE:
        return node.target is aten.tanh.default or number_of(node.args[1]) is not None
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or not isinstance(first.meta.get("val"), torch.Tensor):
        return False
    return is_cast(node) or row_view(node, first.meta["val"].dim() - 1) is not None
