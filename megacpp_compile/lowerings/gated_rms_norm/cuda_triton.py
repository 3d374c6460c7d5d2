"""`gated_rms_norm` on CUDA: each group is read once and kept in registers, forward and backward.

A program goes over many rows of one group of channels, so that its part of the weight's gradient is summed in
registers; the programs' sums are added up afterwards in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.columns import Columns
from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, is_wide, power_of_2
from megacpp_compile.lowerings._op import compute_dtype

__all__ = ["MIN_BYTES", "gated_rms_norm", "gated_rms_norm_backward", "supports", "writes_into"]

# Bytes of the largest operand from which this gains on what Inductor makes of the reference (H200).
MIN_BYTES = 8 << 20
# Channels of a group that one program holds in registers.
MAX_SIZE = 8192
# Programs a launch may have along its second axis.
MAX_GRID = 65535
# Programs a launch of the backward has at most for all groups together, and warps; also about the rows of the partial
# sums.
PROGRAMS, WARPS = 1056, 4224


@triton.jit
def gated_rms_norm_rows(y, z, weight, out, rrms, rows, groups, yr, zr, wc, EPS: tl.constexpr,
                        SIZE: tl.constexpr, LANES: tl.constexpr, WEIGHT: tl.constexpr, NORM_FIRST: tl.constexpr,
                        SIGMOID: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    g = tl.program_id(1)
    d = tl.arange(0, LANES)[None, :]
    c = g * SIZE + d
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    mask = (r < rows) & (d < SIZE)
    h = tl.load(y + r * yr + c, mask=mask, other=0).to(dtype)
    v = tl.load(z + r * zr + c, mask=mask, other=0).to(dtype)
    gate = (1 if SIGMOID else v) / (1 + tl.exp(-v))
    if not NORM_FIRST:
        h = h * gate
    scale = 1 / tl.sqrt(tl.sum(h * h, 1)[:, None] / SIZE + EPS)
    h = h * scale
    if WEIGHT:
        h = h * tl.load(weight + c * wc, mask=d < SIZE, other=0).to(dtype)
    if NORM_FIRST:
        h = h * gate
    tl.store(out + r * groups * SIZE + c, as_stored(h, out), mask=mask)
    tl.store(rrms + r * groups + g, scale, mask=r < rows)


@triton.jit
def gated_rms_norm_rows_backward(grad, y, z, weight, rrms, dy, dz, partial, rows, groups, gr, yr, zr, wc,
                                 dzr, dz_first, SIZE: tl.constexpr, LANES: tl.constexpr, WEIGHT: tl.constexpr,
                                 NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr, WIDE: tl.constexpr,
                                 PROGRAMS: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    g = tl.program_id(1)
    d = tl.arange(0, LANES)[None, :]
    c = g * SIZE + d
    inside = d < SIZE
    if WEIGHT:
        w = tl.load(weight + c * wc, mask=inside, other=0).to(dtype)
    total = tl.zeros([1, LANES], dtype)
    # Rows are loaded ahead of the arithmetic on those before them.
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    mask = (r < rows) & inside
    next_a, next_h = tl.load(grad + r * gr + c, mask=mask, other=0), tl.load(y + r * yr + c, mask=mask, other=0)
    next_v = tl.load(z + r * zr + c, mask=mask, other=0)
    next_scale = tl.load(rrms + r * groups + g, mask=r < rows, other=0)
    for first in range(tl.program_id(0) * BR, rows, PROGRAMS * BR):
        a, h, v, scale = next_a.to(dtype), next_h.to(dtype), next_v.to(dtype), next_scale.to(dtype)
        r = (first + tl.arange(0, BR)).to(tl.int64)[:, None]
        n = r + PROGRAMS * BR
        mask = (n < rows) & inside
        next_a, next_h = tl.load(grad + n * gr + c, mask=mask, other=0), tl.load(y + n * yr + c, mask=mask, other=0)
        next_v = tl.load(z + n * zr + c, mask=mask, other=0)
        next_scale = tl.load(rrms + n * groups + g, mask=n < rows, other=0)
        s = 1 / (1 + tl.exp(-v))
        if SIGMOID:
            gate = s
            slope = s * (1 - s)
        else:
            gate = v * s
            slope = s * (1 + v * (1 - s))
        if NORM_FIRST:
            normed = h * scale
            behind = a * gate
        else:
            normed = h * gate * scale
            behind = a
        if WEIGHT:
            total += tl.sum(behind * normed, 0)[None, :]
            behind = behind * w
        dh = scale * (behind - normed * (tl.sum(behind * normed, 1)[:, None] / SIZE))
        if NORM_FIRST:
            d_gate = a * normed
            if WEIGHT:
                d_gate = d_gate * w
        else:
            d_gate = dh * h
            dh = dh * gate
        mask = (r < rows) & inside
        tl.store(dy + r * groups * SIZE + c, as_stored(dh, dy), mask=mask)
        tl.store(dz + r * dzr + dz_first + c, as_stored(d_gate * slope, dz), mask=mask)
    if WEIGHT:
        tl.store(partial + tl.program_id(0).to(tl.int64) * groups * SIZE + c, total, mask=inside)


_CHOICES = [{"BR": br, "num_warps": warps} for br in (1, 2, 4, 8) for warps in (2, 4, 8, 16)]
_rows = Kernel(gated_rms_norm_rows, _CHOICES, key=("SIZE", "rows"))
_rows_backward = Kernel(gated_rms_norm_rows_backward, _CHOICES, key=("SIZE", "rows"))


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    at = 0 if name == "gated_rms_norm" else 1
    y, z, size = args[at], args[at + 1], args[4 if at == 0 else 5]
    if not isinstance(y.shape[-1], int):
        return "the number of channels is not known"
    if size > MAX_SIZE:
        return f"a group is wider than {MAX_SIZE}"
    if any(isinstance(n, int) and n == 0 for n in y.shape):
        return "there is nothing to norm"
    if y.shape[-1] // size > MAX_GRID:
        return f"more than {MAX_GRID} groups"
    rows = (_rows_of(t) for t in (y, z))
    return None if all(r is not None for r in rows) else "rows are not evenly spaced in memory"


def writes_into(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    return (1,) if name == "gated_rms_norm_backward" else ()


def _rows_of(t: Tensor) -> Tensor | None:
    """t as [rows, channels] with adjacent channels, or None where that takes a copy."""
    if not statically_known_true(t.stride(-1) == 1):
        return None
    dims = [i for i in range(t.dim() - 1) if not statically_known_true(t.shape[i] == 1)]
    for outer, inner in zip(dims, dims[1:], strict=False):
        if not statically_known_true(t.stride(outer) == t.stride(inner) * t.shape[inner]):
            return None
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)


def _static(channels: int) -> dict[str, int]:
    """Blocks of one row, or of several narrow ones: of wider blocks fewer fit into the registers (H200)."""
    return {"BR": max(1, min(8, 512 // channels)), "num_warps": 2 if channels <= 512 else 4}


def _static_backward(channels: int) -> dict[str, int]:
    """As many rows, of four channels a thread in narrow groups: what is loaded ahead takes registers, too (H100)."""
    return {**_static(channels), "num_warps": min(16, max(2, channels // 128))}


def _operands(
    y: Tensor, z: Tensor, weight: Tensor | None, size: int, norm_before_gate: bool, activation: str
) -> dict[str, Any]:
    flat_y, flat_z = _rows_of(y), _rows_of(z)
    assert flat_y is not None and flat_z is not None
    return {
        "y": flat_y, "z": flat_z, "yr": flat_y.stride(0), "zr": flat_z.stride(0), "rows": flat_y.shape[0],
        "groups": y.shape[-1] // size, "weight": y if weight is None else weight,
        "wc": 0 if weight is None else weight.stride(0), "SIZE": size, "LANES": power_of_2(size),
        "WEIGHT": int(weight is not None), "NORM_FIRST": int(norm_before_gate),
        "SIGMOID": int(activation == "sigmoid"), "WIDE": int(is_wide(y.dtype, z.dtype)),
    }  # fmt: skip


def gated_rms_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    out_dtype: torch.dtype,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    args = _operands(y, z, weight, group_size, norm_before_gate, activation)
    out = torch.empty(y.shape, dtype=out_dtype, device=y.device)
    rrms = torch.empty((*y.shape[:-1], args["groups"]), dtype=compute_dtype(y, z), device=y.device)
    _rows(
        lambda meta: (triton.cdiv(args["rows"], meta["BR"]), args["groups"]),
        _static(args["LANES"]), out=out, rrms=rrms, EPS=eps, **args,
    )  # fmt: skip
    return out, rrms


def gated_rms_norm_backward(
    grad: Tensor,
    y: Tensor,
    z: Tensor,
    weight: Tensor | None,
    rrms: Tensor,
    group_size: int,
    norm_before_gate: bool,
    activation: str = "silu",
    into: Mapping[int, Columns] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    args = _operands(y, z, weight, group_size, norm_before_gate, activation)
    flat = _rows_of(grad)
    flat = _rows_of(grad.contiguous()) if flat is None else flat
    assert flat is not None
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    columns = Columns(None, 0, z.shape[-1]) if into is None else into[1]
    dz = columns.of(*z.shape[:-1], like=z)
    rows, groups, static = args["rows"], args["groups"], _static_backward(args["LANES"])
    programs = max(1, min(PROGRAMS, WARPS // static["num_warps"]) // groups)
    if isinstance(rows, int):
        programs = min(programs, triton.cdiv(rows, static["BR"]))
    partial = torch.empty((programs, y.shape[-1] if weight is not None else 0), dtype=rrms.dtype, device=y.device)
    _rows_backward(
        lambda meta: (programs, groups), static, grad=flat, gr=flat.stride(0), rrms=rrms, dy=dy, dz=dz,
        dzr=columns.width, dz_first=columns.first, partial=partial, PROGRAMS=programs, **args,
    )  # fmt: skip
    dw = rrms.new_empty(0) if weight is None else partial.sum(0).to(weight.dtype)
    return dy, dz, dw
