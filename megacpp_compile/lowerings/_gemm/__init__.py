"""GEMMs as lowerings and backends use them; no semantic op lives here.

autotune        large half-precision GEMMs of a graph become `megacpp::tuned_mm`
cublaslt        the GEMM behind it: cuBLASLt's candidates timed once a shape, through the C API
operands        what a GEMM is tried on
block_scaled    `megacpp::block_scaled_mm`: fp8 with a scale for every block of 128
float8_support  which devices have which float8 GEMMs, and why others have not
outer_products  GEMMs over one channel as multiplications
shared_input    GEMMs that share an operand fused into one (`fuse_shared_input_gemms`)
"""
