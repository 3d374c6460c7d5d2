"""Adapters of Megatron's MLA classes, specs rewritten with them, and the builder, on stand-ins."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import sys

import pytest
import torch
from torch import nn

from megacpp_compile.adapters.megatron import adapt_spec, adapter, attention_layer_spec, layer_layout, plain_mla
from megacpp_compile.adapters.megatron.self_attention import adapter_of
from megacpp_compile.errors import AbsorbedInTrainingError, AdapterError, PackageMissingError

from . import fake_megatron as fake


class Fused(fake.MLASelfAttention):
    """As newer releases: it takes the offset."""

    def __init__(self, config, submodules=None, layer_number=1, attn_mask_type=None, pp_layer_offset=None, **kwargs):
        super().__init__(config, submodules, layer_number)
        self.offset = pp_layer_offset
        self.rotary_pos_emb = nn.Identity()


Fused.__name__ = "FusedMLASelfAttention"
Absorbed = type("AbsorbedMLASelfAttention", (fake.MLASelfAttention,), {})
ABSORBED = {"transformer.experimental_attention_variant.absorbed_mla": {"AbsorbedMLASelfAttention": Absorbed}}
PARTS = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp", "mlp_bda")
Identity, IdentityFunction = type("IdentityOp", (), {}), type("IdentityFuncOp", (), {})
LayerSubmodules = dataclasses.make_dataclass("LayerSubmodules", [(name, object, None) for name in PARTS])


def te_spec(qk_layernorm=None, multi_latent_attention=None, qk_l2_norm=None, use_te_op_fuser=None, use_kitchen=None,
            use_kitchen_attention=None, kitchen_attention_backend=None, use_te_activation_func=None,
            mla_down_proj_fusion=None):  # fmt: skip
    attention = fake.ModuleSpec(fake.MLASelfAttention, {"given": dict(locals())}, object())
    return fake.ModuleSpec(fake.TransformerLayer, {}, LayerSubmodules("norm", attention, "norm", "mlp", "bda"))


def inference_spec(qk_layernorm=None, multi_latent_attention=None, qk_l2_norm=None):
    return te_spec(qk_layernorm, multi_latent_attention, qk_l2_norm)


def sparse_spec(config, backend):
    return fake.ModuleSpec(fake.MLASelfAttention, {"config": config, "backend": backend})


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    fake.install(monkeypatch, **{
        "transformer.multi_latent_attention": {"FusedMLASelfAttention": Fused},
        "transformer.identity_op": {"IdentityOp": Identity, "IdentityFuncOp": IdentityFunction},
        "models.gpt.gpt_layer_specs": {
            "get_gpt_layer_with_transformer_engine_spec": te_spec, "get_gpt_layer_with_inference_spec": inference_spec,
            "get_gpt_layer_local_spec": te_spec,
        },
        "models.gpt.experimental_attention_variant_module_specs": {"get_dsa_module_spec_for_backend": sparse_spec},
        "models.backends": {"LocalSpecProvider": dict},
    })  # fmt: skip


def made(cls, **kwargs):
    torch.manual_seed(0)
    return cls(fake.Config(), None, 1, **kwargs)


def test_the_offset_is_handed_on_where_it_is_taken_and_else_dropped(caplog):
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        assert made(adapter("FusedMLASelfAttention"), pp_layer_offset=6).offset == 6
    assert "pp_layer_offset=6 handed on" in caplog.text and made(adapter("FusedMLASelfAttention")).offset is None
    caplog.clear()
    for _ in range(2):
        made(adapter("MLASelfAttention"), pp_layer_offset=6)
    made(adapter("MLASelfAttention"))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "takes no pp_layer_offset: it finds its place itself" in line


def test_an_adapter_is_its_base():
    cls = adapter("MLASelfAttention")
    assert cls is adapter("MLASelfAttention") and issubclass(cls, fake.MLASelfAttention)
    assert cls.__name__ == "AdaptedMLASelfAttention"
    mine, theirs, x = made(cls), made(fake.MLASelfAttention), torch.randn(5, 2, 32)
    assert list(mine.state_dict()) == list(theirs.state_dict()) and torch.equal(mine(x, None)[0], theirs(x, None)[0])


def test_rotary_tables_reach_only_a_layer_that_makes_none(caplog):
    attention, x = made(adapter("FusedMLASelfAttention")), torch.randn(5, 2, 32)
    want = attention(x, None)[0]
    assert torch.equal(attention(x, None, rotary_pos_emb=x, rotary_pos_cos=x)[0], want)
    assert torch.equal(attention(x, None, x)[0], want)  # in its place
    assert ["rotary_pos_emb is ignored" in r.getMessage() for r in caplog.records] == [True]
    attention, x = made(adapter("MLASelfAttention")), torch.randn(5, 2, 32)  # this stand-in holds no rotary module
    with pytest.raises(AssertionError):
        attention(x, None, rotary_pos_emb=x)


def test_absorbed_weights_do_not_train(monkeypatch):
    fake.install(monkeypatch, **ABSORBED)
    attention, x = made(adapter("AbsorbedMLASelfAttention")), torch.randn(5, 2, 32)
    attention.config.qk_pos_emb_head_dim = 8
    with pytest.raises(AbsorbedInTrainingError, match="24 channels and a value 16"):
        attention(x, None)
    with torch.no_grad():
        attention(x, None)
    attention.eval()(x, None)


def test_classes_without_an_adapter():
    with pytest.raises(PackageMissingError, match="the adapter of AbsorbedMLASelfAttention"):
        adapter("AbsorbedMLASelfAttention")
    with pytest.raises(AdapterError, match="Ask for one of MLASelfAttention"):
        adapter("SelfAttention")
    class Changed(nn.Module):
        def __init__(self, configuration):
            super().__init__()

    with pytest.raises(AdapterError, match="takes no config, submodules, layer_number"):
        adapter_of(Changed)


def test_without_megatron(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(PackageMissingError, match="megatron-core"):
        adapter("MLASelfAttention")
    with pytest.raises(PackageMissingError, match="megatron-core"):
        attention_layer_spec()
    assert not plain_mla(nn.Linear(2, 2)).rows and not adapt_spec(fake.ModuleSpec(nn.Linear)).replaced


def test_a_spec_is_rewritten_in_place(caplog):
    spec = te_spec()
    attention = spec.submodules.self_attention
    params, inner = attention.params, attention.submodules
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        done = adapt_spec(spec)
    assert done.spec is spec and spec.submodules.self_attention is attention
    assert attention.module is adapter("MLASelfAttention")
    assert attention.params is params and attention.submodules is inner
    assert done.replaced == ("self_attention: MLASelfAttention",) and done.replaced[0] in caplog.text
    before = copy.copy(attention)
    assert adapt_spec(spec).replaced == () and attention == before


def test_specs_of_blocks_and_names_and_of_others():
    spec = te_spec()
    spec.submodules.self_attention.module = ("megatron.core.transformer.multi_latent_attention", "MLASelfAttention")
    assert adapt_spec([spec, te_spec()]).replaced == ("0.self_attention: MLASelfAttention", "1.self_attention: MLASelfAttention")
    assert adapt_spec(te_spec().submodules.self_attention).replaced == ("the spec: MLASelfAttention",)
    class Own(fake.MLASelfAttention):
        pass

    for module in (Own, nn.Linear, ("no.such.module", "X")):
        spec = fake.ModuleSpec(fake.TransformerLayer, {}, LayerSubmodules(self_attention=fake.ModuleSpec(module)))
        assert adapt_spec(spec).replaced == () and spec.submodules.self_attention.module is module


def test_every_option_is_passed_through():
    given = {name: object() for name in inspect.signature(te_spec).parameters}
    spec = attention_layer_spec(**given)
    assert spec.submodules.self_attention.params["given"] == given
    assert spec.submodules.self_attention.module is adapter("MLASelfAttention")
    assert spec.submodules.input_layernorm == "norm"
    assert spec.submodules.mlp is spec.submodules.pre_mlp_layernorm is Identity
    assert spec.submodules.mlp_bda.__name__ == "IdentityFuncOp"
    assert attention_layer_spec(adapt=False).submodules.self_attention.module is fake.MLASelfAttention


def test_each_implementation_has_its_builder_and_what_it_cannot_build_is_an_error(monkeypatch):
    spec = attention_layer_spec("inference_optimized", qk_l2_norm=3)
    assert spec.submodules.self_attention.params["given"]["qk_l2_norm"] == 3
    with pytest.raises(AdapterError, match="Choose of transformer_engine, inference_optimized, local"):
        attention_layer_spec("te")
    with pytest.raises(AdapterError, match="with use_kitchen, new_option: "):
        attention_layer_spec("inference_optimized", qk_layernorm=True, use_kitchen=False, new_option=1)
    def unbuildable(**options):
        raise NameError("TESpecProvider is not defined")

    specs = sys.modules["megatron.core.models.gpt.gpt_layer_specs"]
    monkeypatch.setattr(specs, "get_gpt_layer_with_transformer_engine_spec", unbuildable)
    with pytest.raises(AdapterError, match="'transformer_engine': NameError: TESpecProvider is not defined"):
        attention_layer_spec()


def test_sparse_attention_is_made_for_a_configuration_and_by_a_layout():
    config = object()
    spec = attention_layer_spec("local", sparse=True, config=config)
    assert spec.submodules.self_attention.params == {"config": config, "backend": {}}
    assert spec.submodules.self_attention.module is adapter("MLASelfAttention")
    with pytest.raises(AdapterError, match="Give config="):
        attention_layer_spec("local", sparse=True)
    dense = attention_layer_spec("local", multi_latent_attention=True)
    sparse = attention_layer_spec("local", sparse=True, config=config, multi_latent_attention=True)
    found = layer_layout("AMD", mtp_layers=1).specs({"A": dense, "D": sparse, "M": None})
    assert found == [dense, None, sparse, dense]
    assert [s.submodules.self_attention.module for s in (dense, sparse)] == [adapter("MLASelfAttention")] * 2
