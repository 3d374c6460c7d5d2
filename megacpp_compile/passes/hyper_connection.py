"""What stands before a block with hyper-connections: one linear of the joined, normed streams gives a weight a stream
for the block's input and one for its output, and a matrix that mixes the streams, made doubly stochastic (mHC,
arXiv:2512.24880, as in DeepSeek-V4 and GLM-5.3; without a matrix in Hy4).

Before: `l = linear(rms_norm(streams.flatten(-2)), w); pre, post, mix = l.split([n, n, n * n], -1)`
        `pre, post = sigmoid(pre * s0 + b0) + eps, 2 * sigmoid(post * s1 + b1)`
        `mix = softmax(mix * s2 + b2) + eps`, then over and over `mix / (mix.sum(-1) + eps); mix / (mix.sum(-2) + eps)`
        `block = (pre.unsqueeze(-1) * streams).sum(-2)`
After:  `block, post, mix, ... = megacpp.hyper_connection(streams, w, scale, base, norm_eps, ...)`

The logits may come from several linears; the norm may stand behind the linear, and have gains, which multiply its
weight. The matrix may be normalised in logarithms, by one softmax, or not at all, and there may be no matrix.

Safe because the op computes the same function in float32, and nothing but what it gives is read elsewhere. It saves the
streams and their logits; the normalisations, a value a step in plain code, are computed again in backward.
Refused: joined streams without a norm, a norm over each stream, a weight for each channel of a stream (Qwen4-Exp),
other activations, an intermediate that is used elsewhere, parts under different grad or autocast modes.
Off by default: its kernels have not been timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.views import AUTOCAST_BLIND
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.hyper_connections.connection import Connection, match_connection
from megacpp_compile.matchers.hyper_connections.maps import Gate, Mixing
from megacpp_compile.matchers.hyper_connections.products import product_of
from megacpp_compile.matchers.hyper_connections.streams import stream_sum, weights_of_channels
from megacpp_compile.passes._rule import Match, decided, in_other_modes
from megacpp_compile.reader.links import through, widens

name = "hyper_connection"
op = "megacpp::hyper_connection"
after: tuple[str, ...] = ()
by_default = False


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    inside: set[Node] = set()
    for node in reversed(view.graph.nodes):  # the outermost of products that are one
        product = product_of(node) if node not in inside else None
        total = stream_sum(product) if product is not None else None
        if total is None and node not in inside and (refusal := weights_of_channels(node)) is not None:
            yield refusal
        if total is None or isinstance(total, MatchFailure) or total.mixes:
            continue
        inside |= total.internal
        yield from decided([match_connection(total)], partial(_check, view))


@or_failure
def _check(view: GraphView, found: Connection) -> Match | MatchFailure:
    checked = sorted(n for n in found.internal if n.target not in AUTOCAST_BLIND)
    or_refuse(in_other_modes(view, checked, found.pre.affine.linear.node))
    constants = [n for part in found.parts for n in (*part.affine.nodes, through(part.affine.linear.w, widens))]
    inputs = list(dict.fromkeys([found.streams, *constants, *found.norm.gains]))
    outputs = [found.block, *(part.node for part in found.parts[1:])]
    rewrite = lambda build: _rewrite(build, found)  # noqa: E731
    return Match(found.block, inputs, outputs, rewrite, autocast_blind=AUTOCAST_BLIND)


def _rewrite(build: Builder, found: Connection) -> tuple[Node, list[Node]]:
    device = value(found.streams).device
    post, mixing = found.post, found.mixing
    scale = build.joined([part.affine.scale(build, device) for part in found.parts])
    base = build.joined([part.affine.base(build, device) for part in found.parts])
    node = build(
        torch.ops.megacpp.hyper_connection.default,
        found.streams, _weight(build, found), scale, base, found.norm.eps,
        [found.pre.factor, found.pre.shift], [post.factor, post.shift] if post is not None else [],
        mixing.init if mixing is not None else "", [*mixing.eps] if mixing is not None else [0.0, 0.0],
        [*mixing.axes] if mixing is not None else [], value(found.block).dtype,
    )  # fmt: skip
    made = [build.item(node, 0)]
    for i, part in ((1, post), (2, mixing)):
        if part is not None:
            result = build.cast(build.item(node, i), value(part.node).dtype)
            joined = value(result).dim() - value(part.node).dim()
            made.append(build(aten.flatten.using_ints, result, 0, joined) if joined else result)
    return node, made


def _weight(build: Builder, found: Connection) -> Node:
    """The rows of the linears that make the logits, as the op has them: one weight as it is where it has just these."""
    runs: list[tuple[Gate | Mixing, int, int]] = []
    for part in found.parts:
        start, end = part.affine.start, part.affine.start + part.affine.size
        if runs and runs[-1][0].affine.linear == part.affine.linear and runs[-1][2] == start:
            runs[-1] = runs[-1][0], runs[-1][1], end
        else:
            runs.append((part, start, end))
    parts = []
    for part, start, end in runs:
        linear = part.affine.linear
        weight = through(linear.w, widens)
        weight = build(aten.t.default, weight) if linear.transposed else weight
        parts.append(weight if (start, end) == (0, linear.out_features)
                     else build(aten.slice.Tensor, weight, 0, start, end))  # fmt: skip
    weight = build.joined(parts)
    for gain in found.norm.gains:
        flat = gain if value(gain).dim() <= 1 else build(aten.reshape.default, gain, [-1])
        weight = build(aten.mul.Tensor, weight, build.cast(flat, torch.promote_types(value(flat).dtype, torch.float32)))
    return weight if found.norm.scale == 1 else build(aten.mul.Scalar, weight, found.norm.scale)
