"""Pre-norm and the projections behind it: found, rewritten, and refused for every reason there is."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.plain_hybrid import TINY, Layer
from megacpp_compile.config.options import Config
from tests.corpus import jitter_gains
from tests.frames import check_graph, render, run

from .conditions import conditions, sampled
from .contract import assert_fires, assert_refused

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


def one(m, x):
    """A mixer's input projection, split behind it."""
    a, b = m.q(m.norm(x) * 0.5).chunk(2, -1)
    return F.silu(a) * b


def test_in_front_of_a_mixer():
    """A Mamba-2 block's input projection, whose parts go to other passes' ops."""
    torch.manual_seed(0)
    block = jitter_gains(Layer(TINY, "M"))
    frames = assert_fires(NAME, block, (torch.randn(2, TINY.chunk, TINY.dim).requires_grad_(),), config=ON)
    assert frames.fired == {NAME: 1, "causal_conv1d": 1, "ssd_scan": 1, "gated_rms_norm": 1}


def test_graph():
    frames = assert_fires(NAME, *build(qkv), config=ON, dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
norm_linear: ((f32[2, 5, 20], f32[2, 5, 20], f32[2, 5, 20]), f32[2, 5, 1]) = megacpp.norm_linear(x, gain, [q_weight, k_weight, v_weight], [], 0.05)
getitem: (f32[2, 5, 20], f32[2, 5, 20], f32[2, 5, 20]) = norm_linear[0]
getitem_1: f32[2, 5, 20] = getitem[0]
getitem_2: f32[2, 5, 20] = getitem[1]
getitem_3: f32[2, 5, 20] = getitem[2]
sum: f32[] = sum(x)
mul: f32[2, 5, 20] = mul.Tensor(getitem_1, getitem_2)
mul_1: f32[2, 5, 20] = mul.Tensor(mul, getitem_3)
add: f32[2, 5, 20] = add.Tensor(sum, mul_1)
return [add]""")


def one_that_only_chooses(m, x):
    """Without a gradient in eager, too."""
    h = m.norm(x)
    return m.q(h) + m.k(h).argmax(-1, keepdim=True)


FORMS = {
    "by_hand": by_hand, "one": one, "one_that_only_chooses": one_that_only_chooses, "through_views": through_views,
    # as code in the manner of JAX keeps heads apart
    "by_heads": lambda m, x: torch.einsum("bsd,nhd->bnsh", m.norm(x), m.q.weight.unflatten(0, (4, 5))),
}


@sampled(3, "form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_fires(form, bias):
    assert_fires(NAME, *build(FORMS[form], bias=bias), config=ON)


def test_behind_other_passes():
    """A latent's norm is `down_norm_up`'s; the norm in front of its down-projection is read by that op then."""

    def bottleneck(m, x):
        return m.v(F.rms_norm(m.q(m.norm(x))[..., :DIM], (DIM,), m.gain, EPS))

    frames = run(*build(bottleneck), ON)
    assert frames.fired == {"down_norm_up": 1}


test_conditions = conditions(
    NAME, config=ON, twice=lambda: (*build(lambda m, x: qkv(m, x + by_hand(m, x)[..., :DIM])), 2),
    bfloat16=lambda: build(by_hand, torch.bfloat16), autocast=lambda: build(qkv),
    length=lambda: (build(qkv)[0], tokens), everything=lambda: (build(qkv)[0], tokens),
)


def test_off_by_default():
    frames = check_graph(*build(qkv))
    assert NAME not in frames.counts and not frames.misses


def reads_twice(read):
    """A projection of what is normed, and what `read(m, h, q(h))` makes of both."""

    def body(m, x):
        h = m.norm(x)
        return read(m, h, m.q(h))

    return body


def statistic_used(m, x):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return m.q(x * r * m.gain) * r


def without_gradient(m, x):
    with torch.no_grad():
        h = m.norm(x)
    return m.q(h)


NEAR_MISSES = {
    "used_by_the_residual": ("escapes", reads_twice(lambda m, h, q: h + q[..., :DIM])),
    "used_by_a_router": ("escapes", reads_twice(lambda m, h, q: q * h.softmax(-1).amax(-1, keepdim=True))),
    "statistic_used": ("escapes", statistic_used),
    "layer_norm": ("layer-norm", lambda m, x: F.silu(m.q(m.layer_norm(x))) + 1),
    "one_bias": ("bias", reads_twice(lambda m, h, q: q + m.biased(h))),
    "another_dtype": ("dtype", reads_twice(lambda m, h, q: q + F.linear(h.double(), m.k.weight.double()))),
    "weight_of_the_normed": ("feedback", reads_twice(lambda m, h, q: F.linear(h, m.k.weight * q.mean()))),
    "of_one_vector": ("rank", lambda m, x: m.q(m.norm(x[0, 0]))),
    "without_gradient": ("region", without_gradient),
    "absolutes": ("no-square", lambda m, x: m.q(x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS))),
}


@sampled(3, "case", NEAR_MISSES)
def test_refuses(case):
    tag, body = NEAR_MISSES[case]
    assert_refused(NAME, tag, *build(body), config=ON)


def test_refuses_under_a_policy():
    """The policy computes norms again by itself."""
    assert_refused(NAME, "policy", *build(qkv), config=Config(strict=True, passes={NAME: True}, policy="selective"))
