"""Split -> RoPE -> concat of multi-latent attention's queries (arXiv:2405.04434, 2.1.3).

Before: `nope, pe = q.split([n, r], -1); q = cat((nope, rope(pe, cos, sin)), -1)`, in any spelling of RoPE
After:  `q = megacpp.mla_rope_q(q, cos, sin, n, interleaved_in, interleaved_out, rope_first, inverse=False, dtype)`

Safe because the matcher computes channels symbolically (`matchers/rope/lanes.py`): the match is a proof that the concat
holds the unrotated channels as they were and the others rotated in pairs.
Refused: anything but a rotation; a rotation in lower precision than its operand; a rotated slice that escapes; queries
whose keys are no MLA keys (ordinary partial rotary is `rope_qk`'s).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.views import AUTOCAST_BLIND
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.attention import leaves_graph
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.rope.heads import Head
from megacpp_compile.matchers.rope.origins import from_projection
from megacpp_compile.passes._rewrites import rotations
from megacpp_compile.passes._rewrites.packed import operands, packed
from megacpp_compile.passes._rule import Match, decided

name = "mla_rope_q"
op = "megacpp::mla_rope_q"
after = ("down_norm_up",)


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from rotations.refusals(view, name)
    heads = (head for head in view.heads.found if head.kind in ("partial", "separate") and not is_mla_key(head))
    yield from decided(heads, partial(_check, view))


def is_mla_key(head: Head) -> bool:
    """Whether `head` is a key of MLA: one rope row behind every head's own channels. A single head broadcasts nothing;
    its row is one that comes from a second tensor and that the attention scores read as a key."""
    if head.kind == "shared":
        return True
    outer = [s for s, k in zip(head.lanes.sizes, head.lanes.kinds, strict=True) if k == "o"]
    one_head = any(isinstance(s, int) and s == 1 for s in outer)
    parts = (head.rotation.nope, head.rotation.rope)
    return (
        head.kind == "separate"
        and one_head
        and head.role() == "k"
        and all(p is not None and from_projection(p) for p in parts)
    )


def _reads_mla_keys(view: GraphView, head: Head) -> bool:
    """Whether the keys that these queries meet are MLA's; where the graph ends before the attention scores, their shape
    decides."""
    partners = view.heads.partners(head)
    if partners:
        return any(is_mla_key(p) for p in partners)
    if not head.readers and leaves_graph(head.root):
        return head.kind == "partial" and not head.rotation.rope_first
    # The keys went through something the graph view does not follow, such as a cache: match by tables and widths.
    mine = head.rotation
    for other in view.heads.found:
        theirs = other.rotation
        if is_mla_key(other) and not view.heads.partners(other):
            same = mine.cos.source.node is theirs.cos.source.node or mine.cos.width == theirs.cos.width
            if (
                same
                and mine.rope.width == theirs.rope.width
                and value(head.root).shape[-1] == value(other.root).shape[-1]
            ):
                return True
    return False


@or_failure
def _check(view: GraphView, head: Head) -> Match | MatchFailure | None:
    rotation = head.rotation
    refuse_if(
        head.role() == "k" and head.kind == "separate",
        head.root, "own-rope-keys", "every head has a rope key of its own, not one shared row",
    )
    if not _reads_mla_keys(view, head):
        refuse_if(
            head.kind == "separate" and not rotations.meets_latents(head.root),
            head.root, "no-mla-keys", "the keys these queries meet are not MLA keys",
        )
        return None  # ordinary partial rotary
    refuse_if(
        head.kind == "separate" and not all(p and from_projection(p) for p in (rotation.nope, rotation.rope)),
        head.root, "absorbed", "the unrotated channels are no projection's (absorbed weights, or a norm of theirs)",
    )
    by_position = packed(head)
    inputs = rotations.sources(rotation, by_position.sources if by_position else None)

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        nope_dim = rotation.nope.width if rotation.nope else 0
        rotated, order, offsets = operands(build, by_position, head)
        q = rotations.whole_head(build, rotated)
        cos, sin = rotations.table(build, rotated.cos), rotations.table(build, rotated.sin)
        node = build(
            torch.ops.megacpp.mla_rope_q.default,
            q, cos, sin, nope_dim, *rotations.layout(rotation), False, value(head.root).dtype, *offsets,
        )  # fmt: skip
        return node, [rotations.back(build, node, order, head)]

    return Match(head.root, inputs, [head.root], rewrite, autocast_blind=AUTOCAST_BLIND)
