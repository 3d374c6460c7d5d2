"""The absorbed form of an attention over latents, around whichever op attends: queries by W_uk, rows of latents,
results by W_uv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.matchers.latent_attention.over_latents import LatentAttention, View
from megacpp_compile.passes._rewrites.absorbed_weights import absorbed, expanded, taken


def inputs_of(found: LatentAttention) -> list[Node]:
    """What the absorbed form reads."""
    core = found.core
    views = (found.latent, *(one.rows for one in found.shared), *(one.view for one in found.biases))
    nodes = [*(q.node for q, _ in core.scores), *(view.node for view in views)]
    nodes += [node for one in (*found.w_uk, *found.w_uv) for node in one.inputs]
    nodes += [node for one in found.biases for node in one.times.nodes]
    nodes += [node for one in found.seen for _, node in one.last.parts] + [one.node for one in found.given]
    return list(dict.fromkeys(nodes))


def latent_rows(
    build: Builder, found: LatentAttention, size: Callable[[str], Any], dtype: torch.dtype, more: Sequence[Node] = ()
) -> Node:
    """[b, s, channels]: the latent, what all heads share, and `more`."""
    latent = None if more else _one_buffer(build, found, size)
    if latent is None:
        parts = [_rows(build, found.latent, "bsr", size)]
        parts += [_rows(build, one.rows, "bsc", size, one.width) for one in found.shared]
        latent = build.joined([*(build.cast(part, dtype) for part in parts), *more], -1)
    return build.cast(latent, dtype)


def absorbed_queries(build: Builder, found: LatentAttention, dtype: torch.dtype) -> list[Node]:
    """The queries' channels [b, t, h, ..] in the order of `latent_rows`: by W_uk, and those that meet shared ones."""
    queries = [_queries(build, found, i, dtype) for i in range(len(found.core.scores))]
    nope = build.part(queries[found.part], -1, found.first, found.sizes["n"])
    pieces = [build.cast(absorbed(build, nope, found, dtype), dtype)]
    return pieces + [build.part(queries[one.part], -1, one.first, one.width) for one in found.shared]


def expanded_result(
    build: Builder, found: LatentAttention, out: Node, op: Node, size: Callable[[str], Any], dtype: torch.dtype,
    hides: bool,
) -> Node:  # fmt: skip
    """What takes the place of the attention's result: `out` [b, t, h, r] of `op` by W_uv. hides: whether a query may
    see no row."""
    of_queries = [size("b"), size("t"), found.sizes["h"], 1] if found.biases and hides else None
    out = expanded(build, out, found, dtype, op, of_queries)
    return _result(build, found, build.cast(out, value(found.core.result.node).dtype))


class Sizes:
    """The sizes of axes, as numbers or as nodes that read them."""

    def __init__(self, build: Builder, found: LatentAttention) -> None:
        self.build, self.found = build, found

    def __call__(self, axis: str) -> Any:
        known = self.found.sizes[axis]
        if isinstance(known, int):
            return known
        if axis == "s":
            view = self.found.latent
            dim = next(d for d, (_, steps) in enumerate(view.places) if "s" in steps)
            return self.build(aten.sym_size.int, view.node, dim)
        operand = self.found.core.scores[0][0]
        return self.build(aten.sym_size.int, operand.node, operand.axes.index(axis))


def _rows(build: Builder, view: View, axes: str, size: Callable[[str], Any], width: int | None = None) -> Node:
    """[b, s, channels] of what holds them. width: of the channels, where they are not the latent's."""
    dims = [(axis, first, width if axis == "c" else axis and size(axis))
            for first, steps in view.places for axis in steps or (None,)]  # fmt: skip
    return taken(build, view.node, dims, axes)


@or_none
def _one_buffer(build: Builder, found: LatentAttention, size: Callable[[str], Any]) -> Node | None:
    """The rows where one buffer has latent and shared channels side by side, so that nothing is copied."""
    NoMatch.when(len(found.shared) != 1 or found.shared[0].rows.node is not found.latent.node)
    latent, (shared,) = found.latent, found.shared
    places = []
    for (first, steps), (other_first, other) in zip(latent.places, shared.rows.places, strict=True):
        if "r" in steps:
            NoMatch.when("c" not in other or other_first != first + found.sizes["r"])
            places.append((first, {"c": 1}))
        elif (first, dict(steps)) != (other_first, dict(other)):
            return None
        else:
            places.append((first, dict(steps)))
    return _rows(build, View(latent.node, tuple(places)), "bsc", size, found.sizes["r"] + shared.width)


def _queries(build: Builder, found: LatentAttention, part: int, dtype: torch.dtype) -> Node:
    """[b, t, h, c] of the queries of a part of the scores."""
    operand = found.core.scores[part][0]
    return build.cast(taken(build, operand.node, [(axis, 0, None) for axis in operand.axes], "bthc"), dtype)


def _result(build: Builder, found: LatentAttention, out: Node) -> Node:
    """`out` [b, t, h, v] with the dimensions of the attention's result, laid out as that is."""
    axes, plain = found.core.result.axes, value(found.core.result.node)
    if "t" not in axes:
        out = build(aten.squeeze.dim, out, 1)
    have = [axis for axis in "bthc" if axis in axes]
    laid = sorted(range(len(axes)), key=lambda d: -hint(plain.stride(d)))
    out = build.permuted(out, [have.index(axes[d]) for d in laid])  # type: ignore[arg-type]
    return build.permuted(build(aten.contiguous.default, out), [laid.index(d) for d in range(len(axes))])


def readable(nodes: Iterable[Node], device: torch.device) -> bool:
    """Whether all tensors among `nodes` are on `device`."""
    return all(value(n).device == device for n in nodes if isinstance(value(n), torch.Tensor))
