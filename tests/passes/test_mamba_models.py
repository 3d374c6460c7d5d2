"""transformers' models of Mamba-1, tiny: every scan fires, as a loop over tokens and as the associative scan that a
compiled model takes, and results and gradients stay eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.frames import check, run

from .conditions import sampled

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 64, "hidden_size": 16}
OWN = {**SMALL, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}
HYBRID = {**SMALL, "intermediate_size": 24, "num_attention_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
          "use_mamba_kernels": False}  # fmt: skip
# name -> (options, scans). Each of Zamba's heads is a scan of its own, always by a loop.
MODELS = {
    "Mamba": (OWN, 2), "FalconMamba": (OWN, 2),
    "Jamba": ({**HYBRID, "num_hidden_layers": 3, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1,
               "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 3, "attn_layer_offset": 1}, 2),
    "Zamba": ({**HYBRID, "num_hidden_layers": 4, "num_key_value_heads": 2, "n_mamba_heads": 2, "attn_layer_period": 2,
               "attn_layer_offset": 1, "layers_block_type": ["mamba", "hybrid"] * 2}, 8),
}  # fmt: skip


class Logits(nn.Module):
    def __init__(self, name: str, at_once: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**MODELS[name][0], use_associative_scan=at_once)
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def ids():
    return (torch.randint(0, 64, (2, 7)),)


def fired(frames, name, at_once):
    by_loop = name == "Zamba" or not at_once
    return frames.counts["token_loop" if by_loop else "selective_scan"] == MODELS[name][1], frames.misses


@pytest.mark.end_to_end
@sampled(3, "at_once", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_scan(name, at_once):
    frames = check(Logits(name, at_once), ids())
    every, misses = fired(frames, name, at_once)
    assert every and not [m for m in misses if m.pass_name in ("token_loop", "selective_scan")], misses
    assert len(frames.graphs) == 1


@pytest.mark.end_to_end
@sampled(4, "at_once", [False, True])
@pytest.mark.parametrize("name", ["Mamba", "Jamba"])
def test_in_bfloat16(name, at_once):
    every, misses = fired(run(Logits(name, at_once).bfloat16(), ids()), name, at_once)
    assert every, misses
