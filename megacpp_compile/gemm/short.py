"""`megacpp::short_mm`: a matrix product with a short contraction and a large result, as MLA's latents make them.

Such a product writes about as long as it multiplies, and cuBLASLt's heuristic misjudges it; `cublaslt` chooses by
measurement. Lowerings use it for the products they know to be of this kind; all others stay `aten.mm` for Inductor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.gemm import cublaslt

# Contractions up to which torch's choice was seen to lose (H200, cuBLAS 13.0), and bytes of the result from which
# the gain exceeds the cost of a call outside Inductor's own.
MAX_CONTRACTION = 1024
MIN_BYTES = 16 << 20


@torch.library.custom_op("megacpp::short_mm", mutates_args=())
def short_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` by the fastest of cuBLASLt's kernels. a: [m, k]; b: [k, n]; one half-precision dtype."""
    return cublaslt.mm(a, b)


@short_mm.register_fake
def _(a, b):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]))


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` by `short_mm` where that can pay and nobody else is to choose the kernel, else by `aten.mm`."""
    from torch._inductor import config

    m, k, n = *a.shape, b.shape[1]
    sizes_known = all(isinstance(i, int) for i in (m, k, n))
    half = a.dtype in (torch.float16, torch.bfloat16) and a.dtype == b.dtype
    if not sizes_known or not half or k > MAX_CONTRACTION or m * n * 2 < MIN_BYTES:
        return a @ b
    if config.max_autotune or config.max_autotune_gemm or a.device.type != "cuda":
        return a @ b
    return torch.ops.megacpp.short_mm(a, b)
