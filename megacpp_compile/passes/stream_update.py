"""What stands behind a block with hyper-connections: the streams mixed, and the block's output added to each (mHC,
arXiv:2512.24880, as in DeepSeek-V4; arXiv:2409.19606).

Before: `post.unsqueeze(-1) * block.unsqueeze(-2) + mix.transpose(-1, -2) @ streams`, in products, sums and equations of
        any kind, with casts
After:  `megacpp.stream_update(streams, block, post, mix, dtype)`

Safe because the op computes the same sums in float32 and rounds once, whatever makes `post` and `mix`. Backward reads
streams and gradient once for all four gradients.
Refused: streams and channels that are not the last two dimensions, a matrix that is the same for all tokens, parts
under different grad or autocast modes. Streams that are not mixed (Hy4) are told and left: that is pointwise code, and
Inductor fuses it.
Off by default: its kernels have not been timed on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.hyper_connections.streams import Update, match_unmixed, match_update
from megacpp_compile.passes._rule import Match, Recognised, decided, in_other_modes

name = "stream_update"
op = "megacpp::stream_update"
# A state that is updated is a recurrence's, and weights that `hyper_connection` makes are those of streams.
after: tuple[str, ...] = ("gated_delta_rule", "hyper_connection", "ssd_scan", "token_loop")
by_default = False


def find(view: GraphView) -> Iterator[Match | MatchFailure | Recognised]:
    for node in view.graph.nodes:
        found = match_update(node)
        if found is None and (post := match_unmixed(node)) is not None and _is_made(post):
            yield Recognised(node, "streams that are not mixed")
        yield from decided([found], partial(_check, view))


def _is_made(post: Node) -> bool:
    """Whether `hyper_connection` has made these weights."""
    return post.target is operator.getitem and post.args[0].target is torch.ops.megacpp.hyper_connection.default  # type: ignore[union-attr]


@or_failure
def _check(view: GraphView, found: Update) -> Match | MatchFailure:
    or_refuse(in_other_modes(view, sorted(found.internal), found.node))
    mixed = found.mixed
    inputs = list(dict.fromkeys([mixed.streams, found.block, found.post, mixed.weights]))

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        operands = mixed.streams, found.block, found.post, found.mix(build)
        node = build(torch.ops.megacpp.stream_update.default, *operands, value(found.node).dtype)
        return node, [node]

    return Match(found.node, inputs, [found.node], rewrite)
