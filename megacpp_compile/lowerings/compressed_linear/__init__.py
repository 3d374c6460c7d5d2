"""`megacpp::compressed_linear`: linears of one input that keep a random projection of it for their weights' gradients.

    x          [..., d]   any floating dtype
    w          list of [n_i, d]  b   list of [n_i], one for every w, or empty; all in x's dtype
    draw       int64 [] or None (0): what S is drawn anew with, such as the number of a step
    rank, seed r, from 1 to d, and a number from 0 to 2^63 - 1
    returns    y: list of [..., n_i];  z [..., r] = x S; both in x's dtype

S [d, r] has the entries s and -s, each as likely as the other: the bits of Philox with the key `seed` and the counters
(entry, draw), as `signs.py` has them. It is made where it is read and never kept; no random state of torch's is read or
moved. s is the power of two next to 1 / sqrt(r), so that entries are exact in every dtype.
y, and the gradients of x and b, are those of a linear. The gradient of w is c (g^T z) S^T with c = 1 / (r s^2): the
exact one times c S S^T. It is an estimate without bias, as E[c S S^T] = 1 whatever x and g are. The expected square of
its error's norm is (d - 1) / r of the gradient's; normal entries would make it (d + 1) / r. At r = d it is not 0. The
estimate costs 2 r (T d + T n + n d) FLOPs where the exact gradient costs 2 T n d.
Saved for backward: z, draw, the weights; x is not. z is a result for that alone, and has no gradient.
Raises OperandError for operands of other shapes and dtypes.
Sources: CompAct, https://arxiv.org/abs/2410.15352, which leaves the gradient in the projected space until the update;
here it is projected back in the backward. Philox: Salmon et al., SC11, https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint, rows
from megacpp_compile.lowerings._op import define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.compressed_linear import reference


def _check(x: Tensor, w: list[Tensor], b: list[Tensor], draw: Tensor | None, rank: int, seed: int) -> str | None:
    if not w or x.dim() < 2 or any(one.dim() != 2 or one.shape[1] != x.shape[-1] for one in w):
        return f"x is {tuple(x.shape)}, w {[tuple(one.shape) for one in w]}, not [..., d] and [n, d] each"
    if not x.is_floating_point() or x.dtype.itemsize < 2 or any(one.dtype != x.dtype for one in (*w, *b)):
        dtypes = ", ".join(str(one.dtype) for one in (*w, *b))
        return f"x is {x.dtype}, w and b {dtypes}: all are one of float64, float32, bfloat16, float16"
    if b and [one.shape for one in b] != [one.shape[:1] for one in w]:
        return f"b is {[tuple(one.shape) for one in b]}, w {[tuple(one.shape) for one in w]}"
    if draw is not None and (draw.dtype != torch.int64 or draw.dim()):
        return f"draw is {draw.dtype} {tuple(draw.shape)}, not int64 []"
    if not 1 <= rank <= x.shape[-1]:
        return f"rank is {rank}, not from 1 to d = {x.shape[-1]}"
    if seed < 0:
        return f"seed is {seed}, not from 0 to 2^63 - 1"
    return None


@define_op(reference.compressed_linear, check=_check, served=True)
def compressed_linear(x, w, b, draw, rank, seed):  # type: ignore[no-untyped-def]
    outer = x.shape[:-1]
    return [x.new_empty((*outer, one.shape[0])) for one in w], x.new_empty((*outer, rank))


@define_op(reference.compressed_linear_backward, served=True)
def compressed_linear_backward(grad, z, w, draw, seed, biased):  # type: ignore[no-untyped-def]
    """Gradients of x, w, and of the biases."""
    d_b = [one.new_empty(one.shape[0]) for one in w] if biased else []
    return z.new_empty((*z.shape[:-1], w[0].shape[1])), [one.new_empty(one.shape) for one in w], d_b


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, w, b, draw, _, ctx.seed = inputs
    _, z = output
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.biased = bool(b)
    ctx.save_for_backward(z, draw, *w)


def _backward(ctx: Any, grad: list[Tensor | None], _: Any) -> tuple[Any, ...]:
    z, draw, *w = ctx.saved_tensors
    # A linear that no loss depends on has no gradient, as in eager.
    used = {i: g for i, g in enumerate(grad) if g is not None}
    grads = list(used.values())
    d_x, d_w, d_b = compressed_linear_backward(grads, z, [w[i] for i in used], draw, ctx.seed, ctx.biased)
    found_w, found_b = dict(zip(used, d_w, strict=True)), dict(zip(used, d_b, strict=False))
    spread_b = [found_b.get(i) for i in range(len(w))] if ctx.biased else []
    return d_x, [found_w.get(i) for i in range(len(w))], spread_b, None, None, None


compressed_linear.register_autograd(_backward, setup_context=_setup_context)


def _flops(x: Tensor, w: list[Tensor], b: Any, draw: Any, rank: int, *_: Any) -> float:
    return 2 * rows(x) * (sum(map(elements, w)) + rank * hint(x.shape[-1]))


def _flops_backward(grad: Any, z: Tensor, w: list[Tensor], *_: Any) -> float:
    weights, rank = sum(map(elements, w)), hint(z.shape[-1])
    outs = sum(hint(one.shape[0]) for one in w)
    return 2 * (rows(z) * (weights + rank * outs) + rank * weights)


def _workspace(x: Tensor, w: list[Tensor], b: Any, draw: Any, rank: int, *_: Any) -> int:
    return rank * int(hint(x.shape[-1])) * x.element_size()


def _workspace_backward(grad: Any, z: Tensor, w: list[Tensor], *_: Any) -> int:
    return int(hint(z.shape[-1]) * hint(w[0].shape[1])) * z.element_size()


declare(
    {
        "megacpp::compressed_linear": OpTraits(gemm=True, flops=_flops, workspace=_workspace, kept_instead=0),
        "megacpp::compressed_linear_backward": OpTraits(
            gemm=True, flops=_flops_backward, workspace=_workspace_backward
        ),
    }
)
