"""What the fuzz driver draws: kinds of calls, few enough to compile the kernels of, and calls of a kind.

A Triton kernel is compiled again for other `constexpr` arguments, and for integer arguments that change in being 1 or
divisible by 16. A kind therefore fixes head sizes and counts, dtypes, layouts and the pattern of strides, and how many
tokens there are only up to a class; token counts, boundaries of sequences and all data are drawn freely for every call.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .agreement import KIND, reference_of

FLOATS = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64)
# In turns: most are rotations, as most of what can be laid out in different ways is.
OPS = (*(name for name in KIND if KIND[name] == "rotation"), *KIND)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """How a tensor lies in its buffer: outer dimensions in `order` (outermost first), of which `gap` has every second
    row and `repeated` one row for all; `before` and `behind` other channels, and `step` from one channel to the next."""

    order: tuple[int, ...]
    gap: int | None = None
    repeated: int | None = None
    before: int = 0
    behind: int = 0
    step: int = 1

    def lay(self, make: Any, shape: Sequence[int]) -> Tensor:
        outer, channels = list(shape[:-1]), shape[-1]
        sizes = [1 if d == self.repeated else 2 * n if d == self.gap else n for d, n in enumerate(outer)]
        buffer = make(*(sizes[d] for d in self.order), self.before + channels * self.step + self.behind)
        t = buffer.permute(*(self.order.index(d) for d in range(len(outer))), len(outer))
        t = t[..., self.before : self.before + channels * self.step : self.step]
        if self.gap is not None and self.gap != self.repeated:
            t = t.narrow(self.gap, 0, sizes[self.gap])[(slice(None),) * self.gap + (slice(0, None, 2),)]
        return t.expand(shape)


def pattern(draw: random.Random, dims: int, may_repeat: bool = True) -> Pattern:
    order = list(range(dims))
    if draw.random() < 0.5:
        draw.shuffle(order)
    some = lambda chance: draw.randrange(dims) if dims and draw.random() < chance else None  # noqa: E731
    around = lambda: draw.choice((0, 0, 0, 1, 8, 16))  # noqa: E731
    step = 2 if draw.random() < 0.03 else 1
    return Pattern(tuple(order), some(0.15), some(0.08) if may_repeat else None, around(), around(), step)


@dataclasses.dataclass(frozen=True)
class Kind:
    """All of a call but token counts and data. `sizes[d]` is the class of dimension d, or its size."""

    op: str
    dtypes: dict[str, torch.dtype]
    flags: dict[str, Any]
    sizes: tuple[str | int, ...] = ()
    heads: int = -1  # the dimension of the heads
    widths: dict[str, int] = dataclasses.field(default_factory=dict)
    layout: tuple[bool, bool, bool] = (False, False, False)
    patterns: dict[str, Pattern] = dataclasses.field(default_factory=dict)
    table_dims: tuple[bool, ...] = ()  # which dimensions the tables depend on

    def __hash__(self) -> int:
        return id(self)


CLASSES = {"one": lambda draw, room: 1, "odd": lambda draw, room: draw.randrange(3, max(4, room + 1), 2),
           "sixteens": lambda draw, room: 16 * draw.randrange(1, max(2, room // 16 + 1)), "none": lambda draw, room: 0}


def _drawn_elsewhere(op: str) -> Any:
    """The module that draws an op's calls, if it is not this one."""
    from . import (
        attention_draw,
        decode_draw,
        delta_draw,
        experts_draw,
        fp8_draw,
        index_cases,
        loss_draw,
        mixer_draw,
        selective_cases,
        softmax_attention_draw,
        stream_cases,
    )

    homes = {"mixer": mixer_draw, "experts": experts_draw, "attention": attention_draw, "fp8_linear": fp8_draw,
             "float8": fp8_draw, "delta rule": delta_draw, "loss": loss_draw, "indexer": index_cases}  # fmt: skip
    by_op = {"mla_decode": decode_draw, **dict.fromkeys(("attention", "attention_backward"), softmax_attention_draw),
             **dict.fromkeys(("selective_scan", "selective_scan_backward"), selective_cases),
             **{op + half: stream_cases for op in ("hyper_connection", "stream_update") for half in ("", "_backward")}}
    return by_op.get(op) or homes.get(KIND[op])


def kind(draw: random.Random, op: str) -> Kind:
    if (module := _drawn_elsewhere(op)) is not None:
        return module.kind(draw, op)
    return {"projection": _projection, "rotation": _rotation, "scan": _scan}[KIND[op]](draw, op)


