"""Loops over tokens that begin anew with packed documents: decays that flags clear, and states that they clear."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check, check_graph, run_graph, train

from .conditions import assert_serves, op_of, sampled

NAME = "token_loop"
B, T, H, K, V = 2, 7, 2, 3, 4
# Positions that begin anew: documents of one token, too, and a row that begins within a document.
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2], [4, 5, 0, 1, 2, 3, 0]])


def filled(number):
    return lambda g, begins: g.masked_fill(begins, number).exp()


def by_where(g, begins):
    return torch.where(begins, torch.zeros_like(g), g.exp())


# Decays of the gates' logarithms and of where documents begin.
DECAYS = {
    "filled": filled(-1e4), "filled with infinity": filled(float("-inf")),
    "filled with the least number": filled(torch.finfo(torch.float32).min),
    "a logarithm of flags": lambda g, begins: (g + (~begins).to(g.dtype).log()).exp(),
    "times": lambda g, begins: g.exp() * ~begins, "times numbers": lambda g, begins: g.exp() * (1 - begins.to(g.dtype)),
    "cleared": lambda g, begins: g.exp().masked_fill(begins, 0.0), "where": by_where,
    "sigmoid": lambda g, begins: (~begins).to(g.dtype) * torch.sigmoid(g),
}  # fmt: skip


def plain(g, begins):
    return g.exp()


# What a document's first token finds of the state.
STATES = {
    "times": lambda S, begins: S * (~begins).to(S.dtype), "filled": lambda S, begins: S.masked_fill(begins, 0.0),
    "where": lambda S, begins: torch.where(begins, torch.zeros_like(S), S),
}  # fmt: skip


class Loop(nn.Module):
    def __init__(self, delta=True, decays=plain, state=None):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(5, H * (2 * K + V + 2)), nn.Linear(H * V, 5)
        self.delta, self.decays, self.state = delta, decays, state

    def forward(self, x, positions):
        b, t, _ = x.shape
        q, k, v, g, beta = self.into(x).split([H * K, H * K, H * V, H, H], -1)
        q, k, v = (a.view(b, t, H, -1) for a in (q, k, v))
        begins = (positions == 0)[..., None]
        decays, beta, S, out = self.decays(-F.softplus(g), begins), beta.sigmoid(), x.new_zeros(b, H, K, V), []
        for i in range(T):
            S = S if self.state is None else self.state(S, begins[:, i, :, None, None])
            S = S * decays[:, i, :, None, None]
            new = v[:, i]
            if self.delta:
                new = beta[:, i, :, None] * (new - torch.einsum("bhkv,bhk->bhv", S, k[:, i]))
            S = S + k[:, i, :, :, None] * new[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, i]))
        return self.out(torch.stack(out, 1).flatten(2))


def args(dtype=torch.float32):
    return torch.randn(B, T, 5, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(), POSITIONS


@functools.cache
def of_documents():
    """Eager's results where each decay is 0 at once."""
    module = Loop(decays=by_where)
    return train(module, module, args())


@sampled(6, "how", DECAYS)
def test_decays(how):
    """Equal to eager in forward and gradients, which are finite though a decay has no logarithm."""
    frames = check_graph(Loop(delta=how != "sigmoid", decays=DECAYS[how]), args())
    assert frames.counts[NAME] == 1, frames.misses
    assert not frames.again()


def test_what_is_computed_is_of_documents():
    got = check_graph(Loop(decays=DECAYS["times"]), args()).results
    for name, want in of_documents().items():
        torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    assert check_graph(Loop(decays=DECAYS["times"]).to(dtype), args(dtype)).counts[NAME] == 1


def test_linear_attention_and_inference():
    x, positions = args()
    with torch.no_grad():
        frames = check_graph(Loop(False, DECAYS["cleared"]), (x.detach(), positions))
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.end_to_end
def test_dynamic():
    """Any number of rows; the number of tokens is the loop's."""
    module = Loop(decays=DECAYS["times"])
    x, positions = args()
    for t in (x, positions):
        torch._dynamo.mark_dynamic(t, 0)
    frames = check(module, (x, positions))
    assert frames.counts[NAME] == 1, frames.misses
    assert_serves(frames, module, (torch.randn(3, T, 5, requires_grad=True), POSITIONS[[1, 0, 1]]))


def test_gates_without_documents_are_left_as_they_are():
    """No node more than the op takes."""
    frames = run_graph(Loop(), args())
    assert torch.ops.aten.clamp_min.default not in {n.target for n in frames.graph.graph.nodes}
    assert op_of(frames, "gated_delta_rule") is not None


@pytest.mark.parametrize(("how", "delta"), [("times", True), ("filled", False), ("where", True), ("times", False)])
def test_states_that_are_cleared(how, delta):
    """No op clears a state; the reason says what to write."""
    frames = check_graph(Loop(delta, state=STATES[how]), args())
    assert not frames.counts[NAME]
    (miss,) = [m for m in frames.misses if m.pass_name == NAME]
    assert miss.tag == "documents" and "multiply the decay" in miss.reason


class Mamba1(nn.Module):
    """A step size of each channel, in decays and in what is written."""

    def __init__(self, decays):
        super().__init__()
        self.into, self.out, self.A, self.decays = nn.Linear(5, 14), nn.Linear(4, 5), nn.Parameter(torch.rand(4, K)), decays

    def forward(self, x, positions):
        u, dt, B_, C = self.into(x).split([4, 4, K, K], -1)
        dt = F.softplus(dt)
        decays = self.decays(dt[..., None] * -self.A.exp(), (positions == 0)[..., None, None])
        added, S, out = (dt * u)[..., None] * B_[:, :, None], x.new_zeros(len(x), 4, K), []
        for i in range(T):
            S = decays[:, i] * S + added[:, i]
            out.append((S * C[:, i, None]).sum(-1))
        return self.out(torch.stack(out, 1))


@pytest.mark.parametrize("how", ["times", "cleared"])
def test_scans_whose_decays_have_the_step_size(how):
    frames = check_graph(Mamba1(DECAYS[how]), args())
    assert not frames.counts[NAME]
    assert [m.tag for m in frames.misses if m.pass_name == NAME] == ["documents"]


def test_flags_that_are_no_documents():
    """Numbers that happen to be of a mask made of none of the model's inputs."""

    class Constant(Loop):
        def forward(self, x, positions):
            return super().forward(x, torch.arange(T).expand(B, T) + 1)

    module = Constant(state=STATES["times"])
    frames = check_graph(copy.deepcopy(module), args())
    assert "documents" not in frames.tags(NAME)
