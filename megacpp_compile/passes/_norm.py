"""Follows a norm to its projections, for every pass that takes both together."""

from __future__ import annotations

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.linear import Linear, match_linear
from megacpp_compile.matchers.rms_norm import NoNorm, RmsNorm, match_rms_norm
from megacpp_compile.matchers.views import consumers, is_cast, is_outer_view

aten = torch.ops.aten


def between(node: Node) -> bool:
    """Whether `node` may stand between a norm and its projections: a view or a cast."""
    return is_outer_view(node) or is_cast(node)


def scaled(node: Node) -> bool:
    """Whether `node` multiplies a norm's output by a number, which then belongs to the gain."""
    return node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(node.args[1], (int, float))


def norm_before(linear: Linear) -> tuple[Node, RmsNorm | NoNorm | None]:
    """(what `linear` reads behind views, casts and a scaling, the norm that it is)."""
    source = linear.x
    while (between(source) or scaled(source)) and not isinstance(match_rms_norm(source), RmsNorm):
        source = source.args[0]  # type: ignore[assignment]
    return source, match_rms_norm(source)


def projections(norm: RmsNorm) -> tuple[list[tuple[Linear, list[Node]]], MatchFailure | None]:
    """(the linears that read the norm, each with the chain to it; why not, where something else reads it too).

    Views, casts and one scaling by a number may stand in between.
    """
    ups = []
    uses = consumers(norm.node, between)
    if len(uses) == 1 and scaled(uses[0][0]) and uses[0][0].args[0] is uses[0][1]:
        scaling, _, chain = uses[0]
        norm.internal.add(scaling)
        norm.internal.update(chain)
        norm.scale *= float(scaling.args[1])  # type: ignore[arg-type]
        norm.internal.add(norm.node)
        prefix = chain
        norm.node = scaling
        uses = [(u, v, prefix + c) for u, v, c in consumers(scaling, between)]
    for user, read, chain in uses:
        up = match_linear(user)
        if up is None or up.x is not read or up.w is read:
            linear = any(match_linear(u) is not None for u, _, _ in uses)
            what = "the normed value is used elsewhere too" if linear else "no linear follows the norm directly"
            at = read if user.op == "output" else user  # the output itself has no place in the source
            return [], MatchFailure(at, "escapes" if linear else "no-up", f"{what} ({user.name})")
        ups.append((up, chain))
    return ups, None


def escaping(norm: RmsNorm) -> MatchFailure | None:
    """The failure of a norm where something else reads a value between its input and its result."""
    for inner in norm.internal - {norm.node}:
        outside = next((u for u in inner.users if u not in norm.internal), None)
        if outside is not None:
            return MatchFailure(inner, "escapes", f"an intermediate of the norm is used elsewhere too ({outside.name})")
    return None


def depends(node: Node, on: set[Node]) -> bool:
    """Whether `node` is computed from one of the nodes `on`, or is one."""
    first = min(on)
    seen, stack = set(), [node]
    while stack:
        n = stack.pop()
        if n in on:
            return True
        if n not in seen and n > first:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return False


def gain_of(build: Builder, norm: RmsNorm) -> Node | None:
    """The product of all gains and numbers, one per channel; None where there is none."""
    gain: Node | None = None
    width = value(norm.x).shape[-1]
    for g in norm.gains:
        if value(g).dim() > 1:
            g = build(aten.reshape.default, g, [value(g).numel()])
        gain = g if gain is None else build(aten.mul.Tensor, gain, g)
    if norm.scale != 1.0:
        ones = build(aten.full.default, [width], norm.scale, dtype=torch.float32, device=value(norm.x).device)
        gain = ones if gain is None else build(aten.mul.Tensor, gain, norm.scale)
    if gain is not None and tuple(value(gain).shape) != (width,):
        gain = build(aten.expand.default, gain, [width])
    return gain
