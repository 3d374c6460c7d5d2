"""The seven classes, Transformer Engine's and plain ones, and that both take and compute the same."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, silu

from megacpp_compile import NativeLayerSpec, te_layer_spec
from megacpp_compile.errors import EngineError
from megacpp_compile.precision import engine
from megacpp_compile.precision.layer_spec import CLASSES
from megacpp_compile.precision.native import ACTIVATIONS, GATED

KEYS = ["norm", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "attention", "layernorm_mlp"]
F64 = {"params_dtype": torch.float64, "device": "cpu"}


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def spread(module):
    """Parameters that tell a gain from a one and a bias from a zero."""
    for i, p in enumerate(module.parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(i))
    return module


def test_seven_keys(te):
    spec = te_layer_spec()
    assert list(spec) == list(NativeLayerSpec()) == list(CLASSES) == KEYS
    assert {key: cls.__name__ for key, cls in spec.items()} == {
        "norm": "RMSNorm", "linear_qkv": "LayerNormLinear", "linear_proj": "Linear", "linear_fc1": "LayerNormLinear",
        "linear_fc2": "Linear", "attention": "DotProductAttention", "layernorm_mlp": "LayerNormMLP",
    }  # fmt: skip
    assert all(cls is getattr(te.module, cls.__name__) for cls in spec.values())
    assert set(spec.reasons.values()) == {""}


def test_none_where_there_is_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = te_layer_spec()
    assert dict(spec) == dict.fromkeys(KEYS) and spec.reasons == dict.fromkeys(KEYS, "no CUDA device")
    assert spec.or_native() == NativeLayerSpec() and spec.or_native().reasons == spec.reasons


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("No module named 'transformer_engine'"), ImportError("x.so: undefined symbol: _ZN3c10"),
     OSError("libcublas.so.13: cannot open shared object file"), AssertionError("Minimum torch version"),
     RuntimeError("")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_none_whatever_keeps_it_from_being_imported(monkeypatch, error):
    class Broken:
        def find_spec(self, name, *_):
            if name.startswith("transformer_engine"):
                raise error

    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(engine, "why_no_device", lambda: "")
    spec = te_layer_spec()
    assert dict(spec) == dict.fromkeys(KEYS)
    assert all(type(error).__name__ in reason and str(error) in reason for reason in spec.reasons.values())


def test_none_for_one_class_alone(stand_in, monkeypatch):
    monkeypatch.delattr(stand_in, "DotProductAttention")
    spec = te_layer_spec()
    assert [key for key, cls in spec.items() if cls is None] == ["attention"]
    assert "DotProductAttention" in spec.reasons["attention"] and spec.reasons["norm"] == ""
    assert spec.or_native()["attention"] is NativeLayerSpec()["attention"]
    assert spec.or_native()["linear_qkv"] is stand_in.LayerNormLinear


def test_not_asked_for_and_overlap_without_user_buffers(stand_in, state):
    assert dict(te_layer_spec(use_te=False)) == dict.fromkeys(KEYS)
    assert te_layer_spec(False).reasons["norm"] == "not asked for"
    with pytest.raises(EngineError, match="initialize_ub"):
        te_layer_spec(tp_comm_overlap=True)
    assert te_layer_spec(False, tp_comm_overlap=True)["norm"] is None
    state.user_buffers = True
    assert te_layer_spec(tp_comm_overlap=True)["norm"] is stand_in.RMSNorm


def parameters(function, without=()):
    return {n: p.default for n, p in inspect.signature(function).parameters.items() if n not in without}


@pytest.mark.parametrize("key", KEYS)
def test_signatures_are_transformer_engines(te, key):
    theirs, ours = te_layer_spec()[key], NativeLayerSpec()[key]
    assert parameters(ours.__init__, {"device"}) == parameters(theirs.__init__, {"device"})
    assert list(parameters(ours.__init__)) == list(parameters(theirs.__init__))
    if key != "norm":  # whose forward is that of an operation, with a hidden signature
        assert list(parameters(ours.forward)) == list(parameters(theirs.forward))


def test_norm_and_linear():
    x = draw(3, 8)
    for zero in (False, True):
        norm = spread(NativeLayerSpec()["norm"](8, eps=1e-3, zero_centered_gamma=zero, params_dtype=torch.float64))
        torch.testing.assert_close(norm(x), rms_norm(x, (8,), norm.weight + zero, 1e-3))
    assert NativeLayerSpec()["norm"](hidden_size=8).weight.tolist() == [1.0] * 8
    made, x = spread(NativeLayerSpec()["linear_proj"](8, 6, **F64)), draw(2, 3, 8)
    torch.testing.assert_close(made(x), linear(x, made.weight, made.bias))
    made.return_bias = True
    out, bias = made(x, is_first_microbatch=True)
    torch.testing.assert_close(out, linear(x, made.weight))
    assert bias is made.bias
    split = spread(NativeLayerSpec()["linear_proj"](8, 6, bias=False, parameters_split={"q_": 4, "k": 2}, **F64))
    assert [n for n, _ in split.named_parameters()] == ["q_weight", "k_weight"]
    torch.testing.assert_close(split(x), torch.cat((x @ split.q_weight.T, x @ split.k_weight.T), -1))
    with pytest.raises(ValueError, match="adds up to 5"):
        NativeLayerSpec()["linear_proj"](8, 6, parameters_split={"a": 5})


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_layer_norm_linear(normalization):
    x = draw(3, 8)
    made = spread(NativeLayerSpec()["linear_qkv"](8, 6, normalization=normalization, return_layernorm_output=True, **F64))
    if normalization == "RMSNorm":
        want = rms_norm(x, (8,), made.layer_norm_weight, 1e-5)
        assert "layer_norm_bias" not in made.state_dict() and made.layer_norm_bias is None
    else:
        want = layer_norm(x, (8,), made.layer_norm_weight, made.layer_norm_bias, 1e-5)
    out, normed = made(x)
    torch.testing.assert_close(normed, want)
    torch.testing.assert_close(out, linear(want, made.weight, made.bias))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_layer_norm_mlp(activation):
    made = spread(NativeLayerSpec()["layernorm_mlp"](8, 16, activation=activation, normalization="RMSNorm", **F64))
    x = draw(3, 8).requires_grad_()
    hidden = linear(rms_norm(x, (8,), made.layer_norm_weight, 1e-5), made.fc1_weight, made.fc1_bias)
    functions = {
        "gelu": lambda x: gelu(x, approximate="tanh"), "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
        "relu": lambda x: x.clamp(0), "srelu": lambda x: x.clamp(0) ** 2, "silu": silu, "sigmoid": torch.sigmoid,
    }  # fmt: skip
    if activation in GATED:
        assert hidden.shape[-1] == 32
        hidden = functions[GATED[activation]](hidden[..., :16]) * hidden[..., 16:]
    else:
        hidden = functions[activation](hidden)
    want = linear(hidden, made.fc2_weight, made.fc2_bias)
    for made.checkpoint in (False, True):
        (grad,) = torch.autograd.grad(made(x).square().sum(), x, retain_graph=True)
        torch.testing.assert_close(made(x), want)
        torch.testing.assert_close(grad, torch.autograd.grad(want.square().sum(), x, retain_graph=True)[0])


def attention(q, k, v, mask=None, scale=6**-0.5, bias=0.0, cap=None):
    """Attention in [b, s, h, d] by its definition; mask is true where nothing is attended to."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    found = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias
    found = found if cap is None else cap * (found / cap).tanh()
    weights = (found if mask is None else found.masked_fill(mask, float("-inf"))).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("kind", ["causal", "no_mask", "causal_bottom_right", "arbitrary"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention(layout, kind, groups):
    made = NativeLayerSpec()["attention"](4, (6, 5), groups, qkv_format=layout, attn_mask_type="no_mask")
    q, k, v = draw(2, 7, 4, 6), draw(2, 9, groups, 6), draw(2, 9, groups, 5)
    masks = {
        "causal": torch.ones(7, 9).triu(1), "causal_bottom_right": torch.ones(7, 9).triu(3),
        "no_mask": torch.zeros(7, 9), "arbitrary": (draw(7, 9) > 0.5).double(),
    }  # fmt: skip
    mask = masks[kind].bool()
    inputs = [t.transpose(0, 1) if layout == "sbhd" else t for t in (q, k, v)]
    given = {"attention_mask": mask} if kind == "arbitrary" else {}
    out = made(*inputs, attn_mask_type=kind, **given)
    torch.testing.assert_close(out.transpose(0, 1) if layout == "sbhd" else out, attention(q, k, v, mask))


def test_attention_with_a_cap_or_a_bias():
    q, k, v = draw(1, 5, 2, 6), draw(1, 5, 2, 6) * 2, draw(1, 5, 2, 6) * 3
    made = NativeLayerSpec()["attention"](2, 6, qkv_format="bshd", attn_mask_type="no_mask", softcap=0.7)
    torch.testing.assert_close(made(q, k, v), attention(q, k, v, cap=0.7))
    with pytest.raises(EngineError, match="softcap=0.7"):
        made(q, k, v, attn_mask_type="arbitrary", attention_mask=torch.zeros(5, 5).bool())
    made, bias = NativeLayerSpec()["attention"](2, 6, qkv_format="bshd", softmax_scale=0.5), draw(1, 2, 5, 5)
    out = made(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(out, attention(q, k, v, torch.ones(5, 5).triu(1).bool(), 0.5, bias))


@pytest.mark.parametrize(
    "make",
    [lambda s: s["linear_proj"](8, 8, tp_size=2), lambda s: s["linear_proj"](8, 8, fuse_wgrad_accumulation=True),
     lambda s: s["linear_qkv"](8, 8, tp_group=types.SimpleNamespace()),
     lambda s: s["layernorm_mlp"](8, 8, activation="clamped_swiglu"), lambda s: s["attention"](2, 8, qkv_format="thd"),
     lambda s: s["attention"](2, 8, attn_mask_type="padding_causal"),
     lambda s: s["attention"](2, 8, window_size=(128, 0)),
     lambda s: s["attention"](2, 8)(None, None, None, cu_seqlens_q=torch.zeros(3))],
    ids=range(8),
)  # fmt: skip
def test_what_plain_pytorch_has_not_is_refused(make):
    with pytest.raises(EngineError, match="native .*plain PyTorch has nothing of the kind"):
        make(NativeLayerSpec())


def test_plain_modules_begin_like_transformer_engines():
    torch.manual_seed(0)
    made = NativeLayerSpec()["linear_fc1"](256, 256, params_dtype=torch.bfloat16)
    assert made.weight.dtype == torch.bfloat16
    assert made.weight.float().std().item() == pytest.approx(0.023, rel=0.02) and abs(made.weight.float().mean()) < 1e-3
    assert made.bias.abs().max() == 0 and made.layer_norm_weight.eq(1).all() and made.layer_norm_bias.eq(0).all()
    assert NativeLayerSpec()["linear_fc2"](8, 8, device="meta").weight.device.type == "meta"
