"""`sparse_mla` and its backward on Hopper in Gluon, Triton's language of explicit layouts: specialised warps copy rows
while others multiply, and nothing is computed twice. `cuda_triton` serves what this does not.

Rows in fp8 are widened to the queries' dtype on their way into shared memory. With `fp8_gemms` they are multiplied
as they are: queries are rounded to e4m3 by their head's largest channel, and probabilities by the largest one so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from megacpp_compile.lowerings._kernels.triton_launch import last_dim_contiguous, strides
from megacpp_compile.lowerings.sparse_mla import _lists, cuda_triton
from megacpp_compile.lowerings.sparse_mla.cuda_triton import add_lists, aligned, in_order, no_launch, scale_steps
from megacpp_compile.report import log
from megacpp_compile.targets.chips import multiprocessors, on_hopper

try:
    from megacpp_compile.lowerings.sparse_mla import _gluon_attention as kernels
    from megacpp_compile.lowerings.sparse_mla import _gluon_backward as backward_kernels

    missing = ""
except (ImportError, AttributeError) as error:  # Gluon is experimental: what it has differs between releases
    missing = f"Triton {triton.__version__} has not all of Gluon that it takes: {error}"
# Likewise for the backward, which a release may not compile where it does the forward.
backward_missing = missing

__all__ = ["sparse_mla", "sparse_mla_backward", "supports"]

# A graph holds the op itself, which asks again when it runs: Inductor takes no kernels of Gluon.
TRACED = False
# Heads of a program, and rows of a tile. With half as many heads or fewer most of a GEMM would be padding.
HEADS = ROWS = 64
VALUE_CHANNELS, REST_CHANNELS = {"sparse_mla": (256, 512), "sparse_mla_backward": (512,)}, 64
# Places for tiles; registers a thread of those who take the softmax, and of those who copy: what is left of 65536 is
# for the sums, which take 128 for themselves.
_SETTINGS = {
    "WIDE": {"STAGES": 2, "SOFTMAX_REGISTERS": 120, "COPY_REGISTERS": 40},
    "WIDENED": {"STAGES": 2, "SOFTMAX_REGISTERS": 88, "COPY_REGISTERS": 96},
    "FP8": {"STAGES": 4, "SOFTMAX_REGISTERS": 120, "COPY_REGISTERS": 0},
}
_BACKWARD_SETTINGS = {"WEIGH_REGISTERS": 120, "COPY_REGISTERS": 40}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    backward = name == "sparse_mla_backward"
    if lacking := backward_missing if backward else missing:
        return lacking
    q, kv, indices = args[2:5] if backward else args[:3]
    kv_scale, d_v = (None, args[8]) if backward else (args[3], args[5])
    if not on_hopper(q.device):
        return "it is written for Hopper's tensor cores"
    if q.dtype not in (torch.float16, torch.bfloat16) or kv.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"queries in {q.dtype}, rows in {kv.dtype}"
    if kv_scale is not None and kv_scale.shape[3] != 1:
        return "a scale for every block of channels"
    heads, channels = q.shape[2:]
    if not isinstance(heads, int) or heads <= HEADS // 2:
        return f"{heads} heads: it has {HEADS} in a program"
    if backward and in_order() and (heads > HEADS or q.dtype != torch.bfloat16):
        most = f"what {HEADS} heads add to a row, in bfloat16"
        return f"deterministic algorithms are asked for, and it stores {most}: {heads} heads in {q.dtype}"
    if d_v not in VALUE_CHANNELS[name] or channels - d_v != REST_CHANNELS:
        return f"{d_v} and {channels - d_v} channels: it has {VALUE_CHANNELS[name]} and {REST_CHANNELS}"
    if reason := no_launch(q, kv, indices):
        return reason
    if not all(aligned(t) for t in (q, kv, *(args[:1] if backward else ()))):
        return "rows do not begin at multiples of 16 bytes"
    return None


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    d_v: int,
    causal: bool = True,
    offset: int = 0,
    fp8_gemms: bool = False,
) -> tuple[Tensor, Tensor]:
    mode = "WIDE" if kv_scale is None else "FP8" if fp8_gemms else "WIDENED"
    q, kv = last_dim_contiguous(q), last_dim_contiguous(kv)
    if q.data_ptr() % 16 or kv.data_ptr() % 16:  # memory of somebody else's
        return cuda_triton.sparse_mla(q, kv, indices, kv_scale, scale, d_v, causal, offset)
    out = torch.empty((*q.shape[:-1], d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    s_b, s_s, _ = scale_steps(kv_scale)
    try:
        kernels.sparse_mla_forward[(q.shape[1] * triton.cdiv(q.shape[2], HEADS), q.shape[0])](
            q, kv, indices, q if kv_scale is None else kv_scale, out, lse, q.shape[1], kv.shape[1], q.shape[2],
            indices.shape[3], offset, scale, **strides("q", q, "bth"), **strides("kv", kv, "bs"),
            i_b=indices.stride(0), i_t=indices.stride(1), i_k=indices.stride(3), s_b=s_b, s_s=s_s,
            V=d_v, R=REST_CHANNELS, CAUSAL=int(causal), MODE=getattr(kernels, mode).value, BH=HEADS, BK=ROWS,
            **_SETTINGS[mode], num_warps=8,
        )  # fmt: skip
    except TritonError as error:
        global missing
        missing = _refusal(error)
        return cuda_triton.sparse_mla(q, kv, indices, kv_scale, scale, d_v, causal, offset)
    return out, lse


def sparse_mla_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    d_v: int,
    causal: bool,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Rows' gradients are added in float32 with atomics, or summed along lists where that is to be in a fixed order."""
    q, kv, grad, out = (last_dim_contiguous(t) for t in (q, kv, grad.to(q.dtype), out.contiguous()))
    args = grad, grad_lse, q, kv, indices, out, lse, scale, d_v, causal, offset
    if any(t.data_ptr() % 16 for t in (q, kv, grad, out)):
        return cuda_triton.sparse_mla_backward(*args)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    try:
        if not in_order():
            _launch_backward(args, dq, dkv, slice(0, q.shape[1]), 0)
        else:
            for share in _lists.shares(q, indices):
                index = indices[:, share]
                parts = torch.empty((index.numel(), q.shape[3]), dtype=_lists.part_dtype(q.dtype), device=q.device)
                _launch_backward(args, dq, parts, share, 1)
                add_lists(parts, index, dkv, causal, offset + share.start)
    except TritonError as error:
        global backward_missing
        backward_missing = _refusal(error)
        return cuda_triton.sparse_mla_backward(*args)
    return dq, dkv.to(kv.dtype)


