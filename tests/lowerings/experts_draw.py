"""What the fuzz driver draws for routed experts."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .cases import CASES, CURVES, EXPERTS
from .fuzz_draw import FLOATS, Kind, Maker


def kind(draw: random.Random, op: str) -> Kind:
    options = dict(EXPERTS[draw.choice(sorted(EXPERTS))])
    if draw.random() < 0.3:
        options["activation"] = draw.choice(sorted(CURVES.values()))
    if draw.random() < 0.3:
        options["biased"] = draw.choice(("up", "down", "up down", "gate up down"))
        if options.get("layout", "pair") != "pair":
            options["biased"] = options["biased"].removeprefix("gate ")
    options.setdefault("experts", draw.choice((1, 2, 5, 8)))
    options.setdefault("choices", draw.randrange(1, min(4, options["experts"]) + 1))
    options.setdefault("d", draw.choice((8, 24, 37, 64)))
    options.setdefault("n", draw.choice((8, 16, 29, 48)))
    dtype = draw.choice(FLOATS)
    return Kind(op=op, dtypes={"main": dtype}, flags={"options": options})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    options = {"tokens": draw.choice((0, 1, 3, max(1, room // 4))), **kind.flags["options"]}
    case = CASES[kind.op]["odd_sizes"]  # any label of the op: its options are replaced

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return make.normal(dtype)(*shape)

    made = case(rand, kind.dtypes["main"], **options)
    return tree_map(lambda a: a.to(make.device) if isinstance(a, torch.Tensor) else a, made)
