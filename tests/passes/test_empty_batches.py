"""No tokens at all: every idiom fires as ever, and outputs and gradients are eager's, empty or zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.passes import linear
from tests.corpus import scans
from tests.corpus.delta.block import CHUNKED, PlainDelta
from tests.passes import streams
from tests.passes import test_causal_conv1d as conv
from tests.passes import test_compressed_linear as compressed
from tests.passes import test_gated_rms_norm as gated
from tests.passes import test_linear as fp8
from tests.passes import test_norm_linear as norm
from tests.passes import test_rope_qk as rope
from tests.passes.experts import DIM, TOKENS, MoE, stacked_weights, where_index_add


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class MLA(nn.Module):
    """No size is left to be inferred, which nothing could do of no elements."""

    def __init__(self, dim=24, heads=2, nope=8, rope=4, v=6, rank=12):
        super().__init__()
        self.sizes = heads, nope, rope, v, rank
        self.q, self.kv_a = nn.Linear(dim, heads * (nope + rope)), nn.Linear(dim, rank + rope)
        self.norm, self.kv_b = nn.RMSNorm(rank, 1e-6), nn.Linear(rank, heads * (nope + v), bias=False)
        self.out = nn.Linear(heads * v, dim)

    def forward(self, x, cos, sin):
        (b, t, _), (heads, nope, rope, v, rank) = x.shape, self.sizes
        q_nope, q_rope = self.q(x).view(b, t, heads, nope + rope).transpose(1, 2).split([nope, rope], -1)
        latent, key = self.kv_a(x).split([rank, rope], -1)
        k_nope, values = self.kv_b(self.norm(latent)).view(b, t, heads, nope + v).transpose(1, 2).split([nope, v], -1)
        key = turned(key.view(b, 1, t, rope), cos, sin).expand(b, heads, t, rope)
        q, k = torch.cat((q_nope, turned(q_rope, cos, sin)), -1), torch.cat((k_nope, key), -1)
        y = F.scaled_dot_product_attention(q, k, values, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, heads * v))


class Scan(scans.PlainMamba2):
    """Likewise."""

    def forward(self, u):
        (b, t, _), (heads, p, groups, n) = u.shape, self.shape
        x, B, C, dt = self.in_proj(u).split(self.sizes, -1)
        operands = x.reshape(b, t, heads, p), F.softplus(dt), -torch.exp(self.A_log)
        y, _ = self.form(*operands, B.reshape(b, t, groups, n), C.reshape(b, t, groups, n), self.D, None, self.chunk)
        return self.out_proj(y.reshape(b, t, heads * p))


class Delta(PlainDelta):
    """Likewise."""

    def forward(self, u):
        (b, t, _), (groups, heads, width, values) = u.shape, self.shape
        q, k, v = self.in_proj(u).split(self.sizes, -1)
        q, k, v = q.view(b, t, groups, width), k.view(b, t, groups, width), v.view(b, t, heads, values)
        beta, norm = self.beta_proj(u).sigmoid(), self.spelling.norm
        o, _ = self.spelling.form(q, k, v, self.gates(u), beta, None, self.chunk, 1.0, norm)
        return self.out_proj(o.reshape(b, t, heads * values))


def mla():
    angles = torch.randn(5, 2).repeat(1, 2)
    return MLA(), (torch.randn(3, 5, 24), angles.cos(), angles.sin())


def experts(body, **kwargs):
    return MoE(body, **kwargs), (torch.randn(TOKENS, DIM),)


IDIOMS = {
    "down_norm_up": mla,
    "mla_rope_q": mla,
    "mla_rope_kv": mla,
    "moe": lambda: experts(where_index_add),
    "moe, stacked": lambda: experts(stacked_weights, stacked=True),
    "rope_qk": lambda: rope.build(rope.rotated_heads),
    "norm_linear": lambda: norm.build(norm.qkv),
    "causal_conv1d": lambda: conv.build(conv.hf_mamba2),
    "gated_rms_norm": lambda: gated.build(gated.hf_mamba2),
    "ssd_scan": lambda: (Scan(scans.one_triangle), (torch.randn(2, 12, 10),)),
    "gated_delta_rule": lambda: (Delta(CHUNKED["solved_to_an_inverse"]), (torch.randn(2, 8, 10),)),
    "hyper_connection": lambda: streams.build(streams.deepseek_v4),
    "stream_update": lambda: streams.build(streams.deepseek_v4),
    "linear": lambda: (fp8.MLP(), fp8.hidden()),
    "compressed_linear": lambda: (compressed.Block(), compressed.hidden()),
}


FLOAT8 = PrecisionPlan((("*", "fp8_current"),), gate=False)


def trained(call, module, inputs):
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    output = call(*inputs)
    return output, torch.autograd.grad(output.float().sum(), wanted, allow_unused=True)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in IDIOMS), ("moe", True), ("rope_qk", True)])
def test_fires_and_is_empty(name, dynamic, no_kernels, monkeypatch):
    monkeypatch.setattr(linear, "no_float8", lambda device: "")
    torch._dynamo.reset()
    module, (x, *others) = IDIOMS[name]()
    options = {
        "linear": {"precision": FLOAT8}, "hyper_connection": {"passes": streams.ON.passes},
        "stream_update": {"passes": streams.ON.passes}, "norm_linear": {"passes": {"norm_linear": True}},
        "compressed_linear": {"compress": {"names": "*"}},
    }.get(name)  # fmt: skip
    compiled = torch.compile(module, backend="megacpp", options=options, dynamic=dynamic)
    empty = x.detach()[:0].requires_grad_()
    with megacpp_compile.record() as report:
        if dynamic:
            compiled(x, *others)  # the artifact of other sizes may serve, too
        got = trained(compiled, module, (empty, *others))
    assert report.counts[name.partition(",")[0]], report.misses
    want = trained(module, module, (empty, *others))
    assert got[0].shape == want[0].shape and got[0].dtype == want[0].dtype and not got[0].numel()
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
