"""The grouped GEMMs that routed experts are computed by, and the gradients of experts' weights.

In float8, in plain PyTorch, they are what `precision="fp8_current"` means, and the oracle. Both operands of a GEMM are
e4m3, with a scale for every row: of x a token's; of the input of `down`, of the output's gradient and of the gradients
before the activation a slot's; of a weight [n]. Biases are added unrounded. Backward multiplies by the same payloads as
forward. There the weights' scales lie along the summed dimension, so they are multiplied into the rows before these are
rounded. Gradients of the weights are GEMMs of unrounded operands. Payloads of the weights are made in each call, or
given to it (`Float8Operands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels import grouped
from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8, rounded_by, widened
from megacpp_compile.lowerings._op import compute_dtype, ends_until

FORMAT = torch.float8_e4m3fn
SCALES = 2  # tensors of scales that follow what is kept of a call in float8


class Float8Operands(NamedTuple):
    """Casts of a layer's weights that its caller made (`megacpp::fp8_quantize_experts`): of those before the activation
    [E, channels, d], the gate's first, transposed [E, d, channels], and their scales; the same of those behind it.
    transposed: empty where there is no backward."""

    into: Tensor
    into_transposed: Tensor
    into_scale: Tensor
    down: Tensor
    down_transposed: Tensor
    down_scale: Tensor

    @classmethod
    def of(cls, given: Sequence[Tensor | None]) -> Float8Operands | None:
        """The last arguments of an op of experts; None where it has none."""
        there = [t for t in given if t is not None]
        assert len(there) in (0, len(cls._fields)), "all of the casts, or none"
        return cls(*there) if there else None


class Fp8Gemms:
    """The GEMMs of one call. given: the scales that forward kept; backward, whose GEMMs run in reverse order, pops them
    from the end, and so the weights transposed, where forward was given payloads. payloads: forward's, with `parts`
    weights before the activation."""

    weights = torch.ops.grouped_gemms.weights
    sums = torch.ops.grouped_gemms.sums
    side_by_side = True  # the gradients of gate and up are rounded as one row

    def __init__(
        self,
        given: Sequence[Tensor] = (),
        transposed: Sequence[Tensor | None] = (),
        payloads: Float8Operands | None = None,
        parts: int = 1,
    ) -> None:
        self._given, self._made, self._payloads = list(given), list[Tensor](), payloads
        self._kept = [t for t in transposed if t is not None]
        self._cast = list[tuple[Tensor, Tensor]]()
        if payloads is not None:
            scales = [scale.contiguous() for scale in payloads.into_scale.chunk(parts, 1)]  # as kernels read them
            into = zip(payloads.into.chunk(parts, 1), scales, strict=True)
            self._cast = [*into, (payloads.down, payloads.down_scale)]

    def scales(self) -> list[Tensor]:
        """The scales of the weights before the activation, the gate's first [E, 2n], and of those behind it [E, d];
        none where the caller has them."""
        return [torch.cat(self._made[:-1], 1), self._made[-1]] if self._made else []

    def rows(
        self,
        xs: list[Tensor],
        weights: list[Tensor],
        offsets: Tensor,
        transposed: bool,
        take: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        (x,) = xs
        dtype = compute_dtype(x)
        each = [w.to(dtype) for w in grouped.separate(weights)]
        experts = offsets.shape[0]
        wide = x.to(dtype)
        if transposed:
            scale = self._given.pop()
            wide = wide if take is None else wide[take]
            group = ends_until(offsets, torch.arange(wide.shape[0], device=x.device)).clamp(max=experts - 1)
            payload, own = round_to_fp8(wide * scale[group], FORMAT)
            # Of several parts, one after the other, as the weights lie.
            parts = scale.view(experts, len(each) // experts, -1).transpose(0, 1).flatten(0, 1)
            if self._kept:  # [E, d, parts * n]
                blocks = self._kept.pop().view(experts, -1, len(each) // experts, each[0].shape[0])
                rounded = [*blocks.permute(2, 0, 3, 1).flatten(0, 1).unbind(0)]
            else:
                rounded = [rounded_by(w, s[:, None], FORMAT) for w, s in zip(each, parts, strict=True)]
            operands = [widened(w, dtype) for w in rounded]
            rows = (widened(payload, dtype) * own).chunk(len(each) // experts, 1)
            return torch.ops.grouped_gemms.rows(list(rows), operands, offsets, True).to(x.dtype)
        payload, own = round_to_fp8(wide, FORMAT)
        if self._cast:
            pairs = list(zip(*self._cast.pop(0), strict=True))
            operands = [widened(p, dtype) * s[:, None] for p, s in pairs]
        else:
            pairs = [round_to_fp8(w, FORMAT) for w in each]
            self._made.append(torch.stack([s.squeeze(-1) for _, s in pairs]))
            operands = [widened(p, dtype) * s for p, s in pairs]
        added = () if bias is None else (bias.to(dtype),)
        y = torch.ops.grouped_gemms.rows([widened(payload, dtype) * own], operands, offsets, False, take, *added)
        return y.to(grouped.dtype_of(x, bias))


class GroupedGemms:
    """The grouped GEMMs of one call, as opaque ops, which `_kernels/grouped.py` defines. float8: those in float8."""

    rows = torch.ops.grouped_gemms.rows
    weights = torch.ops.grouped_gemms.weights
    sums = torch.ops.grouped_gemms.sums
    float8: type[Fp8Gemms] = Fp8Gemms

    @classmethod
    def of_forward(cls, precision: str, w_gate: Sequence[Tensor], payloads: Sequence[Tensor | None]) -> Any:
        """Those of a call in `precision` whose last arguments are `payloads`."""
        if not precision:
            return cls()
        return cls.float8(payloads=Float8Operands.of(payloads), parts=2 if w_gate else 1)

    @classmethod
    def of_backward(
        cls, precision: str, hidden: list[Tensor], transposed: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Any]:
        """(`hidden` without the scales that forward in `precision` kept behind it, the GEMMs of backward)."""
        return (hidden[:-SCALES], cls.float8(hidden[-SCALES:], transposed)) if precision else (hidden, cls())


def experts_of(weights: Sequence[Tensor]) -> int:
    return weights[0].shape[0] if weights[0].dim() == 3 else len(weights)


def empty_kept(
    x: Tensor, rows: Any, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor], keep_hidden: bool,
    precision: str, b_gate: Tensor | None = None, b_up: Tensor | None = None, b_down: Tensor | None = None,
    *payloads: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Tensors such as `rows` rows of x have before the activation, and scales of weights that a call casts."""
    ups = [(w, b) for w, b in ((w_gate, b_gate), (w_up, b_up)) if w]
    scaled = precision and Float8Operands.of(payloads) is None
    kept = [x.new_empty((rows, w[0].shape[-2]), dtype=grouped.dtype_of(x, b)) for w, b in ups if keep_hidden]
    widths = (sum(w[0].shape[-2] for w, _ in ups), w_down[0].shape[-2]) if scaled else ()
    return kept + [x.new_empty((experts_of(w_down), n), dtype=compute_dtype(x)) for n in widths]


