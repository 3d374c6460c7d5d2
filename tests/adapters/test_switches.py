"""The line at start-up, and Megatron's own layer as a block."""

from __future__ import annotations

import dataclasses
import logging
import sys

import pytest
import torch
from torch import nn

from megacpp_compile.adapters import announce_switches
from megacpp_compile.adapters.megatron import MegatronBlock, block_class, block_config
from megacpp_compile.adapters.megatron.block import FUSIONS
from megacpp_compile.errors import AdapterError, EngineError, PackageMissingError

from . import fake_megatron as fake

MODEL = nn.ParameterList([torch.zeros(4)])


def line(caplog):
    return next(r.getMessage() for r in caplog.records if r.getMessage().startswith("switches: "))


def announced(target="cuda"):
    return announce_switches(MODEL, te_layers=True, te_linears=True, precision="fp8_current", target=target)


def test_all_are_on(stand_in, caplog):
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        found = announced()
    assert [s.active for s in found] == [True] * 3
    assert line(caplog) == (
        "switches: block layers by Transformer Engine: on; linears by Transformer Engine: on; fp8 plan: on"
    )


@pytest.mark.parametrize("target", ["auto", "tpu"])
def test_none_is_on_elsewhere(stand_in, caplog, target):
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        found = announced(target)
    assert not any(s.active for s in found)
    assert line(caplog).count(f"off (target {'cpu' if target == 'auto' else 'tpu'}: no float8 here)") == 3


def test_what_is_not_asked_for_and_why_one_alone_is_off(stand_in, monkeypatch):
    found = announce_switches(MODEL, precision="bf16", target="cuda")
    assert [str(s).partition(": ")[2] for s in found] == ["off, not asked for"] * 3
    monkeypatch.delattr(stand_in, "DotProductAttention")
    layers, linears, plan = announced()
    assert not layers.active and layers.why.startswith("attention: ") and linears.active and plan.active


def test_without_transformer_engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [s.why for s in announced()] == ["no CUDA device"] * 3


@dataclasses.dataclass
class TransformerConfig(fake.Config):
    masked_softmax_fusion: bool = False
    persist_layer_norm: bool = False
    attention_softmax_in_fp32: bool = True
    tp_comm_overlap: bool = False
    qk_layernorm: bool = True
    multi_latent_attention: bool = True
    normalization: str = "RMSNorm"


class Layer(nn.Module):
    def __init__(self, config, layer_number, options):
        super().__init__()
        self.layer_number, self.options = layer_number, options
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None):
        assert hidden_states.is_contiguous()
        return hidden_states.cumsum(0) * self.weight, None


@pytest.fixture
def megatron(monkeypatch):
    fake.install(monkeypatch, **{
        "transformer.transformer_config": {"TransformerConfig": TransformerConfig},
        "transformer.spec_utils": {"build_module": lambda spec, **given: Layer(options=spec, **given)},
        "models.gpt.gpt_layer_specs": {"get_gpt_layer_local_spec": lambda **options: options},
    })


def test_the_configuration_sets_five_fusions(megatron):
    made, plain = block_config(hidden_size=16), TransformerConfig(hidden_size=16)
    changed = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if getattr(made, f.name) != getattr(plain, f.name)}
    assert changed == FUSIONS and len(FUSIONS) == 5
    with pytest.raises(AdapterError, match="attention_softmax_in_fp32=True is asked for"):
        block_config(attention_softmax_in_fp32=True)


def test_overlap_waits_for_user_buffers(megatron, stand_in, state):
    with pytest.raises(EngineError, match="initialize_ub"):
        block_config(tp_comm_overlap=True)
    state.user_buffers = True
    assert block_config(tp_comm_overlap=True).tp_comm_overlap


def test_a_block_of_megatron(megatron, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        assert block_class(nn.Linear, megatron=True) is MegatronBlock
    assert "blocks: Megatron-Core" in caplog.text
    block, x = MegatronBlock(block_config(hidden_size=4), 2), torch.randn(3, 5, 4)
    assert block.layer.layer_number == 3
    assert block.layer.options == {"normalization": "RMSNorm", "qk_layernorm": True, "multi_latent_attention": True}
    torch.testing.assert_close(block(x), x.cumsum(1))


def test_the_plain_block_without_megatron(monkeypatch, caplog):
    for name in {"megatron", *(n for n in sys.modules if n.startswith("megatron."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        assert block_class(nn.Linear, megatron=True) is nn.Linear and block_class(nn.Linear) is nn.Linear
    first, second = [r.getMessage() for r in caplog.records]
    assert first.startswith("blocks: Linear (Megatron's: ModuleNotFoundError") and "not asked for" in second
    with pytest.raises(PackageMissingError):
        block_config()
