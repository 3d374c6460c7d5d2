"""What the fuzz driver draws for top-k sparse MLA."""

from __future__ import annotations

import random
from typing import Any

import torch

from .agreement import reference_of
from .fuzz_draw import Kind, Maker, pattern

SCALES = (None, None, "tensor", "sequence", "row", "block")


def kind(draw: random.Random, op: str) -> Kind:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    d_v, rest = draw.choice(((16, 16), (16, 0), (21, 7), (64, 16), (128, 64), (512, 64)))
    per = draw.choice(SCALES) if op == "sparse_mla" else None
    return Kind(
        op=op, widths={"h": draw.choice((1, 2, 3, 16, 17, 70)), "d_v": d_v, "d_qk": d_v + rest,
                "k": draw.choice((4, 7, 16, 40, 70))},
        dtypes={"main": dtype}, flags={"causal": draw.random() < 0.7, "per": per,
               "index": draw.choice((torch.int32, torch.int64)), "lse": draw.random() < 0.5},
        # Equal rows would leave the scores without a gradient.
        patterns={"q": pattern(draw, 3), "kv": pattern(draw, 3, may_repeat=False), "grad": pattern(draw, 3)},
    )  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    w, f = kind.widths, kind.flags
    b, t = draw.choice((1, 1, 2)), draw.choice((1, 2, max(1, room // 4)))
    # Enough rows in sight that not every query has but one, whose gradient is a zero that is all rounding.
    s = draw.randrange(12, 20 + room)
    offset = draw.randrange(10, 12 + room)
    normal = make.normal(kind.dtypes["main"])
    q = kind.patterns["q"].lay(normal, (b, t, w["h"], w["d_qk"]))
    kv = kind.patterns["kv"].lay(normal, (b, s, 1, w["d_qk"]))
    named = [draw.randrange(-2, s + 3) for _ in range(b * t * w["k"])]
    indices = torch.tensor(named, dtype=f["index"], device=make.device).view(b, t, 1, w["k"])
    indices[..., :2] = torch.tensor([0, 5], dtype=f["index"], device=make.device)
    settings = w["d_qk"] ** -0.5, w["d_v"], f["causal"], offset
    if kind.op == "sparse_mla_backward":
        out, lse = reference_of("sparse_mla")(q, kv, indices, None, *settings)
        grad = kind.patterns["grad"].lay(normal, out.shape)
        return grad, make.normal(lse.dtype)(*lse.shape) if f["lse"] else None, q, kv, indices, out, lse, *settings
    scale = None
    if f["per"]:
        n = -(-w["d_qk"] // 128) if f["per"] == "block" else 1
        one = {"tensor": (1, 1, 1, 1), "sequence": (b, 1, 1, 1)}.get(f["per"], (b, s, 1, n))
        scale = (make.normal(torch.float32)(*one).abs() / 30 + 0.01).expand(b, s, 1, n)
        kv = (kv.float() * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, kv, indices, scale, *settings
