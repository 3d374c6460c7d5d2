"""The GEMMs of `grouped` and `grouped_fp8` on CUDA: by kernels in Gluon on Hopper, where rows are many and TMA takes
them as they lie, else by Triton's and CUTLASS's."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_compile._torch import present
from megacpp_compile._torch.ops import grouped_mm
from megacpp_compile.lowerings._activation import Activation
from megacpp_compile.lowerings._kernels import triton_gated, triton_gated_gradients, triton_grouped
from megacpp_compile.lowerings._kernels.gluon_launch import Tile, address, addresses, launch, tile_layout
from megacpp_compile.lowerings._kernels.hopper import GluonKernels, lacking
from megacpp_compile.lowerings._kernels.kept_tensors import table
from megacpp_compile.lowerings._kernels.triton_launch import power_of_2
from megacpp_compile.lowerings._kernels.triton_quantise import FLOAT8
from megacpp_compile.targets.chips import multiprocessors, on_hopper

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor  # launches take it

    from megacpp_compile.lowerings._kernels.gluon_grouped import grouped_rows_hopper
    from megacpp_compile.lowerings._kernels.gluon_grouped_weights import grouped_weights_hopper

    kernels = GluonKernels("")
except (ImportError, AttributeError) as error:
    kernels = GluonKernels(lacking(error))

NAME = "grouped GEMMs"
# What tensor cores multiply here; e4m3 only along what is summed.
DTYPES = torch.bfloat16, FLOAT8
# Scales of the rows of x, and of those of the weights [E, n]: factors of a GEMM.
Scales = tuple[Tensor | None, Tensor | None]
UNSCALED: Scales = (None, None)
# A tile's sides, rows of a step of the weights' gradients, and bytes of a step elsewhere.
SHORT, LONG, STEP, STEP_BYTES = 128, 256, 64, 128
# With fewer rows in all, launches take longer; with fewer of a group, tiles are cut, and a weight is read for one row
# of tiles alone. There Triton's kernels are as fast or faster: of two xs up to more rows.
LEAST_ROWS, LEAST_OF_GROUP, LEAST_OF_TWO = 8192, 256, 384
# Columns of tiles from which on programs have NEAR rows of them at a time: gate and up of 8 experts of 4096 x 14336, of
# 112 columns, take 3.3 ms for 3.9; with 6 to 23 columns GEMMs take 2 to 14 % more.
MANY_COLUMNS, NEAR = 32, 16
# Tiles of a weight from which on CUTLASS is faster: by 1 to 4 % for 8 experts of 4096 x 14336.
MANY_TILES = 1024
# Bytes at which rows begin for TMA, and for copies and stores of so many, which are EIGHT numbers.
ALIGNED, EIGHT = 16, 8
# Units that TMA counts, and their bytes.
MOST_UNITS, LARGEST_UNIT = 2**31 - 1, 2**40 - ALIGNED
# Bytes of a unit where all weights lie in one place.
ANY_UNIT = 512


def rows(
    xs: list[Tensor], weights: list[Tensor], offsets: Tensor, transposed: bool, take: Tensor | None,
    scales: Scales = UNSCALED, dtype: torch.dtype | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[S, n]: as `triton_grouped.rows`."""
    total, n = (xs[0] if take is None else take).shape[0], weights[0].shape[-1 if transposed else -2]

    def in_gluon(lying: _Lying) -> Tensor:
        out = xs[0].new_empty((total, n), dtype=dtype)
        _launch_rows(xs, lying, offsets, take, out, scales)
        return out

    def in_triton() -> Tensor:
        return triton_grouped.rows(xs, weights, offsets, transposed, take, scales, dtype, bias)

    plain = bias is None and (take is None or len(xs) == 1) and n % EIGHT == 0 and _made(xs[0], dtype)
    least = (LEAST_OF_GROUP if len(xs) == 1 else LEAST_OF_TWO) * offsets.shape[0]
    if plain and _serve(total, least, *xs) and (lying := _lying(weights, transposed)):
        return kernels.or_in_triton(NAME, functools.partial(in_gluon, lying), in_triton)
    return in_triton()


