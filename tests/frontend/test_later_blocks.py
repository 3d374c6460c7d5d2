"""Blocks of recent models as plain code: each becomes an op, or is named with a reason, and is equal to eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacpp_compile

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")
D, EXPERTS, CHOSEN, WIDTH, WORDS = 16, 4, 2, 8, 20


class Experts(nn.Module):
    """kind: of router, of experts, or of what they work on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, inner = kind, D // 2 if kind == "latent" else D
        choices = EXPERTS + 2 * (kind == "zero_computation")
        self.router = nn.Linear(D, choices, bias=False)
        self.down, self.up = nn.Linear(D, inner, bias=False), nn.Linear(inner, D, bias=False)
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH * (1 if kind == "ungated_relu2" else 2), inner) * 0.3)
        self.second = nn.Parameter(torch.randn(EXPERTS, inner, WIDTH) * 0.3)
        self.register_buffer("table", torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(WORDS)]))

    def expert(self, e: int, x: Tensor) -> Tensor:
        h = F.linear(x, self.first[e])
        if self.kind == "ungated_relu2":
            return F.linear(F.relu(h).square(), self.second[e])
        gate, up = h.chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.second[e])

    def routed(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        if self.kind not in ("hash", "sqrt_softplus"):
            return logits.softmax(-1).topk(CHOSEN)
        scores = F.softplus(logits).sqrt()
        chosen = self.table[words] if self.kind == "hash" else scores.topk(CHOSEN)[1]
        gates = scores.gather(1, chosen)
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        gates, chosen = self.routed(x, words)
        rows = self.down(x) if self.kind == "latent" else x
        y = torch.zeros_like(rows)
        for e in range(EXPERTS):
            token, choice = torch.where(chosen == e)
            y.index_add_(0, token, self.expert(e, rows[token]) * gates[token, choice, None])
        if self.kind == "latent":
            return self.up(y)
        return y + x * (gates * (chosen >= EXPERTS)).sum(-1, keepdim=True) if self.kind == "zero_computation" else y


class ResidualAttention(nn.Module):
    """Each block reads a weighted sum of what all blocks before it have left (AttnRes)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm = nn.Parameter(torch.randn(3, D)), nn.RMSNorm(D)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        left = [x]
        for i, block in enumerate(self.blocks):
            v = torch.stack(left)
            weights = torch.einsum("d,ntd->nt", self.q[i], self.norm(v)).softmax(0)
            left.append(block(torch.einsum("nt,ntd->td", weights, v)))
        return left[-1]


class SeveralTokensAhead(nn.Module):
    """Heads that predict tokens further ahead, each with a loss of its own (multi-token prediction)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
        self.joined, self.norms = nn.Linear(2 * D, D, bias=False), nn.ModuleList(nn.RMSNorm(D) for _ in range(2))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h, loss = x, F.cross_entropy(self.head(x[:-1]).float(), words[1:])
        for ahead in (1, 2):
            h = self.joined(torch.cat([self.norms[0](h[:-1]), self.norms[1](self.words(words[ahead:]))], -1))
            loss = loss + 0.3 * F.cross_entropy(self.head(h[:-1]).float(), words[ahead + 1 :])
        return loss


KINDS = ("sqrt_softplus", "hash", "latent", "zero_computation", "ungated_relu2")
BLOCKS = {kind: (lambda kind=kind: Experts(kind), {"moe": 1}) for kind in KINDS}
BLOCKS["several_tokens_ahead"] = SeveralTokensAhead, {"linear_cross_entropy": 3}
BLOCKS["residual_attention"] = ResidualAttention, {"attention": 3}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_becomes_an_op(name):
    made, wanted = BLOCKS[name]
    module, x, words = made(), torch.randn(24, D, requires_grad=True), torch.randint(0, WORDS, (24,))
    weights = [p for p in module.parameters() if p.requires_grad]
    results = []
    for f in (module, torch.compile(module, backend="megacpp")):
        with megacpp_compile.record() as report:
            y = f(x, words)
        grads = torch.autograd.grad(y.square().sum(), [x, *weights], allow_unused=True)
        results.append([y, *(g for g in grads if g is not None)])
    fired = [site.pass_name for site in report.sites]
    assert {pass_name: fired.count(pass_name) for pass_name in wanted} == wanted and len(report.frames) == 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * max(1.0, float(one.detach().abs().max())))
