"""Depthwise causal convolution over time, and the SiLU behind it (Mamba, arXiv:2312.00752, 3.4; also of gated linear
attention, DeltaNet and LFM2).

Before: `y = silu(conv1d(x.transpose(1, 2), w, b, padding=k - 1, groups=c)[..., :t]).transpose(1, 2)`
After:  `y = megacpp.causal_conv1d(x, w, b, "silu", dtype)`
With packed documents, whose taps are masked and summed (`matchers/masked_taps.py`), the documents' numbers are an
operand.

Safe because the matcher (`matchers/causal_conv.py`) follows padding, cut and transpositions step by step: the match
proves that output step i sees inputs i - (k - 1) to i. The op saves x, weight and bias; backward recomputes the value
before SiLU. SiLU stays outside where something else reads the value before it.
Refused: a convolution that is not causal; groups other than channels; stride or dilation; a padded output with other
readers; parts under different grad or autocast modes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, place, same_size, value
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.causal_conv import CausalConv, is_swap, match_causal_conv
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.masked_taps import match_masked_taps
from megacpp_compile.passes._rule import REGION, Match, decided

name = "causal_conv1d"
op = "megacpp::causal_conv1d"
after: tuple[str, ...] = ()


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    done = set[Node]()
    roots = [n for n in reversed(view.graph.nodes) if n.target is aten.add.Tensor and not _is_summand(n)]
    packed = [found for node in roots if (found := _sum_of_taps(node, done)) is not None]
    convolutions = map(match_causal_conv, view.graph.nodes)
    yield from decided(itertools.chain(convolutions, reversed(packed)), partial(_check, view))


def _is_summand(node: Node) -> bool:
    return len(node.users) == 1 and next(iter(node.users)).target is aten.add.Tensor


def _sum_of_taps(node: Node, done: set[Node]) -> CausalConv | MatchFailure | None:
    """The convolution of packed documents that `node` is or that is a summand of it; `done` are sums seen."""
    if node.target is not aten.add.Tensor or node in done:
        return None
    done.add(node)
    found = match_masked_taps(node)
    if isinstance(found, MatchFailure):
        parts = [part for a in node.all_input_nodes if (part := _sum_of_taps(a, done)) is not None]
        found = next((part for part in parts if isinstance(part, CausalConv)), found)
    return found


@or_failure
def _check(view: GraphView, conv: CausalConv) -> Match | MatchFailure:
    state = view.mode_states
    refuse_if(
        any(state[n] != state[conv.conv] for n in conv.internal),
        conv.conv, "region", "part of it runs under another grad or autocast mode",
    )
    inputs = [n for n in (conv.x, conv.weight, conv.bias, conv.seq_idx) if n is not None]
    outputs = [conv.end]
    if conv.end_time == 2:  # its readers may put time back in front themselves
        outputs += [u for u in conv.end.users if is_swap(u) is conv.end and state[u] == state[conv.conv]]
    refuse_if(place(inputs, outputs, conv.conv, state) is None, conv.conv, *REGION)
    return Match(conv.end, inputs, outputs, lambda build: _rewrite(build, conv, len(outputs)))


def _rewrite(build: Builder, conv: CausalConv, outputs: int) -> tuple[Node, list[Node]]:
    x = conv.x if conv.x_time == 1 else build(aten.transpose.int, conv.x, 1, 2)
    computed = value(conv.conv).dtype
    if torch.finfo(value(x).dtype).bits > torch.finfo(computed).bits:
        x = build.cast(x, computed)  # autocast narrows the operand
    args = [x, _taps(build, conv.weight), conv.bias, conv.activation, value(conv.end).dtype]
    if conv.seq_idx is not None:
        numbers, (batch, steps, _) = conv.seq_idx, value(x).shape
        if not same_size(value(numbers).shape[0], batch):
            numbers = build(aten.expand.default, numbers, [batch, steps])
        args.append(numbers)
    node = build(torch.ops.megacpp.causal_conv1d.default, *args)
    swapped = build(aten.transpose.int, node, 1, 2) if conv.end_time == 2 else node
    return node, [swapped, *[node] * (outputs - 1)]


def _taps(build: Builder, weight: Node) -> Node:
    """The weight [c, 1, k] as [c, k]."""
    if value(weight).dim() == 2:
        return weight
    if weight.target is aten.unsqueeze.default and weight.args[1] in (1, -2):
        return weight.args[0]  # type: ignore[return-value]
    return build(aten.squeeze.dim, weight, 1)
