"""Follows a norm to its projections, for every pass that takes both together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.lowerings._sum_gradient import sum_gradient
from megacpp_compile.matchers._match import MatchFailure, refuse
from megacpp_compile.matchers.linear import Linear, match_projection
from megacpp_compile.matchers.rms_norm import RmsNorm, match_rms_norm
from megacpp_compile.matchers.views import consumers, is_cast, is_outer_view
from megacpp_compile.reader.links import through


def between(node: Node) -> bool:
    """Whether `node` may stand between a norm and its projections: a view or a cast."""
    return is_outer_view(node) or is_cast(node)


def between_ranks(node: Node) -> bool:
    """The same where the projections may be those of a rank, and their gradients be summed over ranks."""
    return between(node) or node.target is sum_gradient


def scaled(node: Node) -> bool:
    """Whether `node` multiplies a norm's output by a number, which then belongs to the gain.

    Under `dynamic=True` the model's own numbers are inputs of the graph, known at run time only.
    """
    return (
        node.target in (aten.mul.Tensor, aten.mul.Scalar)
        and isinstance(value(node.args[0]), torch.Tensor)
        and isinstance(value(node.args[1]), (int, float, torch.SymInt, torch.SymFloat))
    )


def norm_before(linear: Linear, link: Callable[[Node], bool] = between) -> tuple[Node, RmsNorm | MatchFailure | None]:
    """(what `linear` reads behind views, casts and a scaling, the norm that it is). link: what else may stand there."""
    source = through(linear.x, lambda n: (link(n) or scaled(n)) and not isinstance(match_rms_norm(n), RmsNorm))
    return source, match_rms_norm(source)


def fold_scaling(norm: RmsNorm, link: Callable[[Node], bool] = between) -> list[tuple[Node, Node, list[Node]]]:
    """(user, the value it reads, chain to it) for all that reads the norm behind views and casts.

    One scaling by a number may stand in between: it becomes part of the norm.
    """
    uses = consumers(norm.node, link)
    if len(uses) == 1 and scaled(uses[0][0]) and uses[0][0].args[0] is uses[0][1]:
        scaling, _, chain = uses[0]
        norm.internal.update((norm.node, scaling, *chain))
        _scale(norm, scaling.args[1])
        norm.node = scaling
        uses = [(u, v, chain + c) for u, v, c in consumers(scaling, link)]
    return uses


def reads(user: Node, read: Node) -> Linear | None:
    """The linear that `user` is and that projects `read`."""
    linear = match_projection(user)
    return linear if linear is not None and linear.x is read and linear.w is not read else None


def projections(norm: RmsNorm) -> list[tuple[Linear, list[Node]]]:
    """The linears that read the norm, each with the chain to it. Raises Refused where something else reads it too."""
    ups = []
    uses = fold_scaling(norm)
    for user, read, chain in uses:
        up = reads(user, read)
        if up is None:
            linear = any(match_projection(u) is not None for u, _, _ in uses)
            what = "the normed value is used elsewhere too" if linear else "no linear follows the norm directly"
            at = read if user.op == "output" else user  # the output itself has no place in the source
            refuse(at, "escapes" if linear else "no-up", f"{what} ({user.name})")
        ups.append((up, chain))
    return ups


def _scale(norm: RmsNorm, by: Any) -> None:
    """Make the number `by` a factor of the norm; a node of a number stands among the gains."""
    if isinstance(by, Node):
        norm.gains.append(by)
    else:
        norm.scale *= by


def refuse_escapes(norm: RmsNorm) -> None:
    """Raise Refused where something else reads a value between the norm's input and its result."""
    for inner in norm.internal - {norm.node}:
        for outside in (u for u in inner.users if u not in norm.internal):
            refuse(inner, "escapes", f"an intermediate of the norm is used elsewhere too ({outside.name})")


def depends(node: Node, on: set[Node]) -> bool:
    """Whether `node` is computed from one of the nodes `on`, or is one."""
    first = min(on)
    return any(n in on for n in ancestors([node], lambda n: not n < first))


def gain_of(build: Builder, norm: RmsNorm) -> Node | None:
    """The product of all gains and numbers, one per channel; None where there is none."""
    width = value(norm.x).shape[-1]
    numbers = [g for g in norm.gains if not isinstance(value(g), torch.Tensor)]
    tensors = (g for g in norm.gains if g not in numbers)
    rows = (build(aten.reshape.default, g, [value(g).numel()]) if value(g).dim() > 1 else g for g in tensors)
    gain = build.folded(aten.mul.Tensor, rows)
    for number in [*([norm.scale] if norm.scale != 1.0 else []), *numbers]:
        if gain is None:
            gain = build(aten.full.default, [width], number, dtype=torch.float32, device=value(norm.x).device)
        else:
            gain = build(aten.mul.Tensor, gain, number)
    if gain is not None and tuple(value(gain).shape) != (width,):
        gain = build(aten.expand.default, gain, [width])
    return gain
