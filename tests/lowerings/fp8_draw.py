"""What the fuzz driver draws for linears in float8, and those whose weight is fp8."""

from __future__ import annotations

import random
from typing import Any

import torch

from .agreement import reference_of
from .fp8_cases import operands
from .fuzz_draw import FLOATS, Kind, Maker, _class, outer_sizes, pattern


def kind(draw: random.Random, op: str) -> Kind:
    dims = draw.choice((1, 2, 2, 3))
    per = draw.choice(("tensor", "tensor", "tensor", "row", "row", "block"))
    sizes: tuple[int, ...] = (16, 32, 48, 144) if draw.random() < 0.8 else (13, 21, 150)
    rows: tuple[str | int, ...] = tuple(_class(draw) for _ in range(dims))
    if op.startswith("fp8_block") and draw.random() < 0.8:  # of which a GPU takes whole blocks
        sizes, rows = (128, 256, 384, 512), (*(draw.choice((1, 2)) for _ in rows[1:]), 128 * draw.choice((1, 2, 3)))
    return Kind(op=op, sizes=rows, widths={"n": draw.choice(sizes), "k": draw.choice(sizes)},
                dtypes={"main": draw.choice(FLOATS), "out": draw.choice((torch.bfloat16, torch.bfloat16, *FLOATS))},
                flags={"per": per, "bias": draw.random() < 0.5, "format": draw.choice(("e4m3", "e5m2")),
                       "wide": draw.random() < 0.3}, patterns={"main": pattern(draw, dims)})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    outer, w, f = outer_sizes(kind, draw, room), kind.widths, kind.flags
    if kind.op == "push_maxima":
        n, gradients = w["n"], w["k"]
        rand = make.normal(torch.float32)
        return rand(5, n + gradients).abs(), rand(n).abs(), list(rand(gradients).abs())

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return make.normal(dtype)(*shape)

    main, out = kind.dtypes["main"], kind.dtypes["out"]
    if kind.op.startswith("fp8_"):
        x = kind.patterns["main"].lay(make.normal(main), (*outer, w["k"]))
        return _quantised(kind, x if x.dim() > 1 else x.unsqueeze(0), make, out)
    _, payload, scale, bias, _ = operands(rand, main, (1,), w["n"], w["k"], f["per"], f["bias"])
    if kind.op == "linear_fp8_weight":
        return kind.patterns["main"].lay(make.normal(main), (*outer, w["k"])), payload, scale, bias, out
    return kind.patterns["main"].lay(make.normal(main), (*outer, w["n"])), payload, scale, out


def _quantised(kind: Kind, x: torch.Tensor, make: Maker, out: torch.dtype) -> tuple[Any, ...]:
    """Arguments of an op of `fp8_linear`'s or `fp8_block_linear`'s, for such an input."""
    if "block" in kind.op or "tiles" in kind.op:
        return _by_blocks(kind, x, make, out)
    format = kind.flags["format"]
    if kind.op in ("fp8_quantize", "fp8_quantize_transposed"):
        return x, format
    past = torch.tensor([0.0 if kind.flags["per"] == "row" else 3.0], device=x.device)
    if kind.op == "fp8_quantize_delayed":
        return x, past, format, kind.flags["bias"]
    n, main, quantise = kind.widths["n"], kind.dtypes["main"], reference_of("fp8_quantize")
    if kind.op in ("fp8_quantize_weights", "fp8_quantize_experts"):
        parts = 1 + kind.flags["bias"]
        own = [make.normal(main)(n, kind.widths["k"]) for _ in range(2 * parts)]
        return (own, *([parts] if "experts" in kind.op else []), kind.flags["wide"])
    weight = make.normal(main)(n, kind.widths["k"])
    (x8, x_scale), (w8, w_scale) = (quantise(t, "e4m3") for t in (x, weight))
    weights = list(weight.split([16, n - 16])) if kind.flags["bias"] and n > 16 else [weight]
    if kind.op == "fp8_linear_backward":
        grads = [make.normal(main)(*x.shape[:-1], w.shape[0]) for w in weights]
        delayed = (past, False) if kind.flags["per"] != "tensor" else ()
        wide = (*(delayed or (None, False)), torch.float32) if kind.flags["wide"] else delayed
        given = (*(wide or (None, False, None)), w8.t().contiguous()) if kind.flags["wide"] else wide
        return grads, x8, x_scale, weights, w_scale, format, out, *given
    biases = [make.normal(main)(w.shape[0]) for w in weights] if kind.flags["bias"] else []
    return x, weights, x8, x_scale, w8, w_scale, biases, format, out


def _by_blocks(kind: Kind, x: torch.Tensor, make: Maker, out: torch.dtype) -> tuple[Any, ...]:
    n, main, quantise = kind.widths["n"], kind.dtypes["main"], reference_of("fp8_quantize_tiles")
    if kind.op == "fp8_quantize_tiles":
        return x, 1 if kind.flags["bias"] else 128
    weight = make.normal(main)(n, kind.widths["k"])
    (x8, x_scale), (w8, w_scale) = quantise(x, 1), quantise(weight, 128)
    if kind.op == "fp8_block_linear_backward":
        wide = [torch.float32] if kind.flags["wide"] else []
        return make.normal(main)(*x.shape[:-1], n), x8, x_scale, weight, w_scale, out, *wide
    return x, weight, x8, x_scale, w8, w_scale, make.normal(main)(n) if kind.flags["bias"] else None, out
