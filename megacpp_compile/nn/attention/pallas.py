"""Attention on a TPU by JAX's splash attention, a flash kernel in Pallas with a soft cap and segments, called through
torch_xla's bridge for custom kernels (torch_xla/experimental/splash_attention.py of release 2.9).

Heads are padded to multiples of 128 channels and keys repeated for the heads that share them, as the bridge has one
shape for all three operands. It has not run on a TPU yet; docs/xla.md says what else has not.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megacpp_compile.nn.attention.bodies import Lack, without_padding

_PADDED_TO = 128


def lacks(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None = None
) -> Lack:
    """Why the kernel cannot serve a call, as (tag, reason), or None."""
    if q.device.type != "xla":
        return "device", f"Pallas kernels of torch_xla run on XLA devices, not on {q.device.type}"
    missing = unavailable()
    if missing is not None:
        return missing
    if q.dtype not in (torch.bfloat16, torch.float32):
        return "dtype", f"the kernel does not compute in {q.dtype}"
    if q.shape[2] != k.shape[2] or q.shape[2] % _PADDED_TO:
        return "shape", f"{q.shape[2]} queries and {k.shape[2]} keys: wanted as many, in multiples of {_PADDED_TO}"
    if window is not None:
        return "window", "the kernel is called without a window"
    return None


@torch.compiler.assume_constant_result
def unavailable() -> Lack:
    """Why no Pallas kernel can run in this process, as (tag, reason), or None. Starts XLA's runtime if there is one."""
    for package in ("torch_xla", "jax"):
        if importlib.util.find_spec(package) is None:
            return "no-pallas", f"the package {package} is not installed"
    import torch_xla.runtime as runtime

    if runtime.device_type() != "TPU":
        return "no-pallas", f"the XLA device is a {runtime.device_type()}, and the kernel is for a TPU"
    if runtime.is_spmd():
        return "spmd", "the kernel is called on one device's shapes, and the program is for several"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, softcap: float | None, scale: float, causal: bool
) -> Tensor:
    """Attention by the splash kernel; arguments as in `bodies`."""
    heads, width = q.shape[1], v.shape[-1]
    channels = -(-max(q.shape[-1], width) // _PADDED_TO) * _PADDED_TO
    repeat = heads // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) if repeat > 1 else t for t in (k, v))
    # Zeros add nothing to a score, and the channels they add are cut off afterwards. The kernel itself scales nothing.
    q, k, v = (pad(t, (0, channels - t.shape[-1])) for t in (q * scale, k, v))
    ids = None if doc_ids is None else doc_ids.to(torch.int32)
    out = _Splash.apply(q, k, v, ids, softcap, causal)[..., :width]
    return out if doc_ids is None else without_padding(out, doc_ids)


class _Splash(torch.autograd.Function):
    """torch_xla's two custom ops. Its own autograd function saves the cap as a tensor, which a number is not."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, softcap: float | None, causal: bool
    ) -> Tensor:
        ops = _bridge()
        ctx.save_for_backward(q, k, v, ids)
        ctx.softcap, ctx.causal = softcap, causal
        return ops.sa_custom_forward(q, k, v, _settings(), ids, causal, softcap)[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, ids = ctx.saved_tensors
        ops = _bridge()
        grads = ops.sa_custom_backward(grad.contiguous(), q, k, v, _settings(), ids, ctx.causal, ctx.softcap)
        return (*grads, None, None, None)


def _bridge() -> Any:
    """torch_xla's module with the ops; its guard has torch_xla take the device before JAX does."""
    from torch_xla._internal.jax_workarounds import jax_import_guard
    from torch_xla.experimental import splash_attention

    jax_import_guard()
    return splash_attention


@functools.cache
def _settings() -> str:
    """The kernel's own settings for one device: its mesh has to have these two axes."""
    import numpy
    from torch_xla.distributed.spmd import Mesh
    from torch_xla.experimental.splash_attention import SplashAttentionConfig

    return SplashAttentionConfig(mesh=str(Mesh(numpy.array([0]), (1, 1), ("data", "fsdp")))).to_json()
