"""Matrix products on CUDA: which cuBLAS kernel serves them, and sums of them in one pass."""
