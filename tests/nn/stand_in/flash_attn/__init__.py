"""A stand-in for the package flash-attn-4, whose kernels need a GPU: the same functions in plain PyTorch."""