def _class(draw: random.Random) -> str:
    return draw.choices(("one", "odd", "sixteens", "none"), weights=(20, 60, 18, 2))[0]


def _rotation(draw: random.Random, op: str) -> Kind:
    packed = draw.random() < 0.25
    tokens = 1 if packed else draw.choices((0, 1, 2, 3), weights=(2, 20, 65, 13))[0]
    heads = 1 if packed else draw.randrange(tokens + 1) if draw.random() < 0.4 else tokens
    count = draw.choices((1, 2, 3, 4, 7, 12, 20, 28, 32, 128), weights=(4, 3, 3, 3, 1, 2, 2, 2, 1, 1))[0]
    sizes: list[str | int] = [_class(draw) for _ in range(tokens)]
    sizes.insert(heads, count)
    rope = draw.choice((2, 4, 6, 16, 24, 32, 64, 64, 80, 128))
    nope = draw.choice((0, 0, 1, 5, 11, 16, 32, 64, 128, 192))
    main = draw.choice(FLOATS)
    other = lambda chance: draw.choice(FLOATS) if draw.random() < chance else main  # noqa: E731
    dims = len(sizes)
    return Kind(
        op=op,
        sizes=tuple(sizes),
        heads=heads,
        widths={"nope": nope, "rope": rope, "v": draw.choice((0, 4, 13, 24, 64, 128)),
                "k_heads": draw.choice((1, max(1, count // 2), count)), "full": draw.random() < 0.4,
                "uneven": draw.random() < 0.02},
        dtypes={"main": main, "second": other(0.15), "tables": draw.choice((torch.float32, main, torch.bfloat16)),
                "out": other(0.15), "out_2": other(0.15)},
        layout=(draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.3),
        flags={"inverse": draw.random() < 0.5, "in_place": draw.random() < 0.9, "packed": packed,
               "sequences": draw.randrange(1, 9), "long": draw.random() < 0.5,
               "also_shared": draw.randrange(dims) if not packed and draw.random() < 0.1 else None,
               "own_rows": draw.random() < 0.05, "boundaries_step": 2 if draw.random() < 0.05 else 1},
        patterns={name: pattern(draw, dims) for name in ("main", "second", "cos", "sin")},
        table_dims=tuple(d != heads and draw.random() < 0.6 or d == heads and draw.random() < 0.04
                         for d in range(dims)),
    )  # fmt: skip


def _projection(draw: random.Random, op: str) -> Kind:
    dtype = draw.choice(FLOATS)
    dims = draw.choice((1, 2, 2, 3))
    weight = lambda: pattern(draw, 1, may_repeat=False)  # noqa: E731
    rest = draw.choice((0, 0, 5, 16))
    size = draw.choice((8, 23, 32, 64, 96))
    return Kind(op=op, sizes=tuple(_class(draw) for _ in range(dims)),
                widths={"d": draw.choice((16, 37, 64)), "size": size, "start": rest if draw.random() < 0.5 else 0,
                        "rest": rest},
                dtypes={"main": dtype, "up": draw.choice(FLOATS) if draw.random() < 0.1 else dtype},
                flags={"ups": [draw.choice((24, 31)) for _ in range(draw.choice((1, 1, 1, 2)))],
                       "bias": draw.random() < 0.4, "gain": draw.random() < 0.7, "keep": draw.random() < 0.5,
                       "turned": draw.random() < 0.3, "sum_of_rest": draw.random() < 0.2, "seed": draw.getrandbits(63),
                       "rank": draw.random(), "drawn": draw.choice((None, draw.getrandbits(63)))},
                patterns={"x": pattern(draw, dims), "rest": pattern(draw, dims), "w": weight()})


def _scan(draw: random.Random, op: str) -> Kind:
    dtype = draw.choice(FLOATS)
    # In full precision the gradient of one head's decay is too often a sum that cancels.
    heads, groups = draw.choice(((4, 1), (4, 2), (4, 4), (6, 3), (8, 2), *([(1, 1)] if dtype.itemsize < 4 else [])))
    wide = torch.promote_types(dtype, torch.float32)
    return Kind(op=op,
                sizes=(draw.choice((1, 1, 2, 0)),
                       draw.choice(("one", "odd", "odd", "odd", "odd", "sixteens", "sixteens", 0))),
                widths={"heads": heads, "groups": groups, "p": draw.choice((12, 16, 16, 16, 32)),
                        "n": draw.choice((16, 16, 32)), "chunk": draw.choice((16, 16, 32, 64))},
                dtypes={"main": dtype, "out": draw.choice((dtype, wide)), "D": draw.choice((dtype, wide))},
                flags={"skip": draw.random() < 0.5, "initial": draw.random() < 0.5, "final": draw.random() < 0.5,
                       "documents": draw.choice((None, None, torch.int32, torch.int64))},
                patterns={**{name: pattern(draw, 3) for name in ("x", "B", "C", "dy")}, "dt": pattern(draw, 2)})


class Maker:
    """Random tensors on a device, from a seed of their own."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def normal(self, dtype: torch.dtype) -> Any:
        def make(*shape: int) -> Tensor:
            wide = torch.float32 if dtype.itemsize < 4 else dtype
            return torch.randn(shape, generator=self.generator, device=self.device, dtype=wide).to(dtype)

        return make


def outer_sizes(kind: Kind, draw: random.Random, room: int) -> list[int]:
    """Sizes of the outer dimensions, of which the tokens fill at most `room` (one of each class at least)."""
    sizes = []
    for size in kind.sizes:
        if isinstance(size, str):
            size = CLASSES[size](draw, room)
            room //= max(size, 1)
        sizes.append(size)
    return sizes


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    """The arguments of one call."""
    if (module := _drawn_elsewhere(kind.op)) is not None:
        return module.arguments(kind, draw, make, room)
    if KIND[kind.op] == "projection":
        return _projection_arguments(kind, draw, make, room)
    if KIND[kind.op] == "scan":
        return _scan_arguments(kind, draw, make, room)
    outer = outer_sizes(kind, draw, room)
    nope, rope, v = (kind.widths[n] for n in ("nope", "rope", "v"))
    dtypes, flags = kind.dtypes, kind.flags

    def lay(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kind.patterns[name].lay(make.normal(dtype), shape)

    shared = [1 if d in (kind.heads, flags["also_shared"]) else n for d, n in enumerate(outer)]
    if flags["own_rows"]:
        shared = list(outer)
    cu_seqlens, table_outer = None, [n if on else 1 for n, on in zip(outer, kind.table_dims, strict=True)]
    if kind.op.startswith("mla_rope_kv"):  # tables turn the shared row, and are no larger
        table_outer = [min(n, m) for n, m in zip(table_outer, shared, strict=True)]
    if flags["packed"]:
        inner = sorted(draw.choices(range(outer[0] + 1), k=flags["sequences"]))
        boundaries = torch.tensor([0, *inner], dtype=draw.choice((torch.int32, torch.int64)), device=make.device)
        cu_seqlens = boundaries.repeat_interleave(flags["boundaries_step"])[:: flags["boundaries_step"]]
        table_outer = [outer[0] + 1 if flags["long"] else max(1, outer[0] // 2), 1]
    width = rope if kind.widths["full"] else rope // 2
    angle = make.normal(torch.float64)(*table_outer, width)
    radius = 1 + make.normal(torch.float64)(*table_outer, width).sigmoid()  # no unit circle: the inverse is a transpose
    tables = []
    for name, values in (("cos", radius * angle.cos()), ("sin", radius * angle.sin())):
        like = lay(name, (*table_outer, width), dtypes["tables"])
        tables.append(_filled(like, values))
    if kind.widths["uneven"] and rope > 2:
        tables[1] = torch.cat((tables[1], tables[1]), -1)[..., : rope if width != rope else rope // 2]
    last = [] if cu_seqlens is None and draw.random() < 0.5 else [cu_seqlens]

    if kind.op == "mla_rope_q":
        q = lay("main", (*outer, nope + rope), dtypes["main"])
        return q, *tables, nope, *kind.layout, flags["inverse"], dtypes["out"], *last
    if kind.op == "rope_qk":
        fewer = [
            kind.widths["k_heads"] if d == kind.heads and not kind.table_dims[d] else n for d, n in enumerate(outer)
        ]
        q = lay("main", (*outer, nope + rope), dtypes["main"])
        k = lay("second", (*fewer, nope + rope), dtypes["second"])
        return q, k, *tables, nope, *kind.layout, flags["inverse"], dtypes["out"], *last
    if kind.op == "mla_rope_kv":
        kv = lay("main", (*outer, nope + v), dtypes["main"])
        k_rope = lay("second", (*shared, rope), dtypes["second"])
        return kv, k_rope, *tables, nope, *kind.layout, dtypes["out"], *last
    grad_k = lay("main", (*outer, nope + rope), dtypes["main"])
    grad_v = lay("second", (*outer, v), dtypes["second"])
    dims = [d for d, n in enumerate(shared) if n == 1]
    return grad_k, grad_v, *tables, nope, *kind.layout, dims, dtypes["out"], dtypes["out_2"], *last


def _filled(like: Tensor, values: Tensor) -> Tensor:
    """`values` where `like` lies; what is repeated there takes those of the first row."""
    base = like
    for d, (n, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if not stride and n > 1:
            base = base.narrow(d, 0, 1)
    base.copy_(values[tuple(slice(0, n) for n in base.shape)])
    return like


def _projection_arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    outer, w, f = outer_sizes(kind, draw, room), kind.widths, kind.flags
    normal, up_normal = make.normal(kind.dtypes["main"]), make.normal(kind.dtypes["up"])
    total, size = w["size"] + w["rest"], w["size"]

    def weight(normal: Any, rows: int, columns: int) -> Tensor:
        made = kind.patterns["w"].lay(normal, (columns, rows)).t() if f["turned"] else normal(rows, columns)
        return made / math.sqrt(columns)

    x = kind.patterns["x"].lay(normal, (*outer, w["d"]))
    if kind.op.startswith("norm_linear"):
        gain = 1 + normal(w["d"]) / 4 if f["gain"] else None
        projections = [weight(up_normal, n, w["d"]) for n in f["ups"]]
        biases = [up_normal(n) for n in f["ups"]] if f["bias"] else []
        if kind.op == "norm_linear":
            return x, gain, projections, biases, 1e-5
        y, rrms = reference_of("norm_linear")(x, gain, projections, biases, 1e-5)
        return [up_normal(*one.shape) for one in y], x, gain, projections, rrms, f["bias"]
    if kind.op.startswith("compressed_linear"):
        projections = [weight(normal, n, w["d"]) for n in f["ups"]]
        biases = [normal(n) for n in f["ups"]] if f["bias"] else []
        drawn = None if f["drawn"] is None else torch.tensor(f["drawn"], device=make.device)
        forward = x, projections, biases, drawn, 1 + int(f["rank"] * w["d"]), f["seed"]
        if kind.op == "compressed_linear":
            return forward
        y, z = reference_of("compressed_linear")(*forward)
        return [normal(*one.shape) for one in y], z, projections, drawn, f["seed"], f["bias"]
    w_down, w_up = weight(normal, total, w["d"]), [weight(up_normal, n, size) for n in f["ups"]]
    b_down, w_norm = normal(total) if f["bias"] else None, 1 + normal(size) / 4 if f["gain"] else None
    forward = x, w_down, b_down, w_norm, w_up, 1e-5, w["start"], size, f["keep"]
    if kind.op == "down_norm_up":
        return forward
    up, rest, rrms, latent = reference_of("down_norm_up")(*forward)
    grad_rest = kind.patterns["rest"].lay(normal, rest.shape)
    if f["sum_of_rest"]:
        grad_rest = normal(1).expand(rest.shape)
    seeds = [up_normal(*u.shape) for u in up], grad_rest
    return *seeds, x, w_down, b_down, w_norm, w_up, rrms, w["start"], size, *([latent] if f["keep"] else [])


def _scan_arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    (b, t), w, f = outer_sizes(kind, draw, room), kind.widths, kind.flags
    main = kind.dtypes["main"]
    wide = torch.promote_types(main, torch.float32)
    normal, wide_normal = make.normal(main), make.normal(wide)
    x = kind.patterns["x"].lay(normal, (b, t, w["heads"], w["p"]))
    B, C = (kind.patterns[name].lay(normal, (b, t, w["groups"], w["n"])) for name in "BC")
    dt = kind.patterns["dt"].lay(lambda *shape: torch.nn.functional.softplus(wide_normal(*shape) - 1), (b, t, w["heads"]))
    A = -0.1 - wide_normal(w["heads"]).abs()
    D = make.normal(kind.dtypes["D"])(w["heads"]) if f["skip"] else None
    state = (b, w["heads"], w["p"], w["n"])
    operands = x, dt, A, B, C, D, wide_normal(*state) if f["initial"] else None
    numbers = []
    if f["documents"] is not None:
        often = draw.choice((0.02, 0.2))
        begins = torch.tensor([[draw.random() < often for _ in range(t)] for _ in range(b)], device=make.device)
        numbers = [begins.reshape(b, t).cumsum(-1).to(f["documents"])]
    if kind.op == "ssd_scan":
        return *operands, w["chunk"], kind.dtypes["out"], *numbers
    *_, states = reference_of("ssd_scan")(*operands, w["chunk"], main, *numbers)
    dy = kind.patterns["dy"].lay(make.normal(kind.dtypes["out"]), x.shape)
    return dy, wide_normal(*state) if f["final"] else None, *operands, states, w["chunk"], *numbers
