"""Predicts whether fp8 is worth its casts for a linear of a given shape, and for routed experts.

A step runs three GEMMs (forward, gradients of input and weight), 2 M N K FLOPs each, and quantises the input, the
output's gradient and the weight. The time that the faster GEMMs save has to exceed the time of reading and writing
those. Per token the casts grow with N + K and the GEMMs with N K, so a linear with a short side loses in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int | None, int, int]  # (M, N, K): tokens, or None where unknown; out features; in features


@dataclass(frozen=True)
class Rates:
    """What fp8 costs and gains under one recipe.

    Attributes:
        tflops: rate of its GEMMs, in TFLOP/s.
        cast_bytes: bytes moved per element to quantise it, in both layouts that the GEMMs need.
    """

    tflops: float
    cast_bytes: float


# Measured on one H200 with torch 2.11: ceilings of large bf16 and fp8 GEMMs in TFLOP/s, and of a copy in TB/s. The
# bytes of a cast are counted, not measured: the amax reads 2, the cast reads 2 and writes 1 + 1 (rows, columns);
# delayed scaling knows its scale beforehand; blocks are small enough to be read once, but an input's payload is read
# and written once more, as its columns have scales of their own. GEMMs with block scales are assumed to be as fast as
# those with one. `python -m benchmarks.fp8_gate` measures what this predicts: put the rates it prints here.
BF16_TFLOPS, COPY_TB_PER_S = 752.0, 4.27
RATES = {
    "fp8_current": Rates(1320.0, 6.0),
    "fp8_block": Rates(1320.0, 5.0),
    "fp8_delayed": Rates(1320.0, 4.0),
}
# A prediction this close to one may fall to either side, and bf16 is the safe one.
LEAST_GAIN = 1.10


@dataclass(frozen=True)
class ExpertRates:
    """What fp8 changes for routed experts.

    Attributes:
        bf16_tflops: TFLOP/s of the grouped GEMMs by weights, in forward and for their inputs' gradients, in bf16.
        fp8_tflops: the same in fp8.
        rows_tb_per_s: TB/s of the casts of rows; each reads 2 bytes an element and writes 1.
        weights_tb_per_s: likewise of weights.
    """

    bf16_tflops: float
    fp8_tflops: float
    rows_tb_per_s: float
    weights_tb_per_s: float


# Measured on one H200 with torch 2.11 and Triton 3.6, each kernel alone, from CUDA graphs: 64 experts of 1408 x 2048,
# 98304 rows. GEMMs of 3.40 TFLOP in 5.90 ms and 3.52, 1.95 GB for rows in 0.53 ms. The weights' payloads move 1.66 GB
# each: 0.46 ms in forward and 0.39 transposed, in backward. This predicts what was measured there, 1.20.
EXPERTS = ExpertRates(577.0, 965.0, 3.7, 3.9)
EXPERTS_MULTIPLE = 128  # of both sides of a weight, where those GEMMs have no ragged tile


def experts_gain(tokens: int, slots: int, experts: int, d: int, n: int) -> float:
    """Predicted time in bf16 ÷ time in fp8 of a training step's GEMMs by the experts' weights; the GEMMs that make the
    weights' gradients stay in bf16 and are not counted.

    tokens: rows that enter the layer; slots: rows of all experts together; d: the model's channels; n: channels of
    gate and of up.
    """
    flops = 12.0 * slots * d * n
    rows = 3.0 * (tokens * d + slots * (d + 3 * n))  # x, the output's gradient, and a, gate's and up's gradients
    weights = 2 * 3.0 * 3 * experts * d * n
    plain = flops / EXPERTS.bf16_tflops
    return plain / (flops / EXPERTS.fp8_tflops + rows / EXPERTS.rows_tb_per_s + weights / EXPERTS.weights_tb_per_s)


def experts_refusal(tokens: int | None, slots: int | None, experts: int, d: int, n: int) -> str:
    """Why "fp8_current" does not pay for these routed experts, "" where it does.

    Arguments as in `experts_gain`; tokens and slots are None where they are not known before the experts run.
    """
    size = f"{experts} experts of {n}x{d}"
    if tokens is None or slots is None:
        return f"{size} over a number of tokens that is not fixed"
    if any(side % EXPERTS_MULTIPLE for side in (d, n)):
        return f"{size}: measured at multiples of {EXPERTS_MULTIPLE} only"
    predicted = experts_gain(tokens, slots, experts, d, n)
    if predicted >= LEAST_GAIN:
        return ""
    return f"{size} over {slots} rows: predicted gain {predicted:.2f}, below {LEAST_GAIN:.2f}"


def gain(recipe: str, shape: Shape) -> float:
    """Predicted time in bf16 ÷ time in `recipe` of a training step's three GEMMs, casts included.

    shape: (M, N, K), i.e. tokens (None for many), out features, in features.
    """
    m, n, k = shape
    rates = RATES[recipe]
    tokens = float(m) if m is not None else 1.0
    # Without a number of tokens, per token: the weight's cast is shared by all of them.
    elements = tokens * (n + k) + (n * k if m is not None else 0)
    flops = 6.0 * tokens * n * k
    plain = flops / (BF16_TFLOPS * 1e12)
    fp8 = flops / (rates.tflops * 1e12) + rates.cast_bytes * elements / (COPY_TB_PER_S * 1e12)
    return plain / fp8


def joining_gain(recipe: str, shape: Shape) -> float:
    """As `gain`, for a linear whose weight joins that of another one with the same input: the input's casts are the
    other one's anyway, and the two gradients of the input need no sum, as they come out of one GEMM."""
    m, n, k = shape
    rates = RATES[recipe]
    tokens = float(m) if m is not None else 1.0
    flops = 6.0 * tokens * n * k
    plain = flops / (BF16_TFLOPS * 1e12) + 6.0 * tokens * k / (COPY_TB_PER_S * 1e12)
    casts = rates.cast_bytes * (tokens * n + (n * k if m is not None else 0))
    return plain / (flops / (rates.tflops * 1e12) + casts / (COPY_TB_PER_S * 1e12))


def joining_moves_less(shapes: Sequence[Shape]) -> bool:
    """Whether linears with the same input move less as one GEMM: their gradients have to be put side by side, read and
    written in 16 bits, and the gradients of the input, of which there is one for each otherwise, need no sum."""
    k = shapes[0][2]
    return 4 * sum(n for _, n, _ in shapes) < 6 * k * (len(shapes) - 1)


def refusal(recipe: str, shape: Shape) -> str:
    """Why `recipe` does not pay at this shape, "" where it does. shape: as in `gain`."""
    if recipe not in RATES:
        return ""
    predicted = gain(recipe, shape)
    if predicted >= LEAST_GAIN:
        return ""
    tokens = "many tokens" if shape[0] is None else f"{shape[0]} tokens"
    return f"{shape[1]}x{shape[2]} over {tokens}: predicted gain {predicted:.2f}, below {LEAST_GAIN:.2f}"
