"""Delayed scaling in a graph: what stands for the past until a frame is given one, and whose past it is."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value

aten = torch.ops.aten


def no_past(build: Builder, like: Node) -> Node:
    """The largest magnitudes of no tensor, 0."""
    return build(aten.new_zeros.default, like, [1], dtype=torch.float32)


def is_delayed(linear: Node) -> bool:
    """Whether an op `fp8_linear` takes a payload by delayed scaling."""
    return quantised(linear, 2).target is torch.ops.megacpp.fp8_quantize_delayed.default


def quantised(linear: Node, argument: int) -> Node:
    """The op that made the payload that `fp8_linear` takes as that argument: 2 is its input's, 4 its weights'."""
    payload = linear.args[argument]
    assert isinstance(payload, Node) and isinstance(payload.args[0], Node)
    return payload.args[0]


def parameter_of(weight: Node, weights: Set[Node]) -> Node | None:
    """The input of the frame, one of `weights`, that `weight` is made of alone, with as many elements, as a view or a
    cast of it; None where it is computed of more."""
    node = weight
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    same = node in weights and value(node).numel() == value(weight).numel()
    return node if node.op == "placeholder" and same else None
