"""Tensors that hold one number everywhere, or none that matters, and what a tensor is padded with."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
_FULL = (aten.full.default, aten.full_like.default, aten.new_full.default)


def is_filled(node: Any, number: float) -> bool:
    """Whether every element of `node` is `number`."""
    if not isinstance(node, Node) or node.target not in (*_ZEROS, *_ONES, *_FULL):
        return False
    fill = 0 if node.target in _ZEROS else 1 if node.target in _ONES else node.args[-1]
    return isinstance(fill, (int, float)) and fill == number


def is_blank(node: Node) -> bool:
    """Whether `node` holds nothing that matters: zeros, or uninitialised memory."""
    return is_filled(node, 0.0) or node.target in _EMPTY


def padded_with(node: Node) -> Any:
    """The number, perhaps a node, with which `node` pads its first argument; None for another node, or one that pads
    otherwise than with a constant."""
    if node.target is aten.constant_pad_nd.default:
        return node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    if node.target is not aten.pad.default:
        return None
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return None if mode != "constant" else 0 if given is None else given
