"""Cases of an indexer's scores."""

from __future__ import annotations

import random
from typing import Any

import torch

from .cases import each_case
from .fuzz_draw import FLOATS, Kind, Maker, _class, outer_sizes, pattern


def operands(rand, dtype, b=2, t=7, h=3, c=24, s=11, layout="plain", wide=True):
    """Weights in float32 or better, as their own projection is cast, or in the operands' dtype."""
    q, k = rand(b, t, h, c, dtype=dtype), rand(b, s, c, dtype=dtype)
    if layout == "parts":  # of wider buffers, heads before tokens, tokens before sequences
        q = rand(b, h, t, c + 8, dtype=dtype).transpose(1, 2)[..., 8:]
        k = rand(s, b, c + 3, dtype=dtype).transpose(0, 1)[..., :c]
    return q, k, rand(b, t, h, dtype=torch.promote_types(dtype, torch.float32) if wide else dtype), c**-0.5


FORMS = {"plain": {}, "parts": {"layout": "parts"}, "one_head": {"h": 1}, "one_query": {"t": 1},
         "several_tiles": {"b": 1, "t": 70, "s": 150, "c": 32}, "channels_of_no_power_of_two": {"c": 40},
         "narrow_weights": {"wide": False}, "no_batch": {"b": 0}, "no_key": {"s": 0}}  # fmt: skip


@each_case("index_scores", FORMS)
def forward(rand, dtype, **options):
    return *operands(rand, dtype, **options), torch.promote_types(dtype, torch.float32)


@each_case("index_scores_backward", FORMS)
def backward(rand, dtype, **options):
    q, k, weights, scale = operands(rand, dtype, **options)
    return rand(*q.shape[:2], k.shape[1], dtype=weights.dtype), q, k, weights, scale


def kind(draw: random.Random, op: str) -> Kind:
    main = draw.choice(FLOATS)
    return Kind(op=op, sizes=(_class(draw), _class(draw)),
                widths={"h": draw.choice((1, 2, 5)), "c": draw.choice((8, 16, 24, 64, 130)), "s": draw.choice((1, 7, 70, 130))},
                dtypes={"main": main, "out": draw.choice(FLOATS) if draw.random() < 0.2 else main,
                        "weights": torch.promote_types(main, torch.float32) if draw.random() < 0.6 else main}, flags={},
                patterns={"q": pattern(draw, 3), **{name: pattern(draw, 2) for name in ("k", "weights", "grad")}})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    (b, t), w, dtypes = outer_sizes(kind, draw, room), kind.widths, kind.dtypes
    lay = lambda name, shape, dtype: kind.patterns[name].lay(make.normal(dtypes[dtype]), shape)  # noqa: E731
    given = (lay("q", (b, t, w["h"], w["c"]), "main"), lay("k", (b, w["s"], w["c"]), "main"),
             lay("weights", (b, t, w["h"]), "weights"), w["c"] ** -0.5)  # fmt: skip
    return (*given, dtypes["out"]) if kind.op == "index_scores" else (lay("grad", (b, t, w["s"]), "out"), *given)
