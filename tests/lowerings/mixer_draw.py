"""What the fuzz driver draws for the ops around a mixer's scan."""

from __future__ import annotations

import random
from typing import Any

import torch

from .agreement import reference_of
from .fuzz_draw import FLOATS, Kind, Maker, Pattern, _class, outer_sizes, pattern


def kind(draw: random.Random, op: str) -> Kind:
    convolution = op.startswith("causal_conv1d")
    dims = 2 if convolution else draw.choice((1, 2, 2, 3))
    dtype, group = draw.choice(FLOATS), draw.choice((1, 8, 13, 32, 48))
    other = lambda: draw.choice(FLOATS) if draw.random() < 0.2 else dtype  # noqa: E731
    return Kind(op=op, sizes=tuple(_class(draw) for _ in range(dims)),
                widths={"channels": draw.choice((1, 7, 16, 40, 130)), "taps": draw.choice((1, 2, 2, 3, 3, 4, 4, 4, 6)),
                        "group": group, "groups": draw.choice((1, 1, 2, 3))},
                dtypes={"main": dtype, "gate": other(), "weight": other(), "out": other()},
                flags={"bias": draw.random() < 0.6, "activation": draw.choice(("", "silu", "silu")),
                       "first": draw.random() < 0.5, "weight": draw.random() < 0.8, "number": draw.random() < 0.1,
                       "sigmoid": draw.random() < 0.4,
                       "documents": draw.choice((None, None, torch.int32, torch.int64))},
                patterns={n: _pattern(draw, dims) for n in ("main", "gate", "grad")})  # fmt: skip


def _pattern(draw: random.Random, dims: int) -> Pattern:
    """Mostly channels of a projection, as kernels of rows take them."""
    if draw.random() < 0.2:
        return pattern(draw, dims)
    return Pattern(tuple(range(dims)), before=draw.choice((0, 0, 1, 16)), behind=draw.choice((0, 0, 3, 16)))


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    outer, w, f, dtypes = outer_sizes(kind, draw, room), kind.widths, kind.flags, kind.dtypes
    convolution = kind.op.startswith("causal_conv1d")
    channels = w["channels"] if convolution else w["group"] * w["groups"]

    def lay(name: str, dtype: str) -> Any:
        return kind.patterns[name].lay(make.normal(dtypes[dtype]), (*outer, channels))

    main, weights = lay("main", "main"), make.normal(dtypes["weight"])
    grad = make.normal(dtypes["out"])(1).expand(*outer, channels) if f["number"] else lay("grad", "out")
    if convolution:
        operands = main, weights(channels, w["taps"]), weights(channels) if f["bias"] else None, f["activation"]
        last = []
        if f["documents"] is not None:
            begins = [[draw.random() < 0.3 for _ in range(outer[1])] for _ in range(outer[0])]
            flags = torch.tensor(begins, dtype=f["documents"], device=make.device).reshape(outer)
            last = [flags.cumsum(-1).to(f["documents"])]
        return (*operands, dtypes["out"], *last) if kind.op == "causal_conv1d" else (grad, *operands, *last)
    operands = main, lay("gate", "gate"), weights(channels) if f["weight"] else None
    act = "sigmoid" if f["sigmoid"] else "silu"
    if kind.op == "gated_rms_norm":
        return *operands, 1e-3, w["group"], f["first"], dtypes["out"], act
    _, rrms = reference_of("gated_rms_norm")(*operands, 1e-3, w["group"], f["first"], dtypes["out"], act)
    return grad, *operands, rrms, w["group"], f["first"], act
