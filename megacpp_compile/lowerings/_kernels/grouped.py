"""GEMMs over rows that are sorted into groups, each group with a weight of its own.

    rows     [S, d]      offsets [E] int32: where each group ends; rows behind the last end belong to no group
    weights  one tensor [E, n, d], or E tensors [n, d] that stay where they are

Ops of their own, and opaque to what compiles around them: how many rows a group has is known to the device alone. On
CPU the offsets can be read at no cost, so each group is one GEMM of just its size; on CUDA the kernels of
`hopper_grouped` read them there, and the host does not wait. Elsewhere every group's GEMM runs over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype, ends_until, kernel_op
from megacpp_compile.targets import CPU, CUDA, Target, family


def target_of(x: Tensor) -> Target:
    """The target that serves tensors where `x` lies."""
    return family({x.device.type})


@kernel_op("grouped_gemms::rows")
def rows(
    xs: list[Tensor],
    weights: list[Tensor],
    offsets: Tensor,
    transposed: bool,
    take: Optional[Tensor] = None,  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
    bias: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """[S, n]: `x @ w.T` with each row's own weight, or with `transposed` `x @ w`; rows of no group are zero.

    Several xs give the sum of their GEMMs; the weights of one lie behind those of the other. take: [S], the rows of xs
    to read. bias: [E, n], what a row of each group adds; the result has its dtype, which may be wider than that of xs.
    """
    if (target := target_of(xs[0])) is CUDA:
        from megacpp_compile.lowerings._kernels import hopper_grouped

        return hopper_grouped.rows(xs, weights, offsets, transposed, take, bias=bias)
    if take is not None:
        xs = [x[take] for x in xs]
    each = [w if transposed else w.transpose(-1, -2) for w in separate(weights)]
    out = xs[0].new_zeros((xs[0].shape[0], each[0].shape[1]), dtype=dtype_of(xs[0], bias))
    experts = offsets.shape[0]
    parts = [(x, each[i * experts : (i + 1) * experts]) for i, x in enumerate(xs)]
    if target is CPU:
        for e, (start, end) in enumerate(_groups(offsets)):
            for i, (x, ws) in enumerate(parts):
                if i:
                    out[start:end].addmm_(x[start:end], ws[e])
                elif bias is not None and bias.dtype != x.dtype:
                    torch.add(torch.mm(x[start:end], ws[e]), bias[e], out=out[start:end])
                elif bias is not None:
                    torch.addmm(bias[e], x[start:end], ws[e], out=out[start:end])
                else:
                    torch.mm(x[start:end], ws[e], out=out[start:end])
        return out
    group = ends_until(offsets, torch.arange(out.shape[0], device=out.device))
    for e in range(experts):
        own = sum(x @ ws[e] for x, ws in parts)
        out = torch.where((group == e)[:, None], own if bias is None else own + bias[e], out)
    return out


@torch.library.register_fake("grouped_gemms::rows")
def _(xs, weights, offsets, transposed, take=None, bias=None):  # type: ignore[no-untyped-def]
    count = (xs[0] if take is None else take).shape[0]
    return xs[0].new_empty((count, weights[0].shape[-1 if transposed else -2]), dtype=dtype_of(xs[0], bias))


def dtype_of(x: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of rows `x` times weights, and of their sum with a bias."""
    return x.dtype if bias is None else bias.dtype


def separate(weights: list[Tensor]) -> list[Tensor]:
    """One tensor for each weight."""
    return weights if weights[0].dim() == 2 else [part for w in weights for part in w.unbind(0)]


