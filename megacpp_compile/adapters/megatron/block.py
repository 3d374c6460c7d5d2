"""Megatron's own transformer layer as a model's block, opt-in, with the fusions it has; the plain block without it.

This is Megatron's computation in Megatron's kernels, which compilation leaves alone; `plain_mla` is the other way
about, and does not go with the fusions of `block_config`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacpp_compile.adapters.megatron import installed
from megacpp_compile.errors import AdapterError
from megacpp_compile.precision.replace import check_user_buffers
from megacpp_compile.report import log

_TRANSFORMER = "megatron.core.transformer."
_SPECS = "megatron.core.models.gpt.gpt_layer_specs."
# What `block_config` sets: Megatron's fused masked softmax, persistent layer norm, softmax in the activations' dtype,
# fused RoPE, and weight gradients added to main_grad in the GEMM.
FUSIONS = {
    "masked_softmax_fusion": True,
    "persist_layer_norm": True,
    "attention_softmax_in_fp32": False,
    "apply_rope_fusion": True,
    "gradient_accumulation_fusion": True,
}


def block_config(**fields: Any) -> Any:
    """Megatron's `TransformerConfig` with `fields` and exactly the five settings of `FUSIONS`.

    Raises AdapterError for a field that `FUSIONS` sets otherwise; EngineError for `tp_comm_overlap` before Transformer
    Engine's user buffers are initialised, which has to happen before the model is built; PackageMissingError without
    Megatron; and what its own checks raise where a fusion's library is missing.
    """
    other = next((name for name, value in FUSIONS.items() if fields.get(name, value) != value), None)
    if other is not None:
        reason = f"{other}={fields[other]!r} is asked for, and this configuration sets {FUSIONS[other]!r}"
        raise AdapterError("block_config", reason, "Make a TransformerConfig of Megatron's yourself.")
    if fields.get("tp_comm_overlap"):
        check_user_buffers()
    config = installed.load(_TRANSFORMER + "transformer_config.TransformerConfig", "block_config")
    return config(**{**fields, **FUSIONS})


class MegatronBlock(nn.Module):
    """Megatron's `TransformerLayer` with the constructor (config, layer_idx) and the forward of a plain block.

    config: of `block_config`, or any `TransformerConfig`. layer_idx: from 0. spec: a layer spec of Megatron's; its own
    by default, of Transformer Engine where that can be used. Hidden states are [b, s, hidden] in and out.
    """

    def __init__(self, config: Any, layer_idx: int, spec: Any = None) -> None:
        super().__init__()
        build = installed.load(_TRANSFORMER + "spec_utils.build_module", "MegatronBlock")
        self.layer = build(_own_spec(config) if spec is None else spec, config=config, layer_number=layer_idx + 1)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """attention_mask, kwargs: as Megatron's layer takes them, `rotary_pos_emb` among them."""
        out = self.layer(hidden_states=x.transpose(0, 1).contiguous(), attention_mask=attention_mask, **kwargs)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


def _own_spec(config: Any) -> Any:
    more = {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": config.multi_latent_attention}
    if torch.cuda.is_available():
        engine = installed.try_load(_SPECS + "get_gpt_layer_with_transformer_engine_spec")
        try:
            return engine(**more)
        except Exception as error:  # Megatron is there without Transformer Engine
            log.logger.info("MegatronBlock without Transformer Engine: %s: %s", type(error).__name__, error)
    local = installed.load(_SPECS + "get_gpt_layer_local_spec", "MegatronBlock")
    return local(normalization=config.normalization, **more)


def block_class(plain: type[nn.Module], *, megatron: bool = False) -> type[nn.Module]:
    """The class that a model builds its blocks of: `MegatronBlock` where `megatron` asks for it and Megatron can be
    imported, `plain` else, with one line in the log that says which and why."""
    why = "not asked for"
    if megatron:
        found = installed.try_load(_TRANSFORMER + "transformer_layer.TransformerLayer")
        why = found if isinstance(found, str) else ""
    if why:
        log.logger.info("blocks: %s (Megatron's: %s)", plain.__name__, why)
        return plain
    log.logger.info("blocks: Megatron-Core %s's TransformerLayer", installed.version())
    return MegatronBlock