def gated(
    x: Tensor, w_gate: list[Tensor], w_up: list[Tensor], offsets: Tensor, take: Tensor | None, activation: str,
    scales: Scales = UNSCALED, dtype: torch.dtype | None = None, b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `triton_gated.gated`."""
    total, fused = (x if take is None else take).shape[0], not w_up
    n = w_gate[0].shape[-2] // (1 + fused)

    def in_gluon(lying: _Lying) -> tuple[Tensor, Tensor, Tensor]:
        hidden = [x.new_empty((total, 2 * n if fused else n), dtype=dtype) for _ in range(2 - fused)]
        gate, up = hidden[0].chunk(2, 1) if fused else hidden
        out = x.new_empty((total, n), dtype=dtype)
        _launch_rows([x], lying, offsets, take, out, scales, (gate, up), Activation.parse(activation))
        return hidden[0], out.new_empty(0) if fused else up, out

    def in_triton() -> tuple[Tensor, Tensor, Tensor]:
        return triton_gated.gated(x, w_gate, w_up, offsets, take, activation, scales, dtype, b_gate, b_up)

    plain = b_gate is None and b_up is None and n % EIGHT == 0 and _made(x, dtype)
    least = LEAST_OF_GROUP * offsets.shape[0]
    lying = _lying([*w_gate, *w_up], halves=fused) if plain and _serve(total, least, x) else None
    # Rows of gate and of up make a tile: of weights that lie across, these would be columns.
    if lying and not lying.across:
        return kernels.or_in_triton(NAME, functools.partial(in_gluon, lying), in_triton)
    return in_triton()


def gradients(
    grad: Tensor, weights: list[Tensor], hidden: list[Tensor], gates: Tensor, offsets: Tensor, take: Tensor | None,
    activation: str, x_scale: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `triton_gated_gradients.gradients`."""
    gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)
    total, n = gate.shape

    def in_gluon(lying: _Lying) -> tuple[Tensor, Tensor, Tensor]:
        d_a = grad.new_empty((total, n), dtype=dtype)
        _launch_rows([grad], lying, offsets, take, d_a, (x_scale, None))
        return triton_gated_gradients.gradients_of_rows(d_a, gate, up, gates, offsets, activation)

    def in_triton() -> tuple[Tensor, Tensor, Tensor]:
        return triton_gated_gradients.gradients(
            grad, weights, hidden, gates, offsets, take, activation, x_scale, dtype
        )

    plain = gates.dtype == torch.float32 and gate.dtype == torch.bfloat16 and _made(grad, dtype)
    least, plain = LEAST_OF_GROUP * offsets.shape[0], plain and n % EIGHT == 0
    if plain and _serve(total, least, grad, gate, up) and (lying := _lying(weights, transposed=True)):
        return kernels.or_in_triton(NAME, functools.partial(in_gluon, lying), in_triton)
    return in_triton()


