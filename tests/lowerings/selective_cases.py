"""Cases of Mamba-1's selective scan, and what the fuzz driver draws for it."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F

from .agreement import reference_of
from .cases import case, each_case
from .fuzz_draw import FLOATS, Kind, Maker, _class, outer_sizes, pattern


def operands(rand, dtype, b=2, t=24, d=20, n=16, chunk=16, skip=True, initial=True, wide=False, rates=(0.1, 2.0)):
    """As in a model: B and C slices of one buffer, dt of the step's projection, A and D float32."""
    f32 = torch.promote_types(dtype, torch.float32)
    narrow = f32 if wide else dtype
    B, C = rand(b, t, 2 * n + 8, dtype=narrow)[..., 8:].split(n, -1)
    low, high = rates
    A = -(low + (high - low) * torch.linspace(0, 1, d * n, dtype=f32).view(d, n))
    dt = F.softplus(rand(b, t, d, dtype=f32) - 1).to(narrow)
    return (rand(b, t, d, dtype=narrow), dt, A, B, C, rand(d, dtype=f32) if skip else None,
            rand(b, d, n, dtype=f32) if initial else None, chunk)  # fmt: skip


SCANS = {"plain": {}, "bare": {"skip": False, "initial": False}, "no_state": {"b": 1, "initial": False},
         "whole_chunks": {"b": 1, "t": 48}, "one_token": {"t": 1}, "one_channel": {"d": 1},
         "odd_length": {"b": 1, "t": 77, "chunk": 64}, "no_batch": {"b": 0}, "no_token": {"t": 0},
         "no_token_no_state": {"t": 0, "initial": False}, "no_channel": {"d": 0}, "small_states": {"b": 1, "n": 4},
         "wide_states": {"b": 1, "n": 64, "d": 9}, "odd_states": {"b": 1, "n": 5},
         "long_chunk": {"b": 1, "t": 150, "chunk": 128, "d": 5}, "odd_chunk": {"b": 1, "t": 50, "chunk": 20},
         "many_channels": {"b": 1, "t": 18, "d": 130}, "strong_decay": {"b": 1, "rates": (1.0, 40.0), "t": 70},
         "no_decay": {"b": 1, "rates": (0.0, 0.0)}, "float32_operands": {"b": 1, "wide": True}}  # fmt: skip


@each_case("selective_scan", SCANS)
def forward(rand, dtype, **options):
    return *operands(rand, dtype, **options), dtype


@each_case("selective_scan_backward", SCANS)
def backward(rand, dtype, **options):
    *given, chunk = operands(rand, dtype, **options)
    y, final, states = reference_of("selective_scan")(*given, chunk, dtype)
    dfinal = rand(*final.shape, dtype=final.dtype) if options.get("initial", True) else None
    return rand(*y.shape, dtype=dtype), dfinal, *given, states, chunk


def _tokens_last(rand, dtype):
    """Channels before tokens in memory, as the convolution's result lies in transformers."""
    u, dt, A, B, C, *others = operands(rand, dtype)
    return *(x.mT.contiguous().mT for x in (u, dt)), A.T.contiguous().T, *(x.mT.contiguous().mT for x in (B, C)), *others


@case("selective_scan", "tokens_last")
def _(rand, dtype):
    return *_tokens_last(rand, dtype), torch.promote_types(dtype, torch.float32)


@case("selective_scan_backward", "tokens_last")
def _(rand, dtype):
    *given, chunk = _tokens_last(rand, dtype)
    y, final, states = reference_of("selective_scan")(*given, chunk, dtype)
    return rand(1, dtype=dtype).expand(y.shape), None, *given, states, chunk


def kind(draw: random.Random, op: str) -> Kind:
    main = draw.choice(FLOATS)
    other = lambda: draw.choice(FLOATS) if draw.random() < 0.2 else main  # noqa: E731
    return Kind(op=op, sizes=(_class(draw), _class(draw)),
                widths={"d": draw.choice((1, 7, 16, 40, 130)), "n": draw.choice((1, 4, 5, 16, 16, 32)),
                        "chunk": draw.choice((1, 7, 16, 64, 256))},
                dtypes={"main": main, "out": other(), "dt": other(), "D": other()},
                flags={name: draw.random() < 0.6 for name in ("skip", "initial", "final")},
                patterns={name: pattern(draw, 2) for name in ("u", "dt", "B", "C", "dy")})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    (b, t), w, f, dtypes = outer_sizes(kind, draw, room), kind.widths, kind.flags, kind.dtypes
    d, n = w["d"], w["n"]
    wide_normal = make.normal(torch.promote_types(dtypes["main"], torch.float32))
    lay = lambda name, size, dtype: kind.patterns[name].lay(make.normal(dtypes[dtype]), (b, t, size))  # noqa: E731
    step = make.normal(dtypes["dt"])
    dt = kind.patterns["dt"].lay(lambda *shape: F.softplus(step(*shape) - 1), (b, t, d))
    given = (lay("u", d, "main"), dt, -0.1 - wide_normal(d, n).abs(), lay("B", n, "main"), lay("C", n, "main"),
             make.normal(dtypes["D"])(d) if f["skip"] else None,
             wide_normal(b, d, n) if f["initial"] else None, w["chunk"])  # fmt: skip
    if kind.op == "selective_scan":
        return *given, dtypes["out"]
    *_, states = reference_of("selective_scan")(*given, dtypes["main"])
    return lay("dy", d, "out"), wide_normal(b, d, n) if f["final"] else None, *given[:-1], states, given[-1]
