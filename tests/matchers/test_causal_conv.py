"""`match_causal_conv`: which steps an output sees, however the input was padded and the output cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.causal_conv import CausalConv, match_causal_conv
from tests.matchers.graphs import aten, trace
from tests.seeds import Draws

BATCH, TIME, CHANNELS, TAPS = 2, 6, 3, 4
draw = Draws(__name__)
X, W, B = draw(BATCH, CHANNELS, TIME), draw(CHANNELS, 1, TAPS), draw(CHANNELS)
ROWS = X.transpose(1, 2).contiguous()


def found(f, x):
    graph = trace(f, x, W, B)
    return graph, match_causal_conv(graph.only(aten.conv1d.default, aten.conv1d.padding, aten.convolution.default))


def conv(x, w, b, **how):
    return F.conv1d(x, w, b, groups=CHANNELS, **how)


@pytest.mark.parametrize(("f", "x", "time", "activation"), [
    (lambda x, w, b: conv(x, w, b, padding=TAPS - 1)[..., :TIME], X, 2, ""),
    (lambda x, w, b: conv(x, w, b, padding=TAPS - 1)[..., : -(TAPS - 1)], X, 2, ""),
    (lambda x, w, b: conv(F.pad(x, (TAPS - 1, 0)), w, b), X, 2, ""),
    (lambda x, w, b: conv(torch.cat((x.new_zeros(BATCH, CHANNELS, TAPS - 1), x), -1), w, b), X, 2, ""),
    (lambda x, w, b: F.silu(conv(x, w, b, padding=TAPS - 1)[..., :TIME]), X, 2, "silu"),
    (lambda x, w, b: F.silu(
        conv(x.transpose(1, 2), w, b, padding=TAPS - 1)[..., :TIME].transpose(1, 2),
    ), ROWS, 1, "silu"),
    (lambda x, w, b: conv(F.pad(x, (0, 0, TAPS - 1, 0)).mT, w, b).mT, ROWS, 1, ""),
], ids=["cut", "cut_from_end", "pad", "zeros", "silu", "rows", "rows_padded"])  # fmt: skip
def test_matches(f, x, time, activation):
    graph, conv = found(f, x)
    assert isinstance(conv, CausalConv), conv
    assert (conv.x, conv.weight, conv.bias) == tuple(graph.inputs)
    assert (conv.end, conv.x_time, conv.end_time, conv.activation) == (graph.output, time, time, activation)
    assert {conv.conv, conv.end} <= conv.internal


@pytest.mark.parametrize(("tag", "f"), [
    ("not-causal", lambda x, w, b: conv(x, w, b, padding=TAPS - 1)),
    ("not-causal", lambda x, w, b: conv(x, w, b, padding=TAPS - 1)[..., 1 : TIME + 1]),
    ("not-causal", lambda x, w, b: conv(F.pad(x, (0, TAPS - 1)), w, b)),
    ("not-causal", lambda x, w, b: conv(F.pad(x, (TAPS - 1, 0), value=1.0), w, b)),
    ("stride", lambda x, w, b: conv(x, w, b, padding=TAPS - 1, stride=2)[..., :TIME]),
    ("dilation", lambda x, w, b: conv(F.pad(x, (2 * TAPS - 2, 0)), w, b, dilation=2)),
    ("groups", lambda x, w, b: F.conv1d(x, w.expand(-1, CHANNELS, -1), b, padding=TAPS - 1)[..., :TIME]),
    ("escapes", lambda x, w, b: (lambda y: (y[..., :TIME], y.sum()))(conv(x, w, b, padding=TAPS - 1))),
    ("precision", lambda x, w, b: conv(x, w, b, padding=TAPS - 1).bfloat16().float()[..., :TIME]),
])  # fmt: skip
def test_near_misses(tag, f):
    _, refused = found(f, X)
    assert isinstance(refused, MatchFailure) and refused.tag == tag, refused


def test_a_transposed_convolution_and_a_pointwise_one_are_none():
    graph = trace(lambda x, w, b: F.conv_transpose1d(x, w, b, groups=CHANNELS), X, W, B)
    assert all(match_causal_conv(n) is None for n in graph.graph.nodes)
    assert match_causal_conv(trace(lambda x, w, b: conv(x, w[..., :1], b), X, W, B).output) is None
