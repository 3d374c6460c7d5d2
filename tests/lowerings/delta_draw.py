"""What the fuzz driver draws for the gated delta rule, and for linear attention with gates."""

from __future__ import annotations

import random
from typing import Any

import torch

from .agreement import reference_of
from .delta_cases import DECAYS, GATES
from .fuzz_draw import FLOATS, Kind, Maker, outer_sizes, pattern


def kind(draw: random.Random, op: str) -> Kind:
    dtype = draw.choice(FLOATS)
    wide = torch.promote_types(dtype, torch.float32)
    hk, hv = draw.choice(((1, 1), (1, 2), (2, 2), (2, 4), (1, 4)))
    packed = draw.random() < 0.3
    tokens = draw.choice(("one", "odd", "odd", "odd", "odd", "sixteens", "sixteens", 0))
    return Kind(op=op, sizes=(1 if packed else draw.choice((1, 1, 2, 0)), tokens),
                widths={"hk": hk, "hv": hv, "k": draw.choice((12, 16, 16, 32, 64)),
                        "v": draw.choice((12, 16, 16, 32, 64)), "chunk": draw.choice((16, 32, 64))},
                dtypes={"main": dtype, "out": draw.choice((dtype, wide)), "g": draw.choice((dtype, wide)),
                        "beta": draw.choice((dtype, wide))},
                flags={"gate": draw.choice(GATES), "decay": draw.choice(tuple(DECAYS)), "beta": draw.random() < 0.8,
                       "initial": draw.random() < 0.5, "final": draw.random() < 0.5, "norm": draw.random() < 0.7,
                       "documents": draw.choice((1, 2, 3, 5)) if packed else 0},
                patterns={name: pattern(draw, 3) for name in ("q", "k", "v", "do")})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    (b, t), w, f, dtypes = outer_sizes(kind, draw, room), kind.widths, kind.flags, kind.dtypes
    wide = torch.promote_types(dtypes["main"], torch.float32)
    q, k = (kind.patterns[name].lay(make.normal(dtypes["main"]), (b, t, w["hk"], w["k"])) for name in "qk")
    v = kind.patterns["v"].lay(make.normal(dtypes["main"]), (b, t, w["hv"], w["v"]))
    if not f["norm"]:
        k = k / (1 + k.norm(dim=-1, keepdim=True))
    g, beta, cu_seqlens, sequences = None, None, None, b
    if f["gate"] != "none":
        channels = (w["k"],) if f["gate"] == "channel" else ()
        g = DECAYS[f["decay"]](make.normal(wide)(b, t, w["hv"], *channels)).to(dtypes["g"])
    if f["beta"]:
        beta = make.normal(wide)(b, t, w["hv"]).sigmoid().to(dtypes["beta"])
    if f["documents"]:
        sequences = f["documents"]
        inner = sorted(draw.choices(range(t + 1), k=sequences - 1))
        cu_seqlens = torch.tensor([0, *inner, t], dtype=torch.int32, device=make.device)
    state = (sequences, w["hv"], w["k"], w["v"])
    if kind.op.startswith("gated_linear_attention"):
        operands = q, k, v, g, make.normal(wide)(*state) if f["initial"] else None, cu_seqlens
        settings = w["k"] ** -0.5, w["chunk"]
        if kind.op == "gated_linear_attention":
            return *operands, *settings, dtypes["out"]
        kept = reference_of("gated_linear_attention")(*operands, *settings, dtypes["main"])[2:]
        return *_cotangents(kind, make, v, state), *operands, *kept, *settings
    operands = q, k, v, g, beta, make.normal(wide)(*state) if f["initial"] else None, cu_seqlens
    settings = w["k"] ** -0.5, 1e-6 if f["norm"] else None, w["chunk"]
    if kind.op == "gated_delta_rule":
        return *operands, *settings, dtypes["out"]
    kept = reference_of("gated_delta_rule")(*operands, *settings, dtypes["main"])[2:]
    return *_cotangents(kind, make, v, state), *operands, *kept, *settings


def _cotangents(kind: Kind, make: Maker, v: Any, state: tuple[int, ...]) -> tuple[Any, ...]:
    wide = torch.promote_types(kind.dtypes["main"], torch.float32)
    do = kind.patterns["do"].lay(make.normal(kind.dtypes["out"]), v.shape)
    return do, make.normal(wide)(*state) if kind.flags["final"] else None
