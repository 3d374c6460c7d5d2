"""`match_gated_norm`: the gate before or behind a norm, and what the gains span."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.gated_rms_norm import GatedNorm, gate_nearby, match_gated_norm
from megacpp_compile.matchers.rms_norm import RmsNorm, match_rms_norm
from tests.matchers.graphs import trace
from tests.seeds import Draws

ROWS, DIM, GROUPS, EPS = 5, 8, 2, 0.05
draw = Draws(__name__)
Y, Z, W = draw(2, ROWS, DIM), draw(2, ROWS, DIM), draw(DIM)


def normed(x, w=None):
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x if w is None else x * w


def in_groups(x, w):
    return normed(x.reshape(2, ROWS, GROUPS, DIM // GROUPS)).reshape(2, ROWS, DIM) * w


def gated(f, *args):
    """What is made of the innermost norm of `f`."""
    graph = trace(f, *args)
    norms = [m for n in graph.graph.nodes if isinstance(m := match_rms_norm(n), RmsNorm)]
    return graph, match_gated_norm(norms[0])


@pytest.mark.parametrize(("f", "size", "norm_before_gate"), [
    (lambda y, z, w: normed(y * F.silu(z), w), DIM, False),
    (lambda y, z, w: w * normed(z * torch.sigmoid(z) * y), DIM, False),
    (lambda y, z, w: in_groups(F.silu(z) * y, w), DIM // GROUPS, False),
    (lambda y, z, w: normed(y, w) * F.silu(z), DIM, True),
    (lambda y, z, w: (z / (1 + torch.exp(-z))) * (normed(y) * w), DIM, True),
], ids=["before", "before_by_hand", "in_groups", "behind", "behind_by_hand"])  # fmt: skip
def test_matches(f, size, norm_before_gate):
    graph, norm = gated(f, Y, Z, W)
    assert isinstance(norm, GatedNorm), norm
    assert (norm.y, norm.z, norm.node) == (*graph.inputs[:2], graph.output)
    assert (norm.size, norm.norm_before_gate, norm.scale, norm.activation) == (size, norm_before_gate, 1.0, "silu")
    assert norm.gains == [(graph.inputs[2], DIM)]
    assert norm.internal == graph.calls


@pytest.mark.parametrize(("f", "activation", "norm_before_gate"), [
    (lambda y, z, w: normed(y, w) * torch.sigmoid(z), "sigmoid", True),
    (lambda y, z, w: (1 / (1 + torch.exp(-z))) * (normed(y) * w), "sigmoid", True),
    (lambda y, z, w: w * normed(torch.sigmoid(z) * y), "sigmoid", False),
    (lambda y, z, w: normed(y, w) * torch.sigmoid(z) * z, "silu", True),
    (lambda y, z, w: z * (torch.sigmoid(z) * (w * normed(y))), "silu", True),
], ids=["behind", "by_hand", "before", "factors_of_silu", "factors_before"])  # fmt: skip
def test_sigmoid_gates(f, activation, norm_before_gate):
    graph, norm = gated(f, Y, Z, W)
    assert isinstance(norm, GatedNorm) and (norm.y, norm.z, norm.node) == (*graph.inputs[:2], graph.output)
    assert (norm.activation, norm.norm_before_gate, norm.gains) == (activation, norm_before_gate, [(graph.inputs[2], DIM)])


def test_casts_that_widen_are_part_of_it():
    f = lambda y, z, w: (w * normed(y.float() * F.silu(z.float()))).bfloat16()  # noqa: E731
    graph, norm = gated(f, Y.bfloat16(), Z.bfloat16(), W)
    assert isinstance(norm, GatedNorm) and (norm.y, norm.z, norm.node) == (*graph.inputs[:2], graph.output)


@pytest.mark.parametrize(("tag", "f"), [
    ("gate-activation", lambda y, z, w: normed(y * torch.tanh(z), w)),
    ("gate-activation", lambda y, z, w: normed(y * F.gelu(z), w)),
    ("gate-activation", lambda y, z, w: normed(y, w) * F.relu(z)),
    ("precision", lambda y, z, w: normed(y * F.silu(z)).bfloat16().float() * w),
], ids=["tanh", "gelu", "relu_behind", "rounded"])  # fmt: skip
def test_near_misses(tag, f):
    graph, refused = gated(f, Y, Z, W)
    assert isinstance(refused, MatchFailure) and refused.tag == tag, refused
    assert refused.node in graph.graph.nodes


@pytest.mark.parametrize("f", [
    lambda y, z, w: normed(y, w) + F.silu(z), lambda y, z, w: normed(y, w) * F.silu(z)[:, :1],
    lambda y, z, w: (lambda n: (n * F.silu(z), n))(normed(y, w)), lambda y, z, w: normed(z * torch.sigmoid(z), w),
    lambda y, z, w: (lambda h: (normed(h, w), h))(y * torch.sigmoid(z)),
    lambda y, z, w: (lambda n: n * torch.sigmoid(n))(normed(y, w)),
    lambda y, z, w: normed(y, w) * torch.sigmoid(z)[..., :1],
], ids=["added", "broadcast", "escapes", "silu", "gated_residual", "silu_of_it", "one_gate_for_all"])  # fmt: skip
def test_a_norm_without_a_gate_is_none(f):
    assert gated(f, Y, Z, W)[1] is None


def test_gate_nearby():
    graph = trace(lambda y, z, w: normed(y * F.silu(z), w), Y, Z, W)
    assert gate_nearby(graph.output)
    assert not gate_nearby(trace(lambda y, z, w: normed(y + z, w), Y, Z, W).output)
