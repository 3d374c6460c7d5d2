"""The attention block of the layer spec: what it computes, in every mixture of classes, and that it fuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm

import megacpp_compile
from megacpp_compile import NativeLayerSpec, te_layer_spec
from megacpp_compile.adapters import AttentionBlock
from megacpp_compile.errors import AdapterError
from megacpp_compile.sharding import constructing

NAMES = ["linear_qkv.layer_norm_weight", "linear_proj.weight", "linear_qkv.weight"]


def made(spec, **more):
    torch.manual_seed(0)
    block = AttentionBlock(spec, 24, 4, **{"num_gqa_groups": 2, "kv_channels": 8, "device": "cpu", **more})
    with torch.no_grad():
        for p in block.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return block


def inputs(rotated=8, dtype=torch.float32):
    x = torch.randn(2, 5, 24, dtype=dtype, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(torch.arange(5, dtype=dtype), 10.0 ** -torch.arange(rotated // 2, dtype=dtype))
    angles = torch.cat((angles, angles), -1)
    return x, angles.cos(), angles.sin()


def by_hand(block, x, cos, sin):
    """The definition, a head at a time, with rotations as complex numbers."""
    qkv = linear(rms_norm(x, (24,), block.linear_qkv.layer_norm_weight, 1e-5), block.linear_qkv.weight)
    turns, half = torch.complex(cos, sin)[:, : cos.shape[-1] // 2], cos.shape[-1] // 2

    def turned(t):
        z = torch.complex(t[..., :half], t[..., half : 2 * half]) * turns
        return torch.cat((z.real, z.imag, t[..., 2 * half :]), -1)

    heads = []
    for head in range(4):
        group, q = head // 2, turned(qkv[..., head * 8 : head * 8 + 8])
        k = turned(qkv[..., 32 + group * 8 : 40 + group * 8])
        v = qkv[..., 48 + group * 8 : 56 + group * 8]
        scores = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v)
    return x + linear(torch.cat(heads, -1), block.linear_proj.weight)


@pytest.mark.parametrize("rotated", [8, 4])
def test_what_it_computes(rotated):
    block = made(NativeLayerSpec(), params_dtype=torch.float64)
    given = inputs(rotated, torch.float64)
    torch.testing.assert_close(block(*given), by_hand(block, *given))
    assert sorted(dict(block.named_parameters())) == sorted(NAMES)


@pytest.mark.parametrize("native", [(), ("attention",), ("linear_qkv", "attention"), ("linear_proj",)])
def test_every_mixture_is_the_same_block(te, native):
    """In bfloat16 within its rounding of float32's, where it is Transformer Engine itself."""
    spec = te_layer_spec()
    for key in (*native, *([] if te.real else ["attention"])):  # the stand-in's attends to nothing
        spec[key] = NativeLayerSpec()[key]
    block, plain = (made(s, params_dtype=te.dtype, device=te.device) for s in (spec, NativeLayerSpec()))
    assert not any(plain.load_state_dict(block.state_dict(), strict=False).missing_keys)
    given = [t.to(te.device, te.dtype) for t in inputs()]
    bound = 2e-2 if te.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(block(*given), plain(*given), atol=bound, rtol=bound)


@pytest.mark.end_to_end
def test_it_fuses(no_kernels):
    block, given = made(NativeLayerSpec()), inputs()
    want = torch.autograd.grad(block(*given).square().sum(), list(block.parameters()))
    with megacpp_compile.record() as report:
        out = torch.compile(block, backend="megacpp")(*given)
    got = torch.autograd.grad(out.square().sum(), list(block.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert report.counts["rope_qk"] == 1


def test_a_spec_without_a_class_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AdapterError, match="without linear_qkv: no CUDA device"):
        AttentionBlock(te_layer_spec(), 24, 4)
    with pytest.raises(AdapterError, match="without attention: there is none"):
        AttentionBlock({**NativeLayerSpec(), "attention": None}, 24, 4)
    for more in ({"num_gqa_groups": 3}, {"num_heads": 5}):
        with pytest.raises(AdapterError, match="do not divide"):
            AttentionBlock(**{"spec": NativeLayerSpec(), "hidden": 24, "num_heads": 4, **more})


def test_parameters_are_pinned_as_they_are_made(monkeypatch):
    """On XLA; what is pinned, and by which name, is told without it."""
    pinned = []
    monkeypatch.setattr("megacpp_compile.precision.native.constructed", lambda name, p: pinned.append((name, p.shape)))
    AttentionBlock(NativeLayerSpec(), 24, 4)
    assert ("weight", (72, 24)) in pinned and ("weight", (24, 24)) in pinned and len(pinned) == 3
    assert callable(constructing)
