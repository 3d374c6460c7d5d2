"""What the fuzz driver draws for `attention`."""

from __future__ import annotations

import random
from typing import Any

import torch

from megacpp_compile.lowerings.attention._dropout import WORDS

from .agreement import reference_of
from .fuzz_draw import Kind, Maker, pattern


def kind(draw: random.Random, op: str) -> Kind:
    groups = draw.choice((1, 1, 2, 3))
    shared = (None, None, "a row", "a head", "all")
    return Kind(
        op=op, widths={"g": groups, "h": groups * draw.choice((1, 2, 4)), "d": draw.choice((8, 16, 21, 24, 64, 96)),
                "e": draw.choice((8, 16, 13, 64))},
        dtypes={"main": draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))},
        flags={"mask": draw.choice(shared), "bias": draw.choice(shared), "sinks": draw.choice(("", "", "", "heads", "rows", "tokens")),
               "softcap": draw.choice((0.0, 0.0, 3.0)), "left": draw.random() < 0.3, "right": draw.random() < 0.6,
               "low": draw.random() < 0.3, "documents": draw.random() < 0.2, "dropout": draw.choice((0.0, 0.0, 0.1, 0.6)),
               "prefix": draw.random() < 0.2},
        # Equal rows would leave the scores without a gradient.
        patterns={name: pattern(draw, 3, may_repeat=False) for name in ("q", "k", "v", "grad")},
    )  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    w, f = kind.widths, kind.flags
    b, t, s = draw.choice((1, 1, 2)), draw.choice((1, 2, max(1, room))), draw.randrange(2, 20 + room)
    normal = make.normal(kind.dtypes["main"])
    if f["documents"]:
        s = t
    q = kind.patterns["q"].lay(normal, (b, w["h"], t, w["d"]))
    k, v = (kind.patterns[n].lay(normal, (b, w["g"], s, c)) for n, c in (("k", w["d"]), ("v", w["e"])))
    sizes = {"a row": (b, 1, 1, s), "a head": (1, w["h"], t, s), "all": (b, w["h"], t, s)}
    mask = None
    if f["mask"]:
        mask = make.normal(torch.float32)(*sizes[f["mask"]]) < 0.7
        mask[..., 0] = True  # a query that sees no key by data and distance together is NaN here and in eager
    bias = normal(*sizes[f["bias"]]) if f["bias"] else None
    right = draw.randrange(0, s) if f["right"] else None
    left = draw.randrange(max(0, t - s), t + s) if f["left"] and not f["mask"] else None
    documents = None
    if f["documents"]:  # with itself a token is of one document, and it is seen
        documents = (make.normal(torch.float32)(b, s).abs() * 2).long()
        documents = documents.cumsum(1) if draw.random() < 0.7 else documents
        mask = None
    logits = {"": lambda: None, "heads": lambda: normal(w["h"]), "rows": lambda: normal(b, w["h"], t),
              "tokens": lambda: normal(b, 1, t)}[f["sinks"]]()  # fmt: skip
    fill = -60000.0 if f["low"] else float("-inf")
    settings = documents, w["d"] ** -0.5, f["softcap"], left, right, fill
    drawn: tuple[Any, ...] = ()
    if f["dropout"]:
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        drawn = torch.randint(WORDS, [s + b * w["h"] * t], generator=generator).to(q.device), f["dropout"]
    if f["prefix"] and right is not None:
        lengths = torch.tensor([draw.randrange(0, s + 2) for _ in range(draw.choice((1, b)))]).to(q.device)
        drawn = (*(drawn or (None, 0.0)), lengths)
    if kind.op == "attention":
        return q, k, v, mask, bias, logits, *settings, *drawn
    out, lse, top = reference_of("attention")(q, k, v, mask, bias, logits, *settings, *drawn)
    settings = settings[1:]
    grad = kind.patterns["grad"].lay(normal, out.shape)
    return grad, q, k, v, mask, bias, logits, documents, out, lse, top, *settings, bias is not None, *drawn
