"""What the fuzz driver draws for linears whose weight is fp8."""

from __future__ import annotations

import random
from typing import Any

import torch

from .fp8_cases import operands
from .fuzz_draw import FLOATS, Kind, Maker, _class, outer_sizes, pattern


def kind(draw: random.Random, op: str) -> Kind:
    dims = draw.choice((1, 2, 2, 3))
    per = draw.choice(("tensor", "tensor", "tensor", "row", "row", "block"))
    sizes = (16, 32, 48, 144) if draw.random() < 0.8 else (13, 21, 150)
    return Kind(
        op=op, sizes=tuple(_class(draw) for _ in range(dims)), heads=-1,
        widths={"n": draw.choice(sizes), "k": draw.choice(sizes)},
        dtypes={"main": draw.choice(FLOATS), "out": draw.choice((torch.bfloat16, torch.bfloat16, *FLOATS))},
        layout=(False, False, False), flags={"per": per, "bias": draw.random() < 0.5, "in_place": False},
        patterns={"main": pattern(draw, dims)}, table_dims=(),
    )  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    outer, w, f = outer_sizes(kind, draw, room), kind.widths, kind.flags

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return make.normal(dtype)(*shape)

    main, out = kind.dtypes["main"], kind.dtypes["out"]
    _, payload, scale, bias, _ = operands(rand, main, (1,), w["n"], w["k"], f["per"], f["bias"])
    if kind.op == "linear_fp8_weight":
        return kind.patterns["main"].lay(make.normal(main), (*outer, w["k"])), payload, scale, bias, out
    return kind.patterns["main"].lay(make.normal(main), (*outer, w["n"])), payload, scale, out
