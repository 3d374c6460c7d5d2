"""Blocks with hyper-connections, as models write them: what stands before the block, and what stands behind it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.config.options import Config

N, D, STEPS, EPS = 4, 6, 3, 1e-2
ON = Config(strict=True, passes={"hyper_connection": True, "stream_update": True})


class Block(nn.Module):
    """`before(module, x)` gives (block input, weights of its output, mixing matrix); `behind` the streams then."""

    def __init__(self, before, behind=None, n=N, rows=None):
        super().__init__()
        self.before, self.behind, self.n = before, behind or deepseek_v4_behind, n
        rows = n * (n + 2) if rows is None else rows
        self.fn = nn.Parameter(torch.randn(rows, n * D) / 4)
        self.base, self.scale = nn.Parameter(torch.randn(rows) / 2), nn.Parameter(1 + torch.randn(3) / 4)
        self.gain = nn.Parameter(1 + torch.randn(n * D) / 4)
        self.block, self.magnitude = nn.Linear(D, D), 3.0

    def forward(self, x):
        block, post, mix = self.before(self, x)
        return self.behind(x, self.block(block), post, mix)


def streams(seq=5, dtype=torch.float32, n=N, batch=2):
    generator = torch.Generator().manual_seed(seq)
    return (torch.randn(batch, seq, n, D, generator=generator).to(dtype).requires_grad_(),)


def build(before, behind=None, dtype=torch.float32, n=N, rows=None):
    torch.manual_seed(0)
    return Block(before, behind, n, rows).to(dtype), streams(dtype=dtype, n=n)


def unit(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def sinkhorn(mix, steps=STEPS, eps=EPS):
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


# --- what is made of the streams


def logits(m, x):
    """(logits of the three maps, their bases, their scales) as DeepSeek-V4 has them."""
    n = m.n
    parts = [n, n, n * n]
    flat = unit(x.flatten(2).float())
    return F.linear(flat, m.fn.float()).split(parts, -1), m.base.split(parts), m.scale.unbind(0)


def collapse(pre, x):
    return (pre.unsqueeze(-1) * x).sum(2).to(x.dtype)


def deepseek_v4(m, x):
    (pre, post, mix), (b0, b1, b2), (s0, s1, s2) = logits(m, x)
    pre, post = torch.sigmoid(pre * s0 + b0) + EPS, 2 * torch.sigmoid(post * s1 + b1)
    mix = torch.softmax(mix.view(*mix.shape[:-1], m.n, m.n) * s2 + b2.view(m.n, m.n), -1) + EPS
    return collapse(pre, x), post, sinkhorn(mix)


def hy_v4(m, x):
    """The norm behind the linear, no matrix."""
    flat = x.flatten(2).float()
    made = F.linear(flat, m.fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    (b0, b1), (l0, l1) = m.base.split(m.n), made.split(m.n, -1)
    post = m.magnitude * torch.sigmoid(l1 * m.scale[1] + b1) + EPS
    out = torch.sum((torch.sigmoid(l0 * m.scale[0] + b0) + EPS).unsqueeze(-1) * x, dim=2)
    return out.to(x.dtype), post, None


def head(m, x):
    """Of the last layer: the streams in one, and nothing else."""
    made = F.linear(unit(x.flatten(2).float()), m.fn.float())
    pre = torch.sigmoid(made * m.scale[:1].float() + m.base.float()) + EPS
    return collapse(pre, x), None, None


def paper(m, x):
    """Three projections, gains of the norm, exponentials normalised over columns and rows."""
    n, flat = m.n, unit(x.flatten(2).float()) * m.gain.float()
    w_pre, w_post, w_mix = m.fn.float().split([n, n, n * n])
    b_pre, b_post, b_mix = m.base.split([n, n, n * n])
    pre = torch.sigmoid(m.scale[0] * (flat @ w_pre.t()) + b_pre)
    post = 2 * torch.sigmoid(m.scale[1] * (flat @ w_post.t()) + b_post)
    mix = torch.exp(m.scale[2] * (flat @ w_mix.t()).reshape(*x.shape[:2], n, n) + b_mix.reshape(n, n))
    for _ in range(STEPS):
        mix = mix / mix.sum(dim=-2, keepdim=True)
        mix = mix / mix.sum(dim=-1).unsqueeze(-1)
    return torch.einsum("bsn,bsnd->bsd", pre.to(x.dtype), x), post, mix


def in_logarithms(m, x):
    """Sinkhorn on logarithms, by their logsumexp; bases before scales; the sum as a product of matrices."""
    n, made = m.n, F.linear(unit(x.flatten(2).float()), m.fn.float(), m.base.float())
    pre, post = 1 / (1 + torch.exp(-made[..., :n])), torch.sigmoid(made[..., n : 2 * n]) * 2
    mix = made[..., 2 * n :].unflatten(-1, (n, n)) * m.scale[2]
    for _ in range(STEPS):
        mix = mix - torch.logsumexp(mix, -1, keepdim=True)
        mix = mix - mix.logsumexp(-2).unsqueeze(-2)
    return torch.matmul(pre.unsqueeze(-2).to(x.dtype), x).squeeze(-2), post, mix.exp()


def by_log_softmax(m, x):
    n = m.n
    (pre, post, mix), _, (s0, s1, s2) = logits(m, x)
    mix = F.log_softmax(mix.unflatten(-1, (n, n)) / s2, -2)
    mix = F.softmax(F.log_softmax(mix, -1), -2)
    return collapse(torch.sigmoid(pre - m.base[:n]), x), torch.sigmoid(post * s1), mix


def one_softmax(m, x):
    n = m.n
    (pre, post, mix), (_, _, b2), _ = logits(m, x)
    mix = torch.softmax(mix.reshape(*mix.shape[:2], n, n) + b2.view(n, n), dim=-2)
    return collapse(pre.sigmoid(), x), post.sigmoid(), mix


def hyperbolic(m, x):
    n = m.n
    (pre, post, mix), (b0, b1, b2), _ = logits(m, x)
    mix = torch.tanh(torch.addcmul(b2, mix, m.scale[2:].expand(n * n))).unflatten(-1, (n, n))
    return collapse(torch.sigmoid(torch.addcmul(b0, pre, m.scale[:1])), x), torch.sigmoid(post + b1), mix


def by_reciprocals(m, x):
    """Products by reciprocals, in other orders, in the model's own dtype; the gain by number."""
    n = m.n
    made = F.linear(unit(x.flatten(2)) * 0.5, m.fn)
    pre, post, mix = made.split([n, n, n * n], -1)
    mix = torch.sigmoid(mix.view(*mix.shape[:-1], n, n))
    for axis in (-1, -2, -1, -2):
        mix = mix.sum(axis, keepdim=True).reciprocal() * mix
    return (x * pre.sigmoid()[..., None]).sum(-2), 1 - torch.sigmoid(-m.scale[1] * post), mix


