"""Cases of the ops on residual streams."""

from __future__ import annotations

import random
from typing import Any

import torch

from megacpp_compile.lowerings.hyper_connection.reference import sizes

from .agreement import reference_of
from .cases import each_case
from .fuzz_draw import FLOATS, Kind, Maker, _class, outer_sizes, pattern

PRE, POST, EPS = [1.0, 1e-2], [2.0, 0.0], [1e-2, 1e-2]
SINKHORN = [-2, *(-1, -2) * 3]


def connection(rand, dtype, outer=(2, 9), n=4, d=16, post=POST, init="softmax", eps=EPS, axes=SINKHORN,
               params=None, sign=1.0, part=False):  # fmt: skip
    """params: the dtype of the parameters. part: the streams are part of what each token has."""
    rows = sum(sizes(n, post, init))
    streams = rand(*outer, n + 1, d, dtype=dtype)[..., 1:, :] if part else rand(*outer, n, d, dtype=dtype)
    weight, base = (rand(*shape, dtype=params or torch.promote_types(dtype, torch.float32)) for shape in ((rows, n * d), (rows,)))
    scale = 1 + rand(rows, dtype=base.dtype) / 4
    return streams, weight / (n * d) ** 0.5, scale, base / 2, 1e-3, PRE, post, init, eps, axes, dtype


NO_EPS = [0.0, 0.0]
CONNECTIONS = {
    "sinkhorn": {}, "twenty_steps": {"axes": [-2, *(-1, -2) * 19], "d": 8}, "softmax": {"axes": []},
    "softmax_of_columns": {"init": "softmax_columns", "axes": [-1]}, "exp": {"init": "exp"},
    "sigmoid": {"init": "sigmoid", "axes": [-1, -2]}, "tanh": {"init": "tanh", "axes": [], "eps": NO_EPS},
    "linear": {"init": "linear", "axes": [], "eps": NO_EPS},
    "logarithms": {"init": "log", "axes": [-1, -2, -1, -2], "eps": NO_EPS}, "no_eps": {"eps": NO_EPS},
    "no_matrix": {"init": "", "axes": []}, "block_alone": {"init": "", "axes": [], "post": []},
    "two_streams": {"n": 2}, "eight_streams": {"n": 8, "outer": (3,)}, "three_streams": {"n": 3},
    "flat": {"outer": (17,)}, "one_token": {"outer": (1, 1)}, "no_tokens": {"outer": (0, 3)}, "wide": {"d": 300, "outer": (5,)},
    "odd_channels": {"d": 11}, "parameters_in_half": {"params": torch.bfloat16}, "part": {"part": True},
    "many_tokens": {"outer": (3, 50)},
}  # fmt: skip


@each_case("hyper_connection", CONNECTIONS)
def forward(rand, dtype, **options):
    return connection(rand, dtype, **options)


@each_case("hyper_connection_backward", CONNECTIONS)
def backward(rand, dtype, **options):
    args = connection(rand, dtype, **options)
    block, post, mix, logits, rrms = reference_of("hyper_connection")(*args)
    grads = rand(*block.shape, dtype=dtype), rand(*post.shape, dtype=post.dtype), rand(*mix.shape, dtype=mix.dtype)
    if mix.shape[-1]:  # as behind an update, which takes the matrix transposed
        grads = *grads[:2], grads[2].mT.contiguous().mT
    return *grads, *args[:4], logits, rrms, *args[5:10]


def update(rand, dtype, outer=(2, 9), n=4, d=16, maps=torch.float32, turned=True):
    maps = torch.promote_types(dtype, maps)
    mix = rand(*outer, n, n, dtype=maps)
    post = rand(*outer, n, dtype=maps)
    return rand(*outer, n, d, dtype=dtype), rand(*outer, d, dtype=dtype), post, mix.mT if turned else mix


UPDATES = {
    "four_streams": {}, "two_streams": {"n": 2, "turned": False}, "eight_streams": {"n": 8}, "three_streams": {"n": 3},
    "flat": {"outer": (17,)}, "one_token": {"outer": (1, 1)}, "no_tokens": {"outer": (0, 3)}, "odd_channels": {"d": 11},
    "wide": {"d": 1100, "outer": (3,)}, "maps_in_half": {"maps": torch.bfloat16},
}  # fmt: skip


@each_case("stream_update", UPDATES)
def updated(rand, dtype, **options):
    return *update(rand, dtype, **options), dtype


@each_case("stream_update_backward", UPDATES)
def updated_backward(rand, dtype, **options):
    args = update(rand, dtype, **options)
    return rand(*args[0].shape, dtype=dtype), *args


def kind(draw: random.Random, op: str) -> Kind:
    main, dims = draw.choice(FLOATS), draw.choice((1, 2, 2))
    init, post = draw.choice(("", "softmax", "softmax_columns", "exp", "sigmoid", "log")), draw.random() < 0.8
    eps = [0.0, 0.0] if init == "log" else draw.choice((EPS, NO_EPS)) if init != "linear" else EPS
    return Kind(op=op, sizes=tuple(_class(draw) for _ in range(dims)),
                widths={"n": draw.choice((1, 2, 3, 4, 4, 8)), "d": draw.choice((1, 11, 16, 40, 130))},
                dtypes={"main": main, "out": draw.choice(FLOATS) if draw.random() < 0.2 else main,
                        "wide": torch.promote_types(main, torch.float32) if draw.random() < 0.7 else main},
                flags={"init": init, "post": POST if post else [], "eps": eps, "turned": draw.random() < 0.5,
                       "axes": [(-2, -1)[i % 2] for i in range(draw.choice((0, 1, 3, 7)))] if init else []},
                patterns={"streams": pattern(draw, dims + 1), "grad": pattern(draw, dims + 1),
                          **{name: pattern(draw, dims) for name in ("block", "post")}})  # fmt: skip


def arguments(kind: Kind, draw: random.Random, make: Maker, room: int) -> tuple[Any, ...]:
    outer, (n, d), f = outer_sizes(kind, draw, room), kind.widths.values(), kind.flags
    normal = {name: make.normal(dtype) for name, dtype in kind.dtypes.items()}
    lay = lambda name, shape, dtype: kind.patterns[name].lay(normal[dtype], (*outer, *shape))  # noqa: E731
    streams = lay("streams", (n, d), "main")
    if kind.op.startswith("stream_update"):
        mix = normal["wide"](*outer, n, n)
        given = streams, lay("block", (d,), "main"), lay("post", (n,), "wide"), mix.mT if f["turned"] else mix
        return (*given, kind.dtypes["out"]) if kind.op == "stream_update" else (lay("grad", (n, d), "out"), *given)
    rows = sum(sizes(n, f["post"], f["init"]))
    parameters = normal["wide"](rows, n * d) / (n * d) ** 0.5, 1 + normal["wide"](rows) / 4, normal["wide"](rows) / 2
    rest = PRE, f["post"], f["init"], f["eps"], f["axes"]
    args = streams, *parameters, 1e-3, *rest, kind.dtypes["out"]
    if kind.op == "hyper_connection":
        return args
    block, post, mix, logits, rrms = reference_of("hyper_connection")(*args)
    grads = lay("block", (d,), "out"), *(make.normal(t.dtype)(*t.shape) for t in (post, mix))
    return *grads, streams, *parameters, logits, rrms, *rest
