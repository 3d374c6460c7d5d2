"""Two layers of every idiom as plain models write them; forward(x) takes any length and makes its own tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GatedRMSNorm, Mamba2Mixer

from . import jitter_gains
from .scans import one_triangle
from .spellings import PlainGQA, PlainMLA

DIM = 36
CHUNK = 8


class Residual(nn.Module):
    """Blocks, each on top of what went in."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Adapted(nn.Module):
    """A frozen projection beside which a product of two thin ones is trained."""

    def __init__(self, base: nn.Linear, rank: int = 3):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * 2.0


def adapted(block: nn.Module, *names: str) -> nn.Module:
    """`block` with adapters on the projections of these names."""
    for name in names:
        setattr(block, name, Adapted(getattr(block, name)))
    return block


def turned_in_part(block: PlainGQA, lanes: int) -> PlainGQA:
    """The leading lanes of every head rotate, the rest is passed on."""
    whole = block.rope.rotate

    def rotate(x, tables, heads_dim=1):
        tables = tuple(t[..., :lanes] for t in tables)
        return torch.cat((whole(x[..., :lanes], tables, heads_dim), x[..., lanes:]), dim=-1)

    block.rope = block.rope._replace(rotate=rotate)
    return block


def scaled(block: PlainGQA, factor: float) -> PlainGQA:
    """Queries and keys are scaled before they rotate."""
    whole = block.rope.rotate
    block.rope = block.rope._replace(rotate=lambda x, tables, heads_dim=1: whole(x * factor, tables, heads_dim))
    return block


class Gated(nn.Module):
    """A value and its gate out of one projection, and a norm of both. in_chunks: the value is summed up in chunks, as
    by a scan."""

    def __init__(self, norm: nn.Module, inner: int, in_chunks: bool = False):
        super().__init__()
        self.proj, self.norm, self.out = nn.Linear(DIM, 2 * inner), norm, nn.Linear(inner, DIM)
        self.in_chunks = in_chunks

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.proj(x).chunk(2, -1)
        if self.in_chunks:
            y = y.unflatten(1, (-1, CHUNK)).cumsum(2).flatten(1, 2)
        return self.out(self.norm(y, z))


class NormThenGate(nn.Module):
    """The gate behind the norm, as in gated delta nets."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        h = y.float()
        h = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(y.dtype)
        return (h * F.silu(z.float())).to(y.dtype)


class Flattened(nn.Module):
    """Routed experts see tokens as rows of a matrix."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.flatten(0, -2)).view(x.shape)


def drawn(make: Callable[[], Iterable[nn.Module]]) -> nn.Module:
    """The same model at every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return jitter_gains(Residual(*make()))


def latent_attention(n: int = 2) -> nn.Module:
    """Queries through a latent, and without."""
    return drawn(lambda: (PlainMLA(DIM, q_lora=rank, table_source="buffer") for rank in (20, None)[:n]))


def latent_attention_with_adapters(n: int = 2) -> nn.Module:
    """In front of a latent and behind one, and on all projections."""
    names = (("q_a", "kv_b"), ("q_a", "q_b", "kv_a", "kv_b", "o"))
    return drawn(lambda: (adapted(PlainMLA(DIM, table_source="buffer"), *on) for on in names[:n]))


def attention(n: int = 2) -> nn.Module:
    """Queries in groups, normed and scaled, some of whose lanes rotate; and one key head."""

    def blocks() -> Iterator[nn.Module]:
        spelled = {"rope_spelling": "rotate_half_by_chunk", "table_source": "buffer"}
        yield scaled(turned_in_part(PlainGQA(DIM, kv_heads=2, qk_norm="nn_rms_norm", **spelled), 8), 0.5)
        yield PlainGQA(DIM, kv_heads=1, table_source="buffer")

    return drawn(lambda: itertools.islice(blocks(), n))


class InOneTriangle(nn.Module):
    """The scan of a mixer as one quadratic form, of which torch makes far fewer symbolic sizes than of chunks."""

    def forward(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return one_triangle(x.to(dt.dtype), dt, A, B.to(dt.dtype), C.to(dt.dtype), A.new_zeros(A.shape), None, 0)[0].to(
            x.dtype
        )


def mixers(n: int = 2) -> nn.Module:
    """A scan in one, and in chunks."""

    def blocks() -> Iterator[nn.Module]:
        quadratic = Mamba2Mixer(DIM, 4, 3, 5, 1, CHUNK, 4, 1e-5)
        quadratic.scan = InOneTriangle()
        yield quadratic
        yield Mamba2Mixer(DIM, 4, 3, 5, 2, CHUNK, 4, 1e-5)

    return drawn(lambda: itertools.islice(blocks(), n))


def gated_norms(n: int = 2) -> nn.Module:
    """The gate in front of the norm, in groups, behind a scan in chunks; and behind the norm."""
    blocks = (lambda: Gated(GatedRMSNorm(12, 3), 12, in_chunks=True)), (lambda: Gated(NormThenGate(14), 14))
    return drawn(lambda: (block() for block in blocks[:n]))


class Heads(nn.Module):
    """A tied head whose logits are capped and shifted, and the log-probabilities of another's words; labels are made of
    positions, so that the second head's rows cannot be fewer than its labels."""

    WORDS = 41

    def __init__(self, n: int):
        super().__init__()
        self.embed = nn.Embedding(self.WORDS, DIM)
        self.proj = nn.Linear(DIM, self.WORDS) if n > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        labels = (torch.arange(x.shape[1], device=x.device) * 7 % self.WORDS).expand(x.shape[:2])
        logits = torch.tanh(F.linear(x + self.embed(labels), self.embed.weight) / 5.0) * 5.0
        shifted = logits[..., :-1, :].float().contiguous().view(-1, self.WORDS)
        loss = F.cross_entropy(shifted, labels[..., 1:].reshape(-1))
        if self.proj is None:
            return loss
        logp = self.proj(x).float().log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return loss + (logp.exp() - logp).mean()


def heads(n: int = 2) -> nn.Module:
    """A loss that is one number, and one of each token."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Heads(n)