def _launch_backward(args: tuple[Any, ...], dq: Tensor, to: Tensor, share: slice, listed: int) -> None:
    grad, grad_lse, q, kv, indices, out, lse, scale, d_v, causal, offset = args
    count = share.stop - share.start
    work = q.shape[0] * count * triton.cdiv(q.shape[2], HEADS)
    programs = min(work, multiprocessors(q.device))
    weights = torch.empty(
        (programs, triton.cdiv(indices.shape[3], ROWS), 2, ROWS, HEADS), dtype=q.dtype, device=q.device
    )
    lse = lse.contiguous()
    backward_kernels.sparse_mla_backward[(programs,)](
        grad, q, kv, indices, out, lse, lse if grad_lse is None else grad_lse.contiguous(), dq, to, weights, q.shape[0],
        q.shape[1], share.start, count, kv.shape[1], q.shape[2], indices.shape[3], offset, scale,
        **strides("g", grad, "bth"), **strides("q", q, "bth"), **strides("kv", kv, "bs"),
        i_b=indices.stride(0), i_t=indices.stride(1), i_k=indices.stride(3), V=d_v, R=REST_CHANNELS, CAUSAL=int(causal),
        WITH_LSE=int(grad_lse is not None), LISTED=listed, BH=HEADS, BK=ROWS, **_BACKWARD_SETTINGS, num_warps=8,
    )  # fmt: skip


def _refusal(error: TritonError) -> str:
    """Why Triton's kernels are to serve: a release whose Gluon has the same names, and another meaning for them."""
    words = (str(error).strip() or type(error).__name__).splitlines()[-1]
    refusal = f"Triton {triton.__version__} did not compile it: {words[:200]}"
    log.logger.warning("sparse_mla: %s; Triton's own kernel serves", refusal)
    return refusal
