"""`stream_update` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype


def check(streams: Tensor, block: Tensor, post: Tensor, mix: Tensor) -> None:
    *outer, n, d = streams.shape
    shapes = [tuple(t.shape) for t in (block, post, mix)]
    assert shapes == [(*outer, d), (*outer, n), (*outer, n, n)], f"{shapes} for streams {tuple(streams.shape)}"


def stream_update(
    streams: Tensor, block: Tensor, post: Tensor, mix: Tensor, out_dtype: torch.dtype
) -> Tensor:
    dtype = compute_dtype(streams, block, post, mix)
    mixed = mix.to(dtype) @ streams.to(dtype)
    return (mixed + post.to(dtype).unsqueeze(-1) * block.to(dtype).unsqueeze(-2)).to(out_dtype).contiguous()


def stream_update_backward(
    grad: Tensor, streams: Tensor, block: Tensor, post: Tensor, mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, block, post and mix."""
    dtype = compute_dtype(streams, block, post, mix)
    grad = grad.to(dtype)
    grad_streams = mix.to(dtype).mT @ grad
    grad_block = (post.to(dtype).unsqueeze(-1) * grad).sum(-2)
    grad_post = (grad * block.to(dtype).unsqueeze(-2)).sum(-1)
    grad_mix = grad @ streams.to(dtype).mT
    grads = zip((grad_streams, grad_block, grad_post, grad_mix), (streams, block, post, mix), strict=True)
    first, second, third, fourth = (g.to(t.dtype).contiguous() for g, t in grads)
    return first, second, third, fourth
