"""Chains of views that keep the last dimension whole, and slices of that dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.views import RESHAPES as RESHAPES
from megacpp_compile.fx.views import SQUEEZES, is_cast, is_identity, is_reshape
from megacpp_compile.reader.dims import permuted
from megacpp_compile.reader.parts import part_of


def is_outer_view(node: Node) -> bool:
    """Whether `node` is a view or copy of its first argument that keeps the last dimension last and whole, and repeats
    nothing."""
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return False
    if is_identity(node):
        return True
    if not node.args or not isinstance(node.args[0], Node) or not isinstance(value(node.args[0]), torch.Tensor):
        return False
    new, old = value(node).shape, value(node.args[0]).shape
    if not new or not old or not same_size(new[-1], old[-1]):
        return False
    n = len(old)
    if is_reshape(node):
        return True
    if node.target is aten.unsqueeze.default:
        return node.args[1] % (n + 1) != n
    if node.target in SQUEEZES:
        return isinstance(old[-1], int) and old[-1] > 1
    if node.target in (aten.transpose.int, aten.permute.default):
        return permuted(node, range(n))[-1] == n - 1
    if node.target is aten.slice.Tensor:
        return all(map(same_size, new, old))
    return False


def replay(build: Builder, chain: list[Node], node: Node) -> Node:
    """Apply a chain of outer views to `node`, whose last dimension may have another size; casts in it are left out."""
    for link in chain:
        if is_identity(link) or is_cast(link) or link.target is aten.slice.Tensor:
            continue
        if is_reshape(link):
            shape = [*link.args[1][:-1], value(node).shape[-1]]
            node = build(aten.reshape.default, node, shape)
        else:
            node = build(link.target, node, *link.args[1:])
    return node


def lane_slice(node: Node) -> tuple[Node, int, int] | None:
    """(tensor, start, size) where `node` is a run of the tensor's last dimension: split, slice, narrow, chunk."""
    part = part_of(node)
    if part is None or not part.is_run or part.dim != value(part.source).dim() - 1:
        return None
    return (part.source, part.start, part.size) if isinstance(part.whole, int) and isinstance(part.size, int) else None


def cut_from(node: Node) -> Node | None:
    """The tensor of whose last dimension `node` is a run."""
    cut = lane_slice(node)
    return None if cut is None else cut[0]


def consumers(node: Node, through: Any) -> list[tuple[Node, Node, list[Node]]]:
    """(user, the value it reads, chain from `node` to that value) for every use of `node` behind links `through`
    accepts."""
    found: list[tuple[Node, Node, list[Node]]] = []
    stack: list[tuple[Node, list[Node]]] = [(node, [])]
    while stack:
        current, chain = stack.pop()
        for user in current.users:
            if user.args and user.args[0] is current and through(user):
                stack.append((user, [*chain, user]))
            else:
                found.append((user, current, chain))
    return found
