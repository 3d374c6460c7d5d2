"""`hyper_connection` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.rms import row_mean
from megacpp_compile.lowerings._op import compute_dtype

INITS = ("", "softmax", "softmax_columns", "exp", "sigmoid", "tanh", "linear", "log")


def check(
    streams: Tensor, weight: Tensor, scale: Tensor, base: Tensor, pre: list[float], post: list[float], init: str,
    eps: list[float], axes: list[int],
) -> None:  # fmt: skip
    n, d = streams.shape[-2:]
    rows = sum(sizes(n, post, init))
    assert init in INITS, init
    assert len(pre) == 2 and len(post) in (0, 2) and len(eps) == 2, "a factor and a shift; two epsilons"
    assert set(axes) <= {-1, -2} and (init or not axes), f"normalisations over {axes}"
    assert init != "log" or not any(eps), "logarithms are normalised without an epsilon"
    assert tuple(weight.shape) == (rows, n * d), f"a weight of {tuple(weight.shape)} for {rows} numbers a token"
    assert tuple(scale.shape) == tuple(base.shape) == (rows,), "scale and base have a number for each row of the weight"


def sizes(n: int, post: Sequence[float], init: str) -> list[int]:
    """How many logits the weights before a block, those behind it, and the mixing matrix have."""
    return [n, n if post else 0, n * n if init else 0]


def normalised(mix: Tensor, init: str, eps: Sequence[float], axes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """(the matrix to begin with and behind each normalisation, what each divided by); in logarithms, what each
    subtracted."""
    if init in ("softmax", "softmax_columns"):
        mix = torch.softmax(mix, -1 if init == "softmax" else -2)
    elif init in ("exp", "sigmoid", "tanh"):
        mix = getattr(torch, init)(mix)
    states, divisors = [mix + eps[0] if eps[0] else mix], list[Tensor]()
    for axis in axes:
        if init == "log":
            divisors.append(torch.logsumexp(states[-1], axis, keepdim=True))
            states.append(states[-1] - divisors[-1])
        else:
            divisors.append(states[-1].sum(axis, keepdim=True) + eps[1])
            states.append(states[-1] / divisors[-1])
    return states, divisors


def normalised_backward(
    grad: Tensor, states: Sequence[Tensor], divisors: Sequence[Tensor], init: str, eps: Sequence[float],
    axes: Sequence[int],
) -> Tensor:  # fmt: skip
    """The gradient of the logits of `normalised`, from that of its last matrix."""
    if init == "log":
        grad = grad * states[-1].exp()
        for axis, after in zip(reversed(axes), reversed(states[1:]), strict=True):
            grad = grad - after.exp() * grad.sum(axis, keepdim=True)
        return grad
    for axis, after, divisor in zip(reversed(axes), reversed(states[1:]), reversed(divisors), strict=True):
        grad = (grad - (grad * after).sum(axis, keepdim=True)) / divisor
    first = states[0] - eps[0]
    if init in ("softmax", "softmax_columns"):
        return first * (grad - (grad * first).sum(-1 if init == "softmax" else -2, keepdim=True))
    if init == "linear":
        return grad
    return grad * {"exp": first, "sigmoid": first * (1 - first), "tanh": 1 - first * first}[init]


def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    pre: list[float],
    post: list[float],
    init: str,
    eps: list[float],
    axes: list[int],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype, n = compute_dtype(streams, weight, scale, base), streams.shape[-2]
    wide = streams.to(dtype)
    flat = wide.flatten(-2)
    rrms = torch.rsqrt(row_mean(flat.square()) + norm_eps)
    logits = torch.nn.functional.linear(flat * rrms, weight.to(dtype))
    for_pre, for_post, for_mix = (logits * scale.to(dtype) + base.to(dtype)).split(sizes(n, post, init), -1)
    before = torch.sigmoid(for_pre) * pre[0] + pre[1]
    outer = logits.shape[:-1]
    behind = torch.sigmoid(for_post) * post[0] + post[1] if post else logits.new_empty((*outer, 0))
    mix = logits.new_empty((*outer, 0, 0))
    if init:
        mix = normalised(for_mix.unflatten(-1, (n, n)), init, eps, axes)[0][-1]
        mix = mix.exp() if init == "log" else mix.clone(memory_format=torch.contiguous_format)
    block = (before.unsqueeze(-1) * wide).sum(-2).to(out_dtype)
    return block, behind, mix, logits, rrms.squeeze(-1).contiguous()


def hyper_connection_backward(
    grad: Tensor,
    grad_post: Tensor,
    grad_mix: Tensor,
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    logits: Tensor,
    rrms: Tensor,
    pre: list[float],
    post: list[float],
    init: str,
    eps: list[float],
    axes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, weight, scale and base.

    With u = streams @ weight^T, logits = rrms * u and g the gradient of the logits, the gradient of the streams through
    the logits is `rrms * (g @ weight) - streams * rrms^2 * sum(g * logits) / (n * d)`.
    """
    dtype, n = logits.dtype, streams.shape[-2]
    wide, grad = streams.to(dtype), grad.to(dtype)
    affine = logits * scale.to(dtype) + base.to(dtype)
    grad_pre = (grad.unsqueeze(-2) * wide).sum(-1)
    grad_affine = maps_backward(grad_pre, grad_post, grad_mix, affine, n, pre, post, init, eps, axes)
    before = torch.sigmoid(affine[..., :n]) * pre[0] + pre[1]
    grad_logits = grad_affine * scale.to(dtype) * rrms.unsqueeze(-1)
    inward = rrms * (grad_logits * logits).sum(-1) / (n * streams.shape[-1])
    through = (grad_logits @ weight.to(dtype)).unflatten(-1, streams.shape[-2:])
    grad_streams = before.unsqueeze(-1) * grad.unsqueeze(-2) + through - inward[..., None, None] * wide
    rows, tokens = grad_logits.reshape(-1, logits.shape[-1]), wide.reshape(-1, weight.shape[-1])
    grad_scale = (grad_affine * logits).reshape(rows.shape).sum(0).to(scale.dtype)
    grad_base = grad_affine.reshape(rows.shape).sum(0).to(base.dtype)
    return (
        grad_streams.to(streams.dtype).contiguous(),
        (rows.t() @ tokens).to(weight.dtype).contiguous(),
        grad_scale,
        grad_base,
    )


def maps_backward(
    grad_pre: Tensor, grad_post: Tensor, grad_mix: Tensor, affine: Tensor, n: int, pre: Sequence[float],
    post: Sequence[float], init: str, eps: Sequence[float], axes: Sequence[int],
) -> Tensor:  # fmt: skip
    """The gradient of `logits * scale + base`, from those of the weights and of the mixing matrix."""
    for_pre, for_post, for_mix = affine.split(sizes(n, post, init), -1)
    s = torch.sigmoid(for_pre)
    grads = [grad_pre * s * (1 - s) * pre[0]]
    if post:
        s = torch.sigmoid(for_post)
        grads.append(grad_post.to(affine.dtype) * s * (1 - s) * post[0])
    if init:
        states, divisors = normalised(for_mix.unflatten(-1, (n, n)), init, eps, axes)
        grads.append(normalised_backward(grad_mix.to(affine.dtype), states, divisors, init, eps, axes).flatten(-2))
    return torch.cat(grads, -1)
