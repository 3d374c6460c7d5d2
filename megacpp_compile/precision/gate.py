"""Whether fp8 is worth its casts for a linear of some shape.

A step multiplies three times (forward, gradients of input and weight), 2 M N K FLOPs each, and quantises the input, the
output's gradient and the weight. What the faster products gain has to pay for reading and writing those: per token it
is the two sides N and K against their product, so a linear with a short side loses in fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int | None, int, int]


@dataclass(frozen=True)
class Rates:
    """tflops: rate of the products; cast_bytes: moved per element to quantise it, in both layouts the products need."""

    tflops: float
    cast_bytes: float


# Measured on one H200 with torch 2.11: ceilings of large bf16 and fp8 products in TFLOP/s, and of a copy in TB/s. The
# bytes of a cast are counted, not measured: the amax reads 2, the cast reads 2 and writes 1 + 1 (rows, columns);
# delayed scaling knows its scale beforehand; blocks are small enough to be read once, but an input's payload is read
# and written once more, as its columns have scales of their own. Products with block scales are taken to be as fast as
# those with one. `python -m benchmarks.fp8_gate` measures what this predicts: put the rates it prints here.
BF16_TFLOPS, COPY_TB_PER_S = 752.0, 4.27
RATES = {
    "fp8_current": Rates(1320.0, 6.0),
    "fp8_block": Rates(1320.0, 5.0),
    "fp8_delayed": Rates(1320.0, 4.0),
}
# A prediction this close to one may fall to either side, and bf16 is the safe one.
LEAST_GAIN = 1.10


def gain(recipe: str, shape: Shape) -> float:
    """Predicted time in bf16 ÷ time in `recipe` of a training step's products.

    shape: (M, N, K): tokens, or None for many; out features; in features.
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


def refusal(recipe: str, shape: Shape) -> str:
    """Why `recipe` does not pay at this shape, "" where it does."""
    if recipe not in RATES:
        return ""
    predicted = gain(recipe, shape)
    if predicted >= LEAST_GAIN:
        return ""
    tokens = "many tokens" if shape[0] is None else f"{shape[0]} tokens"
    return f"{shape[1]}x{shape[2]} over {tokens}: predicted gain {predicted:.2f}, below {LEAST_GAIN:.2f}"
