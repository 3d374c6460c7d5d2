"""What the fuzz driver draws for attention over cached latent rows."""

from __future__ import annotations

import random
from typing import Any

import torch

from .fuzz_draw import Kind, Maker, pattern


def kind(draw: random.Random, op: str) -> Kind:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    d_v, rest = draw.choice(((16, 16), (16, 0), (22, 6), (64, 16), (128, 64), (512, 64)))
    return Kind(op=op,
                widths={"h": draw.choice((1, 2, 3, 16, 17, 70)), "t": draw.choice((1, 1, 1, 2, 3)), "d_v": d_v,
                        "d_qk": d_v + rest}, dtypes={"main": dtype},
                flags={"rows": draw.choice(("plain", "plain", "fp8", "codes")),
                       "index": draw.choice((torch.int32, torch.int64))},
                patterns={"q": pattern(draw, 3), "kv": pattern(draw, 2)})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    w, f = kind.widths, kind.flags
    b, s = draw.choice((1, 1, 2)), draw.choice((draw.randrange(1, 12 + room), draw.randrange(250, 700)))
    normal, scale, codebook = make.normal(kind.dtypes["main"]), None, None
    q = kind.patterns["q"].lay(normal, (b, w["t"], w["h"], w["d_qk"]))
    kv = kind.patterns["kv"].lay(normal, (b, s, w["d_qk"]))
    lengths = torch.tensor([draw.randrange(0, s + 2) for _ in range(b)], dtype=f["index"], device=make.device)
    single = make.normal(torch.float32)
    if f["rows"] == "fp8":
        scale = single(b, s, 1).abs() / 30 + 0.01
        kv = (kv.float() * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif f["rows"] == "codes":
        scale, codebook = single(b, s, 2).abs() + 0.1, single(16)
        kv = (single(b, s, w["d_qk"] // 2).abs() * 100).long().remainder(256).to(torch.uint8)
    return q, kv, lengths, scale, codebook, w["d_qk"] ** -0.5, w["d_v"]