def other_order(m, x):
    """The matrix' rows first, the block's weights last, of one linear as a product."""
    n = m.n
    made = unit(x.reshape(*x.shape[:2], -1).float()) @ m.fn.float().t()
    mix, post, pre = made.split([n * n, n, n], -1)
    mix = sinkhorn(torch.softmax((mix + m.base[: n * n]).unflatten(-1, (n, n)), -1), eps=0.0)
    return torch.einsum("bsnd,bsn->bsd", x, torch.sigmoid(pre).to(x.dtype)), torch.sigmoid(post) * 2, mix


def scales_of_rows(m, x):
    """Bases within scales, a divisor, scales by rows of the matrix."""
    (pre, post, mix), (b0, b1, b2), (s0, s1, s2) = logits(m, x)
    each = torch.stack([s0, s1, s2, s0])
    mix = mix.unflatten(-1, (N, N)) * each.unsqueeze(-1) + b2.view(N, N).t()
    pre, post = torch.sigmoid((pre + b0) * each), torch.sigmoid((post - b1) / (2 + each.square()))
    return collapse(pre, x), post, sinkhorn(mix.softmax(-1))


def joined_tokens(m, x):
    """All tokens in one dimension until the weights are made; the sum keeps its dimension."""
    n, flat = m.n, unit(x.reshape(-1, m.n * D).float())
    pre, post, mix = F.linear(flat, m.fn.float()).split([n, n, n * n], -1)
    pre = torch.sigmoid(pre * m.scale[0] + m.base[:n]).view(*x.shape[:3])
    post = 2 * torch.sigmoid(post).view(*x.shape[:3])
    mix = sinkhorn(torch.softmax(mix.view(-1, n, n), -1) + EPS).view(*x.shape[:3], n)
    return (pre.unsqueeze(-1) * x).sum(2, keepdim=True).squeeze(2).to(x.dtype), post, mix


# --- what becomes of the streams


def deepseek_v4_behind(x, block, post, mix):
    if mix is None:
        return (post.float().unsqueeze(-1) * block.float().unsqueeze(-2) + x.float()).to(x.dtype) if post is not None else block
    post = post.to(x.dtype).unsqueeze(-1)
    return post * block.unsqueeze(-2) + torch.matmul(mix.to(x.dtype).transpose(-1, -2), x)


def product(x, block, post, mix):
    return mix.to(x.dtype) @ x + block.unsqueeze(2) * post.to(x.dtype)[..., None]


def equations(x, block, post, mix):
    return torch.einsum("bsij,bsjd->bsid", mix, x.float()).to(x.dtype) + torch.einsum("bsi,bsd->bsid", post.to(x.dtype), block)


def transposed_equation(x, block, post, mix):
    return torch.einsum("bsjd,bsji->bsid", x, mix.to(x.dtype)) + torch.einsum("bsd,bsi->bsid", block, post.to(x.dtype))


def broadcast(x, block, post, mix):
    """In float32, rounded at the end."""
    mixed = (mix.unsqueeze(-1) * x.float().unsqueeze(-3)).sum(-2)
    return (mixed + post.unsqueeze(-1) * block.float().unsqueeze(-2)).to(x.dtype)


def broadcast_transposed(x, block, post, mix):
    mixed = torch.sum(mix.unsqueeze(-1) * x.unsqueeze(3), dim=2).type_as(x)
    return mixed + (post.unsqueeze(-1).expand(*post.shape, D) * block.unsqueeze(-2)).type_as(x)


BEFORE = {
    "deepseek_v4": (deepseek_v4, None), "paper": (paper, None), "in_logarithms": (in_logarithms, None),
    "by_log_softmax": (by_log_softmax, None), "one_softmax": (one_softmax, None), "hyperbolic": (hyperbolic, None),
    "by_reciprocals": (by_reciprocals, None), "other_order": (other_order, None),
    "joined_tokens": (joined_tokens, None), "scales_of_rows": (scales_of_rows, None), "hy_v4": (hy_v4, 2 * N), "head": (head, N),
}  # fmt: skip
BEHIND = {"deepseek_v4": deepseek_v4_behind, "product": product, "equations": equations,
          "transposed_equation": transposed_equation, "broadcast": broadcast,
          "broadcast_transposed": broadcast_transposed}  # fmt: skip
