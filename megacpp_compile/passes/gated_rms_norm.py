"""RMSNorm with a SiLU or sigmoid gate: the norm at the end of a Mamba-2 mixer (arXiv:2405.21060, 7.1), of gated
DeltaNet, and, with a sigmoid, of Kimi Delta Attention (arXiv:2510.26692).

Before: `h = (y * silu(z)).view(.., groups, n); out = w * (h * rsqrt(h.pow(2).mean(-1, True) + eps)).view(y.shape)`
        or, gate last, `out = w * (y * rsqrt(y.pow(2).mean(-1, True) + eps)) * silu(z)`, each with its casts;
        or `sigmoid(z)` in the place of `silu(z)`
After:  `out, rrms = megacpp.gated_rms_norm(y, z, w, eps, group_size, norm_before_gate, dtype, activation)`

A gain `1 + w` is computed in front of the op, as the model does: it is as long as a row, and its gradient is w's.

Safe because the op computes the same function in at least the same precision, and nothing else reads a value between
y, z and out. It saves y, z and one number a group.
Refused: another norm (LayerNorm, eps outside the root, another axis), another gate (GELU, ReLU, tanh), an intermediate
that is used elsewhere, parts under different grad or autocast modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, same_size, same_sizes, value
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse, refuse_if
from megacpp_compile.matchers.gated_rms_norm import GatedNorm, gate_nearby, match_gated_norm, same_source
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.rms_norm import RmsNorm, match_rms_norm
from megacpp_compile.passes._rule import Match

name = "gated_rms_norm"
op = "megacpp::gated_rms_norm"
after = ("down_norm_up",)

_TOPS = {aten.mul.Tensor, aten.div.Tensor, aten.rms_norm.default, aten.layer_norm.default}
_REDUCTIONS = {aten.mean.dim, aten.sum.dim_IntList, aten.rms_norm.default}
# Tags about a multiplication around a norm, to which `find` comes on its own, and about what is no RMSNorm at all.
_AROUND = {"gain-shape", "divided", "two-norms", "rounding", "precision", "no-mean"}


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    seen: set[Node] = set()
    for node in view.graph.nodes:
        norm = match_rms_norm(node) if node.target in _TOPS else None
        if isinstance(norm, MatchFailure):
            if norm.tag not in _AROUND and norm.node not in seen and gate_nearby(node):
                seen.add(norm.node)
                yield norm
        elif norm is not None:
            reductions = {n for n in norm.internal if n.target in _REDUCTIONS}
            if not reductions & seen:  # else a multiplication around a norm already met
                seen |= reductions
                found = _check(view, norm)
                if found is not None:
                    yield found


@or_failure
@or_none
def _check(view: GraphView, norm: RmsNorm) -> Match | MatchFailure | None:
    gated = NoMatch.unless(or_refuse(match_gated_norm(norm)))
    for n in sorted(gated.internal - {gated.node}):
        outside = next((u for u in n.users if u not in gated.internal), None)
        if outside is not None and not same_source(n, (gated.y, gated.z)):
            at = n if outside.op == "output" else outside
            return MatchFailure(
                at, "escapes", f"an intermediate of the gated norm is used elsewhere too ({outside.name})"
            )
    state = view.mode_states
    refuse_if(
        any(state[n] != state[gated.node] for n in gated.internal if not same_source(n, (gated.y, gated.z))),
        gated.node, "region", "part of it runs under another grad or autocast mode",
    )
    width, sizes = _row_width(gated), _sizes(value(gated.node).shape, (gated.y, gated.z))
    if width is None or sizes is None:
        refuse(gated.node, "shape", "operands, gains and result can't be seen as rows of one width")
    inputs = list(dict.fromkeys([gated.y, gated.z, *(g for g, _ in gated.gains)]))
    return Match(gated.node, inputs, [gated.node], lambda build: _rewrite(build, gated, width))


def _row_width(gated: GatedNorm) -> int | None:
    """The width of the op's rows: the widest of operands and gains, a multiple of all others."""
    widths = [value(n).shape[-1] for n in (gated.y, gated.z)] + [n for _, n in gated.gains] + [gated.size]
    if not all(isinstance(n, int) for n in widths):
        return None
    widest = max(widths)
    if all(widest % n == 0 for n in widths):
        return widest
    widest = max([n for _, n in gated.gains] + [gated.size])
    return widest if all(widest % n == 0 for n in [*(n for _, n in gated.gains), gated.size]) else None


def _sizes(shape: Sequence[Any], sources: Sequence[Node]) -> list[Any] | None:
    """Each size as a number, or as (tensor, dimension) that has it; -1 for one that none has; None for two of those."""
    sizes: list[Any] = []
    for n in shape:
        known = ((s, i) for s in sources for i, m in enumerate(value(s).shape) if same_size(m, n))
        sizes.append(n if isinstance(n, int) else next(known, -1))
    return sizes if sizes.count(-1) <= 1 else None


def _reshape(build: Builder, node: Node, shape: Sequence[Any], sources: Sequence[Node]) -> Node:
    have = value(node).shape
    if same_sizes(have, shape):
        return node
    sizes = _sizes(shape, sources)
    assert sizes is not None
    return build(
        aten.reshape.default, node, [build(aten.sym_size.int, *n) if isinstance(n, tuple) else n for n in sizes]
    )


def _rewrite(build: Builder, gated: GatedNorm, width: int) -> tuple[Node, list[Node]]:
    sources = gated.y, gated.z
    like = next((n for n in sources if value(n).shape[-1] == width), None)
    y, z = (
        build(aten.reshape.default, n, [-1, width]) if like is None
        else _reshape(build, n, value(like).shape, (like,))
        for n in sources
    )  # fmt: skip
    node = build(
        torch.ops.megacpp.gated_rms_norm.default,
        y, z, _weight(build, gated, width), float(gated.norm.eps), gated.size, gated.norm_before_gate,
        value(gated.node).dtype, *([gated.activation] if gated.activation != "silu" else []),
    )  # fmt: skip
    return node, [_reshape(build, build.item(node, 0), value(gated.node).shape, sources)]


def _weight(build: Builder, gated: GatedNorm, width: int) -> Node | None:
    """The product of all gains and numbers, one per channel of a row; None where there is none."""
    weight: Node | None = None
    for gain, own_width in gated.gains:
        gain = build.flat(gain)
        if value(gain).shape[0] == 1 != width:
            gain = build(aten.expand.default, gain, [width])
        elif own_width != width:
            gain = build(aten.repeat.default, gain, [width // own_width])
        weight = gain if weight is None else build(aten.mul.Tensor, weight, gain)
    if gated.scale != 1.0:
        if weight is None:
            return build(aten.full.default, [width], gated.scale, dtype=torch.float32, device=value(gated.y).device)
        weight = build(aten.mul.Tensor, weight, gated.scale)
    return weight
