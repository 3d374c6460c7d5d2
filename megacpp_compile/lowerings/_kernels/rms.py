"""The parts of RMSNorm that ops share: the mean of a row, and the gradient through the norm from the projections."""

from __future__ import annotations

from torch import Tensor


def row_mean(x: Tensor) -> Tensor:
    """The mean of each row, [..., n] -> [..., 1]. As a sum over n: on XLA `mean` also checks for an empty row."""
    return x.sum(-1, keepdim=True) / x.shape[-1]


def input_gradient(
    normed: Tensor, w_norm: Tensor | None, grad: list[Tensor], w: list[Tensor], rrms: Tensor,
    grad_normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of what is normed, in the dtype of rrms, and of the gain (empty where there is none), from those of
    the projections `w` of it, and that of the normed value itself where it is read too:
    `rrms * (g - normed * mean(g * normed))`."""
    g = None if grad_normed is None else grad_normed.to(normed.dtype)
    for one, weight in zip(grad, w, strict=True):
        part = (one @ weight).to(normed.dtype)
        g = part if g is None else g + part
    assert g is not None
    d_norm = rrms.new_empty(0)
    if w_norm is not None:
        d_norm = (g * normed).flatten(0, -2).sum(0).to(w_norm.dtype)
        g = g * w_norm.to(g.dtype)
    return rrms * (g - normed * row_mean(g * normed)), d_norm
