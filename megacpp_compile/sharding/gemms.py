"""Rewrites batched GEMMs over batch and heads into einsums that keep both dimensions.

Before: `bmm(a.view(B * H, M, K), b.view(B * H, K, N)).view(B, H, M, N)`, ATen's spelling of every matmul of four
        dimensions, attention's among them
After:  `einsum("zhmk,zhkn->zhmn", a, b)`, one dot with two batch dimensions in HLO

A tensor that is sharded over the heads (tensor parallelism), or over batch and heads, has no layout once B and H are
one dimension, so XLA would gather it first. `keep_batches` runs only under a sharding plan and on graphs that hold both
forward and backward: XLA lowers an einsum directly, while autograd would decompose it again.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import drop_dead, value
from megacpp_compile.fx.views import is_reshape

_aten = torch.ops.aten


def keep_batches(graph: fx.Graph) -> None:
    """Rewrite every `bmm` of `graph` whose operands and readers are such views, in place; others stay."""
    for node in [n for n in graph.nodes if n.target is _aten.bmm.default]:
        operands = [_unmerged(a) for a in node.args]  # type: ignore[arg-type]
        readers = [user for user in node.users if is_reshape(user)]
        (left, left_transposed), (right, right_transposed) = operands
        if left is None or right is None or len(readers) < len(node.users):
            continue
        batches = value(left).shape[:2]
        wanted = (*batches, *value(node).shape[1:])
        if value(right).shape[:2] != batches or any(value(user).shape != wanted for user in readers):
            continue
        letters = ("zhkm" if left_transposed else "zhmk", "zhnk" if right_transposed else "zhkn")
        with graph.inserting_before(node):
            new = graph.call_function(_aten.einsum.default, (f"{letters[0]},{letters[1]}->zhmn", [left, right]))
        new.meta.update(node.meta)  # the checkpointing policy's tag among it
        new.meta["val"] = value(readers[0])
        for user in readers:
            user.replace_all_uses_with(new)
    drop_dead(graph)


def _unmerged(node: Node) -> tuple[Node | None, bool]:
    """(the four-dimensional operand, or None where there is none; whether its last two dimensions are transposed)."""
    transposed = node.target is _aten.transpose.int and sorted(d % 3 for d in node.args[1:]) == [1, 2]  # type: ignore
    node = node.args[0] if transposed else node  # type: ignore[assignment]
    if not is_reshape(node):
        return None, transposed
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = value(source).shape, value(node).shape
    merged = len(before) == 4 and tuple(after) == (before[0] * before[1], *before[2:])
    return (source if merged else None), transposed
