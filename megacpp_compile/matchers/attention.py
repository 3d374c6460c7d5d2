"""Which attention reads a head, and as queries or keys: the score products downstream of a node."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import CASTS, COPIES, EXPANSIONS, PERMUTATIONS, REPETITIONS, RESHAPES, UNIT_DIMS

aten = torch.ops.aten
_SDPA = {aten.scaled_dot_product_attention.default}
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default, aten.mm.default}
_TRANSPARENT = {
    *RESHAPES, *PERMUTATIONS, *UNIT_DIMS, *EXPANSIONS, *REPETITIONS, *COPIES, *CASTS - {aten.to.dtype},
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.rms_norm.default,  # of a head: queries and keys may be normed behind their rotation
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reader:
    """A score product reading a head as its operand `side` ("q", "k", or "0"/"1" of a plain product)."""

    node: Node
    side: str


def is_attention(node: Node) -> bool:
    """Whether `node` is the output of an attention kernel, which saves it for its own backward."""
    return node.target in _SDPA or "flex_attention" in str(node.target)


def readers(root: Node) -> list[Reader]:
    """The score products that read `root` through views, casts, copies, scalings and norms."""
    return _follow(root)[0]


def leaves_graph(root: Node) -> bool:
    """Whether the graph returns `root`, perhaps through views, casts, copies and scalings, so that another graph may
    hold its readers."""
    return any(user.op == "output" for node in _follow(root)[1] for user in node.users)


def _follow(root: Node) -> tuple[list[Reader], set[Node]]:
    """(the score products that read `root`, what it passes through on its way)."""
    found, seen, stack = list[Reader](), {root}, [root]
    while stack:
        node = stack.pop()
        for user in node.users:
            if is_attention(user):
                side = next((s for s, a in zip("qkv", user.args, strict=False) if a is node), None)
                if side in ("q", "k"):
                    found.append(Reader(user, side))
            elif user.target in _PRODUCTS:
                operands = user.args[1] if user.target is aten.einsum.default else user.args
                operands = operands[-2:]  # baddbmm's first operand is added, not multiplied
                for i, a in enumerate(operands):
                    if a is node:
                        found.append(Reader(user, str(i)))
            elif user.target in _TRANSPARENT and user not in seen and user.args and user.args[0] is node:
                if isinstance(value(user), torch.Tensor):
                    seen.add(user)
                    stack.append(user)
            elif user.target is aten.mul.Tensor and user not in seen and value(user.args[0]).dim() <= 1:  # or a gain
                seen.add(user)
                stack.append(user)
    return found, seen