def empty_gradients(
    x: Tensor, w_gate: list[Tensor], w_up: list[Tensor], w_down: list[Tensor], *biases: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What the gradients of w_gate and w_up, side by side, of w_down and of biases will be, as they will lie."""
    of_biases = [b.new_empty(b.shape) for b in biases if b is not None]
    return _empty_gradient(x, [w for w in (w_gate, w_up) if w]), _empty_gradient(x, [w_down]), of_biases


def _empty_gradient(x: Tensor, parts: list[list[Tensor]]) -> Tensor:
    experts, (n, k) = experts_of(parts[0]), (sum(w[0].shape[-2] for w in parts), parts[0][0].shape[-1])
    return x.new_empty((experts, k, n)).transpose(1, 2) if _across(parts) else x.new_empty((experts, n, k))


def _across(parts: list[list[Tensor]]) -> bool:
    """Whether all these weights [n, k] lie as [k, n]. So will their gradient: autograd would copy any other into one
    that lies as its parameter does."""
    return all(statically_known_true(w.stride(-2) == 1) and w.stride(-1) != 1 for part in parts for w in part)


def weights_gradient(
    gemms: GroupedGemms | Fp8Gemms,
    parts: list[list[Tensor]],
    grad: tuple[Tensor, Tensor | None],
    x: tuple[Tensor, Tensor | None],
    offsets: Tensor,
) -> Tensor:
    """[E, n, k], of rows and what numbers them; of `parts` side by side."""
    if _across(parts):
        return gemms.weights(x[0], grad[0], offsets, x[1], grad[1]).transpose(1, 2)
    return gemms.weights(grad[0], x[0], offsets, grad[1], x[1])
