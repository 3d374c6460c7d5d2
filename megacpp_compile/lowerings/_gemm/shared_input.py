"""`fuse_shared_input_gemms`: fuses GEMMs that share an operand into one, forward and backward.

MLA multiplies one input by two down-projections. Their weights side by side give one GEMM with a wider result; in
backward, the sum `g1 @ W1 + g2 @ W2` is one GEMM over `[g1 | g2]`, and the weight gradients are one GEMM as well. The
cost is concatenating weights and gradients. Off by default: on an H200 it gains at one size what it loses at another
(docs/generated/performance.md).

Works on the graph after autograd and lowering, where all of them are plain `aten.mm`.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, drop_dead, value
from megacpp_compile.fx.views import is_reshape

# The narrow sides that are put together: wider ones fill the GPU by themselves.
MAX_WIDTH = 2048


def merge(graph: fx.Graph) -> int:
    """How many GEMMs it fused: first sums of GEMMs, then GEMMs of one left operand, then of one right operand."""
    merged = _sums(graph) + _shared(graph, 0) + _shared(graph, 1)
    drop_dead(graph)
    return merged


def _gemms(graph: fx.Graph) -> list[Node]:
    return [n for n in graph.find_nodes(op="call_function", target=aten.mm.default) if _static(n)]


def _static(gemm: Node) -> bool:
    return all(isinstance(s, int) for t in (gemm, *gemm.args) for s in value(t).shape)


def _builder(graph: fx.Graph, anchor: Node, like: Node) -> Builder:
    return Builder(graph, value(like).fake_mode, anchor, like)


def _sums(graph: fx.Graph) -> int:
    """`mm(a, v) + mm(b, w)` -> `mm([a | b], [v / w])`."""
    count = 0
    for total in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        pair = [_under_views(a) for a in total.args]
        if len(pair) != 2 or total.kwargs or not all(pair) or pair[0] is pair[1]:
            continue
        (a, v), (b, w) = (p.args for p in pair if p is not None)
        operands = [value(t) for t in (a, v, b, w)]
        one_kind = len({t.dtype for t in operands} | {value(total).dtype}) == 1
        # Views keep the order of rows, so GEMMs are added row by row where nothing is broadcast.
        if any(value(p).shape != value(total).shape for p in total.args) or not all(map(_static, pair)):
            continue
        if not one_kind or max(operands[0].shape[1], operands[2].shape[1]) > MAX_WIDTH:
            continue
        build = _builder(graph, total, total)
        gemm = build(aten.mm.default, build(aten.cat.default, [a, b], 1), build(aten.cat.default, [v, w]))
        total.replace_all_uses_with(build(aten.view.default, gemm, list(value(total).shape)))
        count += 1
    drop_dead(graph)
    return count


def _under_views(node: Any) -> Node | None:
    """The `mm` behind `node` and its views, if each is read once."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target is aten.mm.default:
            return node
        if not is_reshape(node):
            return None
        node = node.args[0]
    return None


def _shared(graph: fx.Graph, side: int) -> int:
    """GEMMs with one operand in common at `side`; the others are put side by side along `1 - side`."""
    groups: dict[Any, list[Node]] = {}
    for node in _gemms(graph):
        other = value(node.args[1 - side])
        if other.shape[1 - side] <= MAX_WIDTH and node.users:
            groups.setdefault((_identity(node.args[side]), other.dtype), []).append(node)
    count = 0
    for nodes in groups.values():
        others = [n.args[1 - side] for n in nodes]
        anchor = min(u for n in nodes for u in n.users)
        common = nodes[0].args[side]
        needed = [common, *(o.args[0] for o in others)] if all(map(_transposed, others)) else [common, *others]
        if len(nodes) < 2 or max(needed) >= anchor:
            continue  # an operand is ready only after another GEMM was read
        build = _builder(graph, anchor, nodes[0])
        wide = _beside(build, others, 1 - side)
        gemm = build(aten.mm.default, *((common, wide) if side == 0 else (wide, common)))
        start = 0
        for node, other in zip(nodes, others, strict=True):
            end = start + value(other).shape[1 - side]
            node.replace_all_uses_with(build(aten.slice.Tensor, gemm, 1 - side, start, end))
            start = end
        count += 1
    return count


def _beside(build: Builder, parts: list[Node], dim: int) -> Node:
    """The concat of `parts` along `dim`; of transposed parts the transpose of a concat, so that whole rows are
    copied."""
    if all(map(_transposed, parts)):
        rows = build(aten.cat.default, [p.args[0] for p in parts], 1 - dim)
        return build(aten.permute.default, rows, [1, 0])
    return build(aten.cat.default, parts, dim)


def _transposed(node: Node) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def _identity(node: Node) -> Any:
    """A key that is equal for views of one tensor with the same shape and strides."""
    fake = value(node)
    while is_reshape(node):
        node = node.args[0]
    return node, tuple(fake.shape), tuple(fake.stride())
