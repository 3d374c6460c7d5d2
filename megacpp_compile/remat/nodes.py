"""What a node of the joint graph is to remat: whose bytes it holds, and what computing it again costs."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.views import is_view
from megacpp_compile.remat.overwritten import MARK

aten = torch.ops.aten
_PRODUCTS = {
    getattr(aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm", "addmv", "mv", "dot")
    if hasattr(aten, name)
}
_CORES = ("megacpp::ssd_scan", "megacpp::sparse_mla")
_SELECTIONS = {aten.topk, aten.sort, aten.argsort, aten.multinomial, aten.argmax, aten.argmin, aten.nonzero}


def base_of(node: Node, through_items: bool = True) -> Any:
    """What `node` is a view, or, if asked, a part of."""
    while isinstance(node, Node) and (is_view(node) or through_items and node.target is operator.getitem):
        node = node.args[0]  # type: ignore[assignment]
    return node


def beyond_views(node: Node, through_items: bool = True) -> Iterator[Node]:
    """What reads `node`, or a view or, if asked, a part of it."""
    for user in node.users:
        if is_view(user) or through_items and user.target is operator.getitem:
            yield from beyond_views(user, through_items)
        else:
            yield user


def is_core(node: Node) -> bool:
    """An attention core or a scan: never computed again unless a whole block is."""
    name = name_of(node)
    return "scaled_dot_product" in name or "flex_attention" in name or name in _CORES


def is_gemm(node: Node) -> bool:
    """A matrix product, or an op of this package that is made of such."""
    if is_depthwise(node):
        return False
    return getattr(node.target, "overloadpacket", None) in _PRODUCTS or name_of(node) in (
        "megacpp::down_norm_up",
        "megacpp::fp8_block_linear",
        "megacpp::fp8_linear",
        "megacpp::linear_fp8_weight",
        "megacpp::moe",
        "megacpp::norm_linear",
    )


def is_depthwise(node: Node) -> bool:
    """A convolution of every channel by itself, which moves bytes more than it multiplies."""
    if getattr(node.target, "overloadpacket", None) is not aten.convolution:
        return False
    groups, image = node.args[8], node.args[0]
    return isinstance(groups, int) and groups > 1 and groups == image.meta["val"].shape[1]  # type: ignore[union-attr]


def is_selection(node: Node) -> bool:
    """A choice by size, such as a router's of experts: computed again from values a rounding apart, it may differ."""
    return getattr(node.target, "overloadpacket", None) in _SELECTIONS


def is_pinned(node: Node) -> bool:
    """What must not be computed a second time: a choice that could come out differently, a random draw, traffic
    between devices, a write, what is written over before, or an op nobody here knows."""
    target = node.target
    if MARK in node.meta:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    if is_core(node):
        return False  # it can drop out, and is tagged as random for that; the partitioner hands it the same numbers
    if is_selection(node) or torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if target._schema.is_mutable or target.namespace in ("_c10d_functional", "c10d"):
        return True
    return target.namespace not in ("aten", "prims", "megacpp", "inductor_prims", "prim")


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor, or of a structure of such; sizes that are symbolic by their hint."""
    if isinstance(value, torch.Tensor):
        count = 1
        for n in value.shape:
            count *= n if isinstance(n, int) else int(n.node.hint or 1)
        return count * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def name_of(node: Node) -> str:
    """The qualified name of the node's operation, "aten::mm"."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else str(node.target)
