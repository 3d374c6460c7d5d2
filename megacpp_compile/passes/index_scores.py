"""Scores by which an indexer chooses the rows that each query attends to: the lightning indexer of DeepSeek-V3.2
(arXiv:2512.02556), GLM-5 and others.

Before: `(weights.unsqueeze(-1) * relu(scale * einsum("bthc,bsc->bths", q.float(), k.float()))).sum(2)`, in any
        spelling: products of any kind, weights by a product, too
After:  `megacpp.index_scores(q, k, weights, scale, dtype)`

Safe because the op computes the same function, in float32 at least, and nothing else reads the products of a head. It
saves q, k and the weights. Masks, top-k and what reads the rows stay as they are.
Refused: keys of each head (`keys`), weights of each key (`weights`), products that something else reads (`escapes`),
and on CUDA products in float32 (`dtype`): of an einsum's the reference took 4.5 ms, Inductor's own code 4.1 (H200).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.fx.views import is_cast, uncast
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.index_scores import IndexScores, index_scores_of, is_relu
from megacpp_compile.matchers.softmax_attention.scores import VIEWS
from megacpp_compile.passes._rewrites.arrange import arrange
from megacpp_compile.passes._rule import REGION, Match, decided, in_other_modes
from megacpp_compile.reader.links import chain

name = "index_scores"
op = "megacpp::index_scores"
after: tuple[str, ...] = ("linear", "rope_qk")


def on_cuda(node: Node) -> bool:
    return value(node).device.type == "cuda"


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    relus = (n for n in view.graph.nodes if n.op == "call_function" and is_relu(n))
    yield from decided((index_scores_of(n, view.weights) for n in relus), partial(_decide, view))


@or_failure
def _decide(view: GraphView, found: IndexScores) -> Match | MatchFailure:
    or_refuse(in_other_modes(view, sorted(found.inside), found.result))
    dtypes = [_dtype(o.node, value(found.product).dtype) for o in (found.q, found.k)]
    reason = "products in float32: kernels multiply half precision, and Inductor's own code is no slower there"
    narrow = {*dtypes} <= {torch.float16, torch.bfloat16}
    refuse_if(on_cuda(found.result) and not narrow, found.relu, "dtype", reason)
    inputs = list(dict.fromkeys([*(uncast(o.node) for o in (found.q, found.k)), found.weights[0]]))
    refuse_if(place(inputs, [found.result], found.result, view.mode_states) is None, found.relu, *REGION)
    return Match(found.result, inputs, [found.result], lambda build: _rewrite(build, found, dtypes))


def _rewrite(build: Builder, found: IndexScores, dtypes: Sequence[torch.dtype]) -> tuple[Node, list[Node]]:
    batch, queries, keys = found.batch, found.queries, found.keys
    q = arrange(build, (uncast(found.q.node), found.q.dims), (batch, queries, found.heads, found.channels))
    k = arrange(build, (uncast(found.k.node), found.k.dims), (batch, keys, found.channels))
    q, k = (build.cast(one, dtype) for one, dtype in zip((q, k), dtypes, strict=True))
    weights = arrange(build, found.weights, (batch, queries, found.heads))
    made = build(torch.ops.megacpp.index_scores.default, q, k, weights, found.scale, value(found.result).dtype)
    return made, [arrange(build, (made, (batch, queries, keys)), found.dims)]


def _dtype(operand: Node, rounded: torch.dtype) -> torch.dtype:
    """The narrowest dtype that holds what is multiplied: what `operand` was widened from, or `rounded`, to which a
    product under autocast rounds it."""
    narrow: torch.dtype = value(operand).dtype
    for source in chain(operand, VIEWS, is_cast):
        if torch.promote_types(value(source).dtype, narrow) != narrow:
            break
        narrow = value(source).dtype
    return narrow if torch.promote_types(narrow, rounded) == rounded else rounded
