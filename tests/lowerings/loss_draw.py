"""What the fuzz driver draws for the loss that keeps no logits."""

from __future__ import annotations

import random
from typing import Any

import torch

from .agreement import reference_of
from .fuzz_draw import FLOATS, Kind, Maker, _class, outer_sizes, pattern


def kind(draw: random.Random, op: str) -> Kind:
    bias, summed = draw.random() < 0.4, op.endswith("_backward") or draw.random() < 0.6
    letters = "xwb" if bias else "xw"
    return Kind(op=op, sizes=(_class(draw),),
                widths={"h": draw.choice((1, 8, 24, 37, 64)), "v": draw.choice((1, 2, 13, 64, 100, 300, 5000))},
                dtypes={"main": draw.choice(FLOATS)},
                flags={"bias": bias, "summed": summed, "weighted": draw.random() < 0.4,
                       "grads": "".join(letter for letter in letters if draw.random() < 0.8) if summed else "",
                       "smoothing": draw.choice((0.0, 0.0, 0.1, 0.5)), "scale": draw.choice((1.0, 1.0, 0.25, 3.0)),
                       "softcap": draw.choice((None, None, 1.5, 30.0)), "z_loss": draw.choice((0.0, 0.0, 1e-4, 0.1)),
                       "ignore_index": draw.choice((-100, -100, -1, 0)), "ignored": draw.choice((0.0, 0.3, 0.3, 1.0)),
                       "gradients": draw.choice(("loss", "loss", "lse", "both")), "number": draw.random() < 0.2},
                patterns={"x": pattern(draw, 1), "w": pattern(draw, 1, may_repeat=False)})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    (n,), (h, v), f = outer_sizes(kind, draw, room), kind.widths.values(), kind.flags
    normal = make.normal(kind.dtypes["main"])
    wide = torch.promote_types(kind.dtypes["main"], torch.float32)
    # Logits below some 3: half precision rounds them by 2^-9 of themselves, and probabilities are off by as much.
    small = 0.5 / max(1, f["scale"])
    x, w = kind.patterns["x"].lay(normal, (n, h)), kind.patterns["w"].lay(normal, (v, h)) * (small / h**0.5)
    words = [f["ignore_index"] if draw.random() < f["ignored"] else draw.randrange(v) for _ in range(n)]
    target = torch.tensor(words, dtype=torch.int64, device=make.device)
    weight = make.normal(wide)(n).exp() if f["weighted"] else None
    tensors = x, w, normal(v) * small if f["bias"] else None, target, weight
    settings = f["ignore_index"], f["smoothing"], f["scale"], f["softcap"], f["z_loss"]
    if kind.op == "linear_cross_entropy":
        return *tensors, *settings, "sum" if f["summed"] else "none", f["grads"]
    _, lse, *_ = reference_of("linear_cross_entropy")(*tensors, *settings, "none", "")

    def seed(name: str) -> Any:
        if v > 1 and f["gradients"] not in (name, "both"):  # of a single word the loss has no gradient but zero
            return None
        return make.normal(wide)(1).expand(n) if f["number"] else make.normal(wide)(n)

    return seed("loss"), seed("lse"), *tensors, lse, *settings, f["grads"]
