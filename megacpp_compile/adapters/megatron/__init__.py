"""Megatron-Core's MLA models under this backend. Megatron is optional: it is imported when something of it is built.

    from megacpp_compile.adapters import megatron

    print(megatron.plain_mla(model))
    model = torch.compile(model, backend="megacpp")
"""

from megacpp_compile.adapters.megatron.block import MegatronBlock, block_class, block_config
from megacpp_compile.adapters.megatron.layout import LayerLayout, LayoutRow, layer_layout
from megacpp_compile.adapters.megatron.plain import PlainRow, PlainTable, plain_mla
from megacpp_compile.adapters.megatron.self_attention import adapter
from megacpp_compile.adapters.megatron.specs import AdaptedSpec, adapt_spec, attention_layer_spec

__all__ = [
    "AdaptedSpec", "LayerLayout", "LayoutRow", "MegatronBlock", "PlainRow", "PlainTable", "adapt_spec", "adapter",
    "attention_layer_spec", "block_class", "block_config", "layer_layout", "plain_mla",
]  # fmt: skip
