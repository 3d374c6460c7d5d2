"""`match_rms_norm`: one norm in many spellings, and a tag for each near miss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.rms_norm import RmsNorm, match_rms_norm
from tests.matchers.graphs import trace
from tests.seeds import Draws

DIM, EPS = 8, 0.05
draw = Draws(__name__)
X, W, OTHER = draw(2, 3, DIM), draw(DIM), draw(2, 3, DIM)


def mean(x):
    return x.pow(2).mean(-1, keepdim=True)


def upcast(x, w, other):
    wide = x.float()
    return w * (wide * torch.rsqrt(mean(wide) + EPS)).to(x.dtype)


@pytest.mark.parametrize("f", [
    lambda x, w, other: F.rms_norm(x, (DIM,), w, EPS), lambda x, w, other: x * torch.rsqrt(mean(x) + EPS) * w,
    lambda x, w, other: w * (x / torch.sqrt(EPS + (x * x).sum(-1, keepdim=True) / DIM)),
    lambda x, w, other: (x * (x.square().mean(-1) + EPS).rsqrt().unsqueeze(-1)) * w,
    lambda x, w, other: w * (x * (mean(x) + EPS) ** -0.5), lambda x, w, other: w * (1 / (mean(x) + EPS).sqrt() * x),
    lambda x, w, other: x * torch.rsqrt(mean(x) + EPS).expand_as(x) * w, upcast,
], ids=["rms_norm", "rsqrt", "sum_over_n", "unsqueezed", "power", "one_over_sqrt", "expanded", "upcast"])  # fmt: skip
def test_matches(f):
    dtype = torch.bfloat16 if f is upcast else torch.float32
    graph = trace(f, X.to(dtype), W.to(dtype), OTHER)
    norm = match_rms_norm(graph.output)
    assert isinstance(norm, RmsNorm), norm
    assert norm.x is graph.inputs[0] and norm.node is graph.output
    assert norm.eps == EPS and norm.scale == 1.0
    (gain,) = norm.gains
    assert gain is graph.inputs[1]
    assert norm.internal <= graph.calls and graph.output in norm.internal


def test_numbers_are_scale_and_gains_may_be_many():
    graph = trace(lambda x, w, other: 3.0 * (x * torch.rsqrt(mean(x) + EPS) * w) * w / 2.0, X, W, OTHER)
    norm = match_rms_norm(graph.output)
    assert norm.scale == 1.5 and norm.gains == [graph.inputs[1]] * 2


@pytest.mark.parametrize(("tag", "f"), [
    ("eps-place", lambda x, w, other: x / (mean(x).sqrt() + EPS) * w),
    ("eps-place", lambda x, w, other: x / mean(x).sqrt().clamp(min=EPS) * w),
    ("eps-place", lambda x, w, other: F.normalize(x, dim=-1) * DIM**0.5 * w),
    ("eps-place", lambda x, w, other: x / (x.norm(dim=-1, keepdim=True) * DIM**-0.5 + EPS) * w),
    ("eps-place", lambda x, w, other: x / (x.norm(dim=-1, keepdim=True) / DIM**0.5).clamp(min=EPS) * w),
    ("eps-tensor", lambda x, w, other: x * torch.rsqrt(mean(x) + w)),
    ("axes", lambda x, w, other: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)),
    ("axes", lambda x, w, other: F.rms_norm(x, (3, DIM), eps=EPS)),
    ("other-tensor", lambda x, w, other: other * torch.rsqrt(mean(x) + EPS)),
    ("divisor", lambda x, w, other: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (DIM - 1) + EPS)),
    ("no-square", lambda x, w, other: x * torch.rsqrt((x * other).mean(-1, keepdim=True) + EPS)),
    ("no-mean", lambda x, w, other: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)),
    ("no-mean", lambda x, w, other: F.normalize(x, dim=-1) * w),
    ("no-mean", lambda x, w, other: 10.0 * x / (x.pow(2).sum(-1, keepdim=True).sqrt() + EPS)),
    ("divided", lambda x, w, other: x * torch.rsqrt(mean(x) + EPS) / w),
    ("gain-shape", lambda x, w, other: x * torch.rsqrt(mean(x) + EPS) * other),
    ("layer-norm", lambda x, w, other: F.layer_norm(x, (DIM,), w)),
    ("precision", lambda x, w, other: (x.bfloat16() * torch.rsqrt(mean(x.bfloat16()) + EPS)).float() * w + 0),
])  # fmt: skip
def test_near_misses(tag, f):
    graph = trace(f, X, W, OTHER)
    node = graph.output.args[0] if tag == "precision" else graph.output
    found = match_rms_norm(node)
    assert isinstance(found, MatchFailure) and found.tag == tag, found
    assert found.node in graph.graph.nodes


@pytest.mark.parametrize("f", [lambda x, w, other: x * w, lambda x, w, other: x + other, lambda x, w, other: x.softmax(-1)])
def test_other_things_are_not_even_near(f):
    assert match_rms_norm(trace(f, X, W, OTHER).output) is None