def weights(grad: Tensor, x: Tensor, offsets: Tensor, take_grad: Tensor | None, take_x: Tensor | None) -> Tensor:
    """[E, n, d]: as `grouped.weights`."""

    def in_gluon() -> Tensor:
        experts, n, k = offsets.shape[0], grad.shape[1], x.shape[1]
        wide = triton.cdiv(n, SHORT) * triton.cdiv(k, LONG) <= triton.cdiv(n, LONG) * triton.cdiv(k, SHORT)
        tall, lanes = (SHORT, LONG) if wide else (LONG, SHORT)
        out = x.new_empty((experts, n, k))
        launch(
            grouped_weights_hopper, (multiprocessors(x.device),), grad=grad, grad_tiles=_tile(grad, STEP, tall), x=x,
            x_tiles=_tile(x, STEP, lanes), take_grad=offsets if take_grad is None else take_grad,
            take_x=offsets if take_x is None else take_x, ends=offsets, out=out,
            tiles=experts * triton.cdiv(n, tall) * triton.cdiv(k, lanes), gs=grad.stride(0), xs=x.stride(0), N=n, K=k,
            TAKE_GRAD=take_grad is not None, TAKE_X=take_x is not None, STAGES=4, BM=tall, BN=lanes,
            NEAR=_near(triton.cdiv(k, lanes)), REGISTERS=184, COPY_REGISTERS=104, num_warps=4,
        )  # fmt: skip
        return out

    def otherwise() -> Tensor:
        if not _cutlass(grad, x):
            return triton_grouped.weights(grad, x, offsets, take_grad, take_x)
        # Gathered for it by ATen: 0.20 ms for 98304 rows of 2048 channels on an H200.
        left = grad.contiguous() if take_grad is None else grad.index_select(0, take_grad)
        return grouped_mm(left.t(), x.contiguous() if take_x is None else x.index_select(0, take_x), offsets)

    tiles = triton.cdiv(grad.shape[1], SHORT) * triton.cdiv(x.shape[1], LONG)
    if tiles < MANY_TILES and _serve((grad if take_grad is None else take_grad).shape[0], 0, grad, x):
        return kernels.or_in_triton(NAME, in_gluon, otherwise)
    return otherwise()


def _launch_rows(
    xs: list[Tensor], weights: _Lying, offsets: Tensor, take: Tensor | None, out: Tensor, scales: Scales,
    hidden: tuple[Tensor, Tensor] | None = None, activation: Activation | None = None,
) -> None:  # fmt: skip
    """hidden: where rows of gate and up go, `out` being the activated hidden."""
    x, pair, experts, step = xs[0], hidden is not None, offsets.shape[0], STEP_BYTES // xs[0].element_size()
    gate, up = hidden or (out, out)
    width = SHORT if pair else LONG
    first, second = (x if take is not None else _tile(x, SHORT, step) for x in (x, xs[-1]))
    launch(
        grouped_rows_hopper, (multiprocessors(x.device),), x=first, x2=second, weights=weights.tiles(width, step),
        places=weights.places, take=offsets if take is None else take, ends=offsets, out=out, gate=gate, up=up,
        x_scale=scales[0], w_scale=scales[1], rows=out.shape[0], xs=x.stride(0), hs=gate.stride(0), depth=x.shape[1],
        N=out.shape[1], E=experts, EP=power_of_2(experts + 1), TAKE=take is not None, PAIR=pair, SECOND=len(xs) == 2,
        ACROSS=weights.across, STAGES=4, BN=LONG, NEAR=_near(triton.cdiv(out.shape[1], width)),
        NAME=activation and activation.name, CURVE=activation and activation.constants, REGISTERS=208,
        COPY_REGISTERS=64, num_warps=4,
    )  # fmt: skip


def _serve(total: int, least: int, *tensors: Tensor) -> bool:
    """Whether the kernels in Gluon take a call of so many rows, which lie in these."""
    enough = total >= max(LEAST_ROWS, least)
    return enough and not kernels.missing and on_hopper(tensors[0].device) and _aligned(*tensors)


