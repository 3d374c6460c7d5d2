"""Builds the arguments of the RoPE ops from a proved rotation, for all RoPE passes.

The ops take queries, keys and tables with equally many dimensions, tables 1 wide where they broadcast, and return
contiguous tensors. Dimensions are put in memory order (`in_memory_order`) and the op's result is permuted back, which
is a view: no copy appears before or behind the op.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.views import CASTS, COPIES, EXPANSIONS, FOLDS, PARTS, PERMUTATIONS, RESHAPES, UNIT_DIMS
from megacpp_compile.fx.walks import descendants
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.rope.heads import Head
from megacpp_compile.matchers.rope.lanes import Source
from megacpp_compile.matchers.rope.rotation import Part, Rotation, Table


def refusals(view: GraphView, op_name: str) -> list[MatchFailure]:
    """The near misses of `op_name`, to which the value's attention (MLA's or not) and role (q or k) assign them."""

    def owner(role: str, mla: bool) -> str:
        if not mla:
            return "rope_qk"
        return "mla_rope_kv" if role == "k" else "mla_rope_q"

    return [MatchFailure(n.node, n.tag, n.reason) for n in view.heads.near if owner(n.role, n.mla) == op_name]


def layout(rotation: Rotation) -> tuple[bool, bool, bool]:
    """(interleaved_in, interleaved_out, rope_first)."""
    return rotation.interleaved_in, rotation.interleaved_out, rotation.rope_first


def in_memory_order(head: Head, *others: Head) -> tuple[Rotation, list[int]]:
    """The rotation with its outer dimensions in memory order, and that order; the same op rotates `others`.

    It is the order of the projection that made the head: the op then reads and writes rows side by side and may work in
    the projection's own memory. Where the result leaves the frame, or meets a foreign op, its strides are part of what
    the model sees, and the order is the one the plain result had.
    """
    source = head.main.source
    shown = next((h for h in (head, *others) if strides_show(h.root)), None)
    if shown is not None:
        strides = value(shown.root).stride()[:-1]
    else:  # a dimension of size 1 may be the head's alone; it lies anywhere, so in front
        strides = [sys.maxsize if d < 0 else value(source.node).stride(d) for d in source.dims]
    known = [s if isinstance(s, int) else int(s.node.hint or 0) for s in strides]
    order = sorted(range(len(known)), key=lambda p: -known[p])
    return reordered(head.rotation, order), order


# Ops that put rotated channels where attention reads them, such as a cache.
_MOVES = RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | EXPANSIONS | COPIES | CASTS | PARTS | {
    aten.cat.default, aten.slice_scatter.default, aten.index_put.default, aten.index_copy.default,
}  # fmt: skip
# Ops whose result has one layout for any strides of the operands.
_SETTLED = {
    aten.matmul.default, aten.bmm.default, aten.mm.default, aten.einsum.default, aten.linear.default,
    aten.baddbmm.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip


def strides_show(root: Node) -> bool:
    """Whether `root`'s strides, or those of something that inherits them, reach the frame's output or a foreign op."""
    users = (user for n in descendants([root], lambda n: n.target not in _SETTLED) for user in n.users)
    return any(user.op == "output" or not str(user.target).startswith("aten.") for user in users)


def meets_latents(root: Node) -> bool:
    """Whether what is rotated is read by attention over latents, which another pass made."""
    users = (user for n in descendants([root], lambda n: n.target in _MOVES) for user in n.users)
    over_latents = torch.ops.megacpp.sparse_mla.default, torch.ops.megacpp.mla_decode.default
    return any(user.target in over_latents for user in users)


def reordered(rotation: Rotation, order: list[int]) -> Rotation:
    """`rotation` with the outer dimensions of all it refers to in `order`."""
    return _redimensioned(rotation, lambda dims: tuple(dims[p] for p in order))


def with_dimension(rotation: Rotation, at: int) -> Rotation:
    """`rotation` with an outer dimension of size 1 at `at` in all it refers to."""
    return _redimensioned(rotation, lambda dims: (*dims[:at], -1, *dims[at:]))


def _redimensioned(rotation: Rotation, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Rotation:
    parts = {name: getattr(rotation, name) for name in ("nope", "rope", "cos", "sin")}
    return dataclasses.replace(rotation, **{
        name: dataclasses.replace(x, source=dataclasses.replace(x.source, dims=change(tuple(x.source.dims))))
        for name, x in parts.items() if x is not None
    })  # fmt: skip


def back(build: Builder, node: Node, order: list[int], head: Head) -> Node:
    """`node` with its dimensions in the order of `head` rather than in memory order, and those of size 1 that `order`
    is without."""
    node = build.permuted(node, [order.index(p) for p in sorted(order)] + [len(order)])
    return build.unsqueezed(node, [p for p in range(head.lanes.kinds.count("o")) if p not in order])


def sources(rotation: Rotation, tables: Sequence[Node] | None = None) -> list[Node]:
    """The nodes an op built from `rotation` reads; `tables` in the place of its own."""
    parts = [rotation.nope, rotation.rope]
    nodes = [p.source.node for p in parts if p is not None]
    own = [_unrounded(t.source).node for t in (rotation.cos, rotation.sin)]
    return list(dict.fromkeys([*nodes, *(own if tables is None else tables)]))


def arrange(build: Builder, source: Source, start: int, width: int, step: int = 1) -> Node:
    """Channels of `source` as a tensor with the leading dimensions of the head, 1 where it broadcasts."""
    node = source.node
    if source.part:
        node = build(aten.real.default if source.part == "re" else aten.imag.default, node)
    want = source.dims
    kept = sorted([d for d in want if d >= 0] + list(source.lane_dims))
    node = build.squeezed(node, [d for d in range(value(node).dim()) if d not in kept])
    place = {d: i for i, d in enumerate(kept)}
    node = build.permuted(node, [place[d] for d in want if d >= 0] + [place[d] for d in source.lane_dims])
    if len(source.lane_dims) > 1:
        node = build(aten.flatten.using_ints, node, -len(source.lane_dims), -1)
    node = build.unsqueezed(node, [position for position, d in enumerate(want) if d < 0])
    if start or step != 1 or width != value(node).shape[-1]:
        node = build(aten.slice.Tensor, node, -1, start, start + (width - 1) * step + 1, step)
    return node


def table(build: Builder, entries: Table) -> Node:
    """The node that holds `entries` of a cos or sin table, in float32 at least where that takes a product."""
    node = arrange(build, _unrounded(entries.source), entries.start, entries.width, entries.step)
    if abs(entries.factor) == 1:
        return node if entries.factor > 0 else build(aten.neg.default, node)
    wide = build.cast(node, torch.promote_types(value(node).dtype, torch.float32))
    return build(aten.mul.Tensor, wide, entries.factor)


def _unrounded(table: Source) -> Source:
    """`table` in float32, where a cast from it is what the model reads: Inductor, which computes tables and casts
    inside of the kernel that rotates, rounds none of them."""
    node = table.node
    wide = node.args[0] if node.target in CASTS and value(node).dtype.itemsize == 2 else None
    if isinstance(wide, Node) and value(wide).dtype == torch.float32:
        return dataclasses.replace(table, node=wide)
    return table


def part(build: Builder, channels: Part) -> Node:
    """The node that holds the `channels` of a head."""
    return arrange(build, channels.source, channels.start, channels.width)


def whole_head(build: Builder, rotation: Rotation) -> Node:
    """The head before the rotation as one tensor: a slice of the buffer that holds it, or a concat of two."""
    nope, rope = rotation.nope, rotation.rope
    if nope is None:
        return part(build, rope)
    first, second = (rope, nope) if rotation.rope_first else (nope, rope)
    if first.source == second.source and first.start + first.width == second.start:
        return arrange(build, first.source, first.start, first.width + second.width)
    return build(aten.cat.default, [part(build, first), part(build, second)], -1)
