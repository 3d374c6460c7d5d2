"""Other libraries' models under this backend: Megatron-Core's layers, and blocks built from Transformer Engine's."""
