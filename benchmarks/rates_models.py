"""Released mixtures of experts by their configurations, cut to some of their layers, and their model FLOPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True)
class Released:
    """A model by its configuration. published: TFLOP/s of a GPU elsewhere, with all layers, on eight H100s."""

    name: str
    type: str
    given: dict[str, Any]
    pattern: str  # a letter for each layer, the first of which are built; see `KINDS`
    layers: int  # how many of them
    batch: int  # sequences of a rank
    toy: dict[str, Any]
    published: int


KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "w": "sliding_attention"}
_TOY = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "qwen3_moe": Released(
        "Qwen3-30B-A3B", "qwen3_moe",
        {"head_dim": 128, "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "*" * 48, 8, 4, _TOY | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}, 277,
    ),
    "nemotron_h": Released(
        "Nemotron-3-Nano-30B-A3B", "nemotron_h",
        {"hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64, "intermediate_size": 1856,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128,
         "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "max_position_embeddings": 262144},
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 7, 2,
        _TOY | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
                "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 8,
                "num_experts_per_tok": 2}, 328,
    ),
    "gpt_oss": Released(
        "GPT-OSS-20B", "gpt_oss", {"num_local_experts": 32}, "w*" * 12, 4, 2,
        _TOY | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}, 279,
    ),
}  # fmt: skip


def configuration(model: Released, layers: int, quick: bool) -> Any:
    import transformers

    kinds = [KINDS[letter] for letter in model.pattern[:layers]]
    named: dict[str, Any] = (
        {"layers_block_type": kinds} if model.type == "nemotron_h" else {"num_hidden_layers": layers}
    )
    if model.type == "gpt_oss":
        named["layer_types"] = kinds
    given = model.given | (model.toy if quick else {}) | named
    return transformers.AutoConfig.for_model(model.type, use_cache=False, **given)


def flops_a_token(model: nn.Module, kinds: Sequence[str], tokens: int) -> dict[str, float]:
    """Of forward and backward; kinds: of the layers, as in `KINDS`."""
    config: Any = model.config
    lookup = set(model.get_input_embeddings().parameters())  # type: ignore[operator]
    share = config.num_experts_per_tok / config.num_local_experts
    counts = {name: p.numel() for name, p in model.named_parameters() if p not in lookup}
    active = sum(count * (share if ".experts." in name else 1) for name, count in counts.items())
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator]
    window = getattr(config, "sliding_window", None) or tokens
    keys = {"full_attention": tokens / 2, "sliding_attention": window * (1 - min(window / tokens, 1) / 2)}
    seen = sum(keys.get(kind, 0) for kind in kinds)
    attention = 12 * seen * config.num_attention_heads * config.head_dim
    return {"layers": 6 * (active - head), "head": 6 * head, "attention": attention, "all": 6 * active + attention}
