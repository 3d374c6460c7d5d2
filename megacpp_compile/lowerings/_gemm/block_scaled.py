"""`megacpp::block_scaled_mm`: a GEMM of fp8 payloads with a scale for every 128 channels of the contraction.

cuBLASLt has it on Hopper from CUDA 12.9 on; torch calls it through `_scaled_mm`, which infers the recipe from the
scales' shapes and strides. An op of its own, because torch 2.9's `_scaled_mm` on fake tensors knows scales by tensor
and by row only. Facts: ATen/native/cuda/ScaledBlas.cpp, `is_blockwise_1x128_scaling` and
`is_blockwise_128x128_scaling`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megacpp_compile._torch import ops
from megacpp_compile._torch.dispatch import disable_current_modes
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.lowerings._traits import OpTraits, declare

# Later versions of torch want scales of squares at a stride that is a multiple of four, earlier ones without a gap:
# where the contraction has a multiple of four squares both hold.
_BOTH = 4 * SCALE_BLOCK


@torch.library.custom_op("megacpp::block_scaled_mm", mutates_args=())
def block_scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b.T in `out_dtype` [m, n]. a: [m, k]; b: [n, k], both fp8, k adjacent, all sizes multiples of 128. a_scale:
    [k / 128, m] float32; b_scale: [k / 128, n], or [n / 128, k / 128] for squares, with k a multiple of 512."""
    squares = b_scale.shape != (a.shape[1] // SCALE_BLOCK, b.shape[0])
    right = b_scale.contiguous().t() if squares else b_scale.contiguous()
    a, b = a.contiguous(), b.contiguous()
    return ops.scaled_mm(a, b.t(), a_scale.contiguous().t(), right, out_dtype=out_dtype, use_fast_accum=False)


@block_scaled_mm.register_fake
def _(a, a_scale, b, b_scale, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


declare({"megacpp::block_scaled_mm": OpTraits(gemm=True)})


def by_squares(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b.T with b_scale for squares [n / 128, k / 128] and any k: where torch's versions disagree about the strides
    of such scales, they are repeated for every row."""
    if a.shape[1] % _BOTH:
        b_scale = b_scale.t().repeat_interleave(SCALE_BLOCK, 1)
    return torch.ops.megacpp.block_scaled_mm(a, a_scale, b, b_scale, out_dtype)


@functools.cache
def failing(device: torch.device) -> str:
    """Why block-scaled GEMMs cannot be used on `device`, "" where they can.

    Both kinds are tried once on small operands: no version number says which strides a build of torch takes, and which
    scales cuBLASLt.
    """
    with disable_current_modes(), torch.no_grad():
        try:
            off = max(_error(device, squares) for squares in (True, False))
        except RuntimeError as error:
            said = (str(error).strip() or "RuntimeError").splitlines()[0]
            return f"GEMMs with block scales fail here: {said[:160]}"
    return "" if off < 1e-2 else f"GEMMs with block scales come out wrong here, by {off:.1e}"


def _error(device: torch.device, squares: bool) -> float:
    """The relative error of a small GEMM against float32."""
    m, n, k = SCALE_BLOCK, 2 * SCALE_BLOCK, _BOTH

    def waves(*shape: int) -> Tensor:
        return torch.arange(shape[0] * shape[1], device=device, dtype=torch.float32).mul(0.7).sin().reshape(shape)

    a, b = (waves(rows, k).mul(100).to(torch.float8_e4m3fn) for rows in (m, n))
    a_scale = waves(k // SCALE_BLOCK, m) + 2
    b_scale = waves(*((n // SCALE_BLOCK, k // SCALE_BLOCK) if squares else (k // SCALE_BLOCK, n))) + 2
    got = block_scaled_mm(a, a_scale, b, b_scale, torch.bfloat16).float()
    rows_of_b = b_scale.t().repeat_interleave(SCALE_BLOCK, 1) if squares else b_scale
    wide = [t.float() * s.t().repeat_interleave(SCALE_BLOCK, 1) for t, s in ((a, a_scale), (b, rows_of_b))]
    want = wide[0] @ wide[1].t()
    return float((got - want).norm() / want.norm())
