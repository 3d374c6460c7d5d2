"""Pre-norm and the projections behind it: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.config.options import Config
from tests.corpus import jitter_gains
from tests.frames import check, render, run

from .contract import assert_autocast, assert_dynamic, assert_fires, assert_refused

NAME = "norm_linear"
ON = Config(strict=True, passes={NAME: True})
DIM, OUT, EPS = 12, 20, 0.05


class PreNorm(nn.Module):
    """`body(m, x)` with a norm's gain and three projections of what is normed."""

    def __init__(self, body, bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.gain = body, nn.Parameter(torch.ones(DIM))
        self.layer_norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, OUT, bias=bias) for _ in range(3))
        self.biased = nn.Linear(DIM, OUT)

    def norm(self, x):
        return F.rms_norm(x, (DIM,), self.gain, EPS)

    def forward(self, x):
        return self.body(self, x)


def build(body, dtype=torch.float32, **options):
    return jitter_gains(PreNorm(body, **options)).to(dtype), tokens(5, dtype)


def tokens(seq, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq)
    return (torch.randn(2, seq, DIM, generator=generator).to(dtype).requires_grad_(),)


# --- fires


def qkv(m, x):
    h = m.norm(x)
    return x.sum() + m.q(h) * m.k(h) * m.v(h)


def by_hand(m, x):
    """As transformers spells it, and gate and up of an MLP."""
    h = x.float()
    h = m.gain * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return F.silu(m.q(h)) * m.k(h)


def through_views(m, x):
    h = m.norm(x).view(-1, DIM)
    return m.q(h).view(2, -1, OUT) + m.k(h.view(2, -1, DIM))


def by_heads(m, x):
    """As code in the manner of JAX keeps them apart."""
    return torch.einsum("bsd,nhd->bnsh", m.norm(x), m.q.weight.unflatten(0, (4, 5)))


def one(m, x):
    """A mixer's input projection, split behind it."""
    a, b = m.q(m.norm(x) * 0.5).chunk(2, -1)
    return F.silu(a) * b


def test_graph():
    frames = assert_fires(NAME, *build(qkv), config=ON)
    expecttest.assert_expected_inline(
        render(frames.graph),
        """\
norm_linear: ((f32[2, 5, 20], f32[2, 5, 20], f32[2, 5, 20]), f32[2, 5, 1]) = megacpp.norm_linear(x, gain, [q_weight, k_weight, v_weight], [], 0.05)
getitem: (f32[2, 5, 20], f32[2, 5, 20], f32[2, 5, 20]) = norm_linear[0]
getitem_1: f32[2, 5, 20] = getitem[0]
getitem_2: f32[2, 5, 20] = getitem[1]
getitem_3: f32[2, 5, 20] = getitem[2]
sum: f32[] = sum(x)
mul: f32[2, 5, 20] = mul.Tensor(getitem_1, getitem_2)
mul_1: f32[2, 5, 20] = mul.Tensor(mul, getitem_3)
add: f32[2, 5, 20] = add.Tensor(sum, mul_1)
return [add]""",
    )


def one_that_only_chooses(m, x):
    """Without a gradient in eager, too."""
    h = m.norm(x)
    return m.q(h) + m.k(h).argmax(-1, keepdim=True)


@pytest.mark.parametrize(
    "body", [by_hand, by_heads, one, one_that_only_chooses, through_views], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("bias", [False, True])
def test_fires(body, bias):
    assert_fires(NAME, *build(body, bias=bias), config=ON)


def test_bfloat16():
    frames = check(*build(by_hand, torch.bfloat16), ON)
    assert frames.counts[NAME] == 1, frames.misses


def test_counts_every_site():
    def twice(m, x):
        return qkv(m, x + by_hand(m, x)[..., :DIM])

    assert_fires(NAME, *build(twice), 2, config=ON)


def test_behind_other_passes():
    """A latent's norm is `down_norm_up`'s; the norm in front of its down-projection is read by that op then."""

    def bottleneck(m, x):
        return m.v(F.rms_norm(m.q(m.norm(x))[..., :DIM], (DIM,), m.gain, EPS))

    frames = run(*build(bottleneck), ON)
    assert frames.fired == {"down_norm_up": 1}


# --- stays out


def test_off_by_default():
    frames = check(*build(qkv))
    assert NAME not in frames.counts and not frames.misses


@pytest.mark.parametrize("everything", [False, True], ids=["length", "everything"])
def test_dynamic_lengths(everything):
    assert_dynamic(NAME, build(qkv)[0], tokens, everything=everything, config=ON)


def test_autocast():
    assert_autocast(NAME, *build(qkv), config=ON)


def used_by_the_residual(m, x):
    h = m.norm(x)
    return h + m.q(h)[..., :DIM]


def used_by_a_router(m, x):
    h = m.norm(x)
    return m.q(h) * h.softmax(-1).amax(-1, keepdim=True)


def statistic_used(m, x):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return m.q(x * r * m.gain) * r


def layer_norm(m, x):
    return F.silu(m.q(m.layer_norm(x))) + 1


def one_bias(m, x):
    h = m.norm(x)
    return m.q(h) + m.biased(h)


def another_dtype(m, x):
    h = m.norm(x)
    return m.q(h) + F.linear(h.double(), m.k.weight.double())


def weight_of_the_normed(m, x):
    h = m.norm(x)
    return F.linear(h, m.k.weight * m.q(h).mean())


def of_one_vector(m, x):
    return m.q(m.norm(x[0, 0]))


def without_gradient(m, x):
    with torch.no_grad():
        h = m.norm(x)
    return m.q(h)


def mean_of_absolutes(m, x):
    return m.q(x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS))


NEAR_MISSES = {
    "escapes": [used_by_the_residual, used_by_a_router, statistic_used],
    "layer-norm": [layer_norm],
    "bias": [one_bias],
    "dtype": [another_dtype],
    "feedback": [weight_of_the_normed],
    "rank": [of_one_vector],
    "region": [without_gradient],
    "no-square": [mean_of_absolutes],
}


@pytest.mark.parametrize(
    ("tag", "body"), [(tag, body) for tag, bodies in NEAR_MISSES.items() for body in bodies],
    ids=lambda p: p if isinstance(p, str) else p.__name__,
)  # fmt: skip
def test_refuses(tag, body):
    assert_refused(NAME, tag, *build(body), config=ON)


def test_refuses_under_a_policy():
    """The policy computes norms again by itself."""
    assert_refused(NAME, "policy", *build(qkv), config=Config(strict=True, passes={NAME: True}, policy="selective"))