def _made(x: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether the kernels write a result of this dtype, by default that of x."""
    return (dtype or x.dtype) == torch.bfloat16


def _near(columns: int) -> int:
    return NEAR if columns > MANY_COLUMNS else 1


def _aligned(*tensors: Tensor) -> bool:
    """Whether TMA, and copies of 16 bytes, take rows of these as they lie."""
    return all(
        t.dtype in DTYPES
        and t.stride(-1) == 1
        and not any(n * t.element_size() % ALIGNED for n in (t.shape[-1], *t.stride()[:-1]))
        and address(t) % ALIGNED == 0
        for t in tensors
    )


def _cutlass(*tensors: Tensor) -> bool:
    """Whether torch's grouped GEMM (CUTLASS) takes these rows: bfloat16, each row aligned."""
    return present(grouped_mm) and all(
        t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 and on_hopper(t.device) for t in tensors
    )


def _tile(t: Tensor, rows: int, lanes: int) -> Tile:
    return Tile(t, list(t.shape), list(t.stride()), [rows, lanes], tile_layout((rows, lanes), t.dtype))


class _Lying(NamedTuple):
    """Weights wherever they lie, as one array [units, rows, lanes] that begins with the first of them in memory."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    places: Tensor  # [len] int32: at which unit each begins
    across: bool  # what is summed lies across, in rows

    def tiles(self, results: int, step: int) -> Tile:
        """Of so many results, and of a step of what is summed."""
        tile = (1, step, results) if self.across else (1, results, step)
        return Tile(self.base, self.shape, self.strides, list(tile), tile_layout(tile, self.base.dtype))


def _lying(weights: list[Tensor], transposed: bool = False, halves: bool = False) -> _Lying | None:
    """How weights [n, k] or [E, n, k] lie, if TMA finds all by one description and tensor cores take them, else None.
    transposed: n is summed, else k. halves: the first half of the rows of each, and then the second of each, as weights
    of their own. There may be hundreds: what is asked of each one here is host time of every launch."""
    first = weights[0]
    if not triton_grouped.equal_strides(weights) or len({w.shape for w in weights}) != 1:
        return None
    begins = addresses(weights)
    begin = min(begins)
    behind = tuple([a - begin for a in begins])
    found = _described(first.shape, first.stride(), first.dtype, begin % ALIGNED, behind, transposed, halves)
    if found is None:
        return None
    shape, strides, places, across = found
    base = weights[begins.index(begin)]
    return _Lying(base, [*shape], [*strides], table(places, torch.int32, first.device), across)


@functools.lru_cache(256)
def _described(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, begin: int, begins: tuple[int, ...],
    transposed: bool, halves: bool,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool] | None:  # fmt: skip
    """Shape and strides of all weights as units of rows, at which unit each begins, and whether they lie across; None
    as in `_lying`. begins: by how many bytes each tensor lies behind the first, which does `begin` behind a multiple of
    `ALIGNED`."""
    (n, k), (of_n, of_k), size = shape[-2:], stride[-2:], dtype.itemsize
    by_columns = of_k != 1
    rows, lanes, step = (k, n, of_k) if by_columns else (n, k, of_n)
    if dtype not in DTYPES or 1 not in (of_n, of_k) or halves and (by_columns or n % 2):
        return None
    if by_columns != transposed and dtype == FLOAT8:
        return None
    between, each = (stride[0] * size, shape[0]) if len(shape) == 3 else (0, 1)
    rows //= 1 + halves
    half = rows * step * size if halves else 0
    unit, units, behind = _places(begins, between, each, half)
    aligned = not any(byte % ALIGNED for byte in (begin, unit, step * size, lanes * size))
    if not aligned or units > MOST_UNITS or unit > LARGEST_UNIT:
        return None
    return (units, rows, lanes), (unit // size, step, 1), behind, by_columns != transposed


@functools.lru_cache(256)
def _places(
    begins: tuple[int, ...], between: int = 0, each: int = 1, half: int = 0
) -> tuple[int, int, tuple[int, ...]]:
    """(bytes of a unit, how many units all span, how many units each lies behind the first). begins: by how many bytes
    tensors do, of `each` weights with so many bytes `between` them; half: bytes of the first halves of weights, the
    second of which are weights of their own, if they are. FSDP gathers weights elsewhere in each step: addresses would
    be others each time."""
    places = [a + e * between for a in begins for e in range(each)]
    places += [a + half for a in places] if half else []
    unit = math.gcd(*places) or ANY_UNIT
    behind = tuple(place // unit for place in places)
    return unit, max(behind) + 1, behind
