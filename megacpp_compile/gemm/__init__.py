"""Matrix products on CUDA: which cuBLAS kernel serves them, and products that share an operand as one."""
