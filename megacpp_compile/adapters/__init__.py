"""Other libraries' models under this backend: Megatron-Core's layers, and blocks built from Transformer Engine's."""

from megacpp_compile.adapters.attention_block import AttentionBlock
from megacpp_compile.adapters.switches import Switch, announce_switches

__all__ = ["AttentionBlock", "Switch", "announce_switches"]
