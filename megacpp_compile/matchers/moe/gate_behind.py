"""Gates that multiply the sum over experts, as where each token has one choice (arXiv:2101.03961)."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_shape, same_size, value
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.links import only_user, onward

aten = torch.ops.aten


def gate_behind(layer: RoutedExperts) -> RoutedExperts:
    """`layer`, whose gates are 1, up to the product of its output with one gate for each token, if there is one."""
    indices = value(layer.indices)
    one = layer.choices == 1 or indices.dim() == 1
    if not one or layer.base is not None or layer.column is not None:
        return layer
    out = onward(layer.output, is_cast, _keeps_channels)[-1]
    user = only_user(out)
    gate = _gate(user, out) if user is not None and user.target is aten.mul.Tensor and of_tensors(user) else None
    if gate is None or not same_size(value(gate).numel(), indices.numel()):
        return layer
    return dataclasses.replace(layer, output=user, gates=gate, choices=1)


def _keeps_channels(node: Node) -> bool:
    return node.target in RESHAPES and same_size(value(node).shape[-1], value(node.args[0]).shape[-1])


def _gate(product: Node, out: Node) -> Node | None:
    """The gate [.., 1] of every token that `out` is multiplied by."""
    gate = product.args[1] if product.args[0] is out else product.args[0]
    shape, own = value(gate).shape, value(out).shape
    if gate is out or len(shape) != len(own) or not same_size(shape[-1], 1) or not same_shape(product, out):
        return None
    return strip_row_views(gate) if all(map(same_size, shape[:-1], own[:-1])) else None  # type: ignore[arg-type]
