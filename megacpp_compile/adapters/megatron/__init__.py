"""Megatron-Core's MLA models under this backend. Megatron is optional: it is imported when something of it is built.

    from megacpp_compile.adapters import megatron

    print(megatron.plain_mla(model))
    model = torch.compile(model, backend="megacpp")
"""

from megacpp_compile.adapters.megatron.plain import PlainRow, PlainTable, plain_mla

__all__ = ["PlainRow", "PlainTable", "plain_mla"]