@kernel_op("grouped_gemms::sums")
def sums(
    rows: Tensor,
    offsets: Tensor,
    take: Optional[Tensor] = None,  # noqa: UP045
    factors: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """[E, n]: the sum of the rows of each group, or of rows `take`, times `factors` [S], in float32 or wider, always in
    the same order."""
    if (target := target_of(rows)) is CUDA:
        from megacpp_compile.lowerings._kernels import triton_grouped

        return triton_grouped.sums(rows, offsets, take, factors)
    rows = (rows if take is None else rows[take]).to(compute_dtype(rows))
    rows = rows if factors is None else rows * factors[:, None]
    if target is not CPU:
        group = ends_until(offsets, torch.arange(rows.shape[0], device=rows.device))
        return torch.stack([torch.where((group == e)[:, None], rows, 0).sum(0) for e in range(offsets.shape[0])])
    return torch.stack([rows[start:end].sum(0) for start, end in _groups(offsets)])


@torch.library.register_fake("grouped_gemms::sums")
def _(rows, offsets, take=None, factors=None):  # type: ignore[no-untyped-def]
    return rows.new_empty((offsets.shape[0], rows.shape[1]), dtype=compute_dtype(rows))


@kernel_op("grouped_gemms::weights")
def weights(
    grad: Tensor,
    x: Tensor,
    offsets: Tensor,
    take_grad: Optional[Tensor] = None,  # noqa: UP045
    take_x: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """[E, n, d]: `grad.T @ x` over the rows of each group, which `take_grad` and `take_x` name if given; zero for an
    empty group."""
    if (target := target_of(x)) is CUDA:
        from megacpp_compile.lowerings._kernels import hopper_grouped

        return hopper_grouped.weights(grad, x, offsets, take_grad, take_x)
    grad = grad if take_grad is None else grad[take_grad]
    x = x if take_x is None else x[take_x]
    out = x.new_zeros((offsets.shape[0], grad.shape[1], x.shape[1]))
    if target is not CPU:
        group = ends_until(offsets, torch.arange(x.shape[0], device=x.device))
        return torch.stack([torch.where((group == e)[:, None], grad, 0).t() @ x for e in range(out.shape[0])])
    for e, (start, end) in enumerate(_groups(offsets)):
        torch.mm(grad[start:end].t(), x[start:end], out=out[e])
    return out


@torch.library.register_fake("grouped_gemms::weights")
def _(grad, x, offsets, take_grad=None, take_x=None):  # type: ignore[no-untyped-def]
    return x.new_empty((offsets.shape[0], grad.shape[1], x.shape[1]))


@kernel_op("grouped_gemms::gated")
def gated(
    x: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    offsets: Tensor,
    take: Optional[Tensor],  # noqa: UP045
    activation: str,
    b_gate: Optional[Tensor] = None,  # noqa: UP045
    b_up: Optional[Tensor] = None,  # noqa: UP045
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x @ w_gate.T, x @ w_up.T, f(the first) * the second) of rows `take`, or of all, in one kernel; on
    CUDA only.

    With w_up empty, w_gate holds both, [2n, d] per expert, in halves or `interleaved`; the first result then holds both
    too, and the second is empty. b_gate, b_up: biases as the weights, all experts' in one, whose dtypes the results
    before the activation have.
    """
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_gated

    if interleaved:
        hidden, out = triton_gated.interleaved(x, w_gate, offsets, take, activation, b_gate)
        return hidden, x.new_empty(0), out
    return hopper_grouped.gated(x, w_gate, w_up, offsets, take, activation, b_gate=b_gate, b_up=b_up)


@torch.library.register_fake("grouped_gemms::gated")
def _(x, w_gate, w_up, offsets, take, activation, b_gate=None, b_up=None, interleaved=False):  # type: ignore[no-untyped-def]
    rows, n = (x if take is None else take).shape[0], w_gate[0].shape[-2]
    first = x.new_empty((rows, n), dtype=dtype_of(x, b_gate))
    second = x.new_empty((rows, n), dtype=dtype_of(x, b_up)) if w_up else x.new_empty(0)
    return first, second, x.new_empty((rows, n if w_up else n // 2))


@kernel_op("grouped_gemms::gradients")
def gradients(
    grad: Tensor,
    weights: list[Tensor],
    hidden: list[Tensor],
    gates: Tensor,
    offsets: Tensor,
    take: Optional[Tensor],  # noqa: UP045
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward's first GEMM, of rows `take` of `grad` or of all, and what lies between it and the next ones, in one
    kernel where gate and up are two tensors; on CUDA only. See `triton_gated_gradients.gradients`."""
    from megacpp_compile.lowerings._kernels import hopper_grouped

    return hopper_grouped.gradients(grad, weights, hidden, gates, offsets, take, activation)


@torch.library.register_fake("grouped_gemms::gradients")
def _(grad, weights, hidden, gates, offsets, take, activation):  # type: ignore[no-untyped-def]
    rows, n = gates.shape[0], weights[0].shape[-1]
    return grad.new_empty((rows, 2 * n)), grad.new_empty((rows, n)), gates.new_empty(rows)


def _groups(offsets: Tensor) -> Iterator[tuple[int, int]]:
    ends = offsets.tolist()
    return zip([0, *ends[:-1]], ends, strict=True)
