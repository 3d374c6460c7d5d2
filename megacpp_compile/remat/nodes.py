"""What a node of the joint graph is to remat: its op's traits, and what the node's own arguments add to them."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.remat.overwritten import MARK


def is_core(node: Node) -> bool:
    """Whether it is an attention core or a scan, which is recomputed only together with its whole block."""
    return traits_of(node).core


def is_gemm(node: Node) -> bool:
    """Whether it is a GEMM, or an op made of GEMMs. A depthwise convolution is none, and neither is a mix of a few
    streams."""
    return traits_of(node).gemm and not is_depthwise(node) and not _mixes_streams(node)


# Streams of a residual, as in hyper-connections (arXiv:2409.19606), of which there are few.
_FEW = 8


def _mixes_streams(node: Node) -> bool:
    """Whether it multiplies by matrices so small that it takes as long as moving its bytes: of its three sizes the one
    that is summed over and one other are few."""
    if name_of(node) not in ("aten::mm", "aten::bmm"):
        return False
    a, b = (operand.meta["val"].shape for operand in node.args[:2])  # type: ignore[union-attr]
    summed, *outer = a[-1], a[-2], b[-1]
    return _is_few(summed) and any(map(_is_few, outer)) and not all(map(_is_few, outer))


def _is_few(size: object) -> bool:
    return isinstance(size, int) and size <= _FEW


def is_depthwise(node: Node) -> bool:
    """Whether it is a convolution of every channel by itself, whose time is that of the bytes it moves."""
    if name_of(node) != "aten::convolution":
        return False
    groups, image = node.args[8], node.args[0]
    return isinstance(groups, int) and groups > 1 and groups == image.meta["val"].shape[1]  # type: ignore[union-attr]


def is_selection(node: Node) -> bool:
    """Whether it chooses by size, as a router's top-k does."""
    return traits_of(node).selection


def is_pinned(node: Node) -> bool:
    """Whether backward must not run it a second time: a selection, a random draw, a collective, a write, a copy of
    what the forward overwrites, or an op of another library."""
    target = node.target
    if MARK in node.meta:
        return True
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    traits = traits_of(node)
    if traits.core:
        return False  # dropout tags it as random; the partitioner hands the second run the same random state
    random = torch.Tag.nondeterministic_seeded in target.tags
    return traits.selection or not traits.recomputable or random or target._schema.is_mutable
