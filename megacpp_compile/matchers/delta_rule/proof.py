"""The proof that a core is a delta rule: at small sizes, on random operands, it computes the recurrence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.delta_rule.roles import DeltaRuleAxes, Roles
from megacpp_compile.matchers.delta_rule.rules import SOLVES
from megacpp_compile.matchers.ssd.atoms import NoAxes, flat, number, pin
from megacpp_compile.matchers.ssd.resize import Resized, agree, tensor_dims
from megacpp_compile.matchers.ssd.roles import arranged

TOLERANCE = 1e-8  # float64, a few thousand operations
NO_SCALE = 1e-12
MOST_ELEMENTS = 1 << 25  # of the largest tensor: 256 MiB
SMALLEST = (2,)  # where others would make it larger
LONGEST_CHUNK = 64
ANY_CHUNK = (4, 5)  # tokens that stand for as many as there are


TURNS = (0, 1)  # of operands, and of sizes


@or_none
def proved(
    r: Resized, root: Node, exports: Sequence[Node], roles: Roles, eps: float | None
) -> tuple[float, Node | None] | None:
    """(the scale of the result, an export that is not the final state); None where the result is no delta rule of its
    operands. Leaves the sizes of `r` solved."""
    scales, wrong = [], None
    _keep_chunks(r, roles.axes)
    for turn in TURNS:
        _solve(r, turn)
        one = NoMatch.unless(_tried(r, root, exports, roles, eps, turn))
        scales.append(one[0])
        wrong = wrong or one[1]
    NoMatch.when(max(scales) - min(scales) > TOLERANCE * abs(scales[0]))  # it depends on a size that is not kept
    scale = float(f"{scales[0]:.15g}")  # what a sum of other operands, or another BLAS, makes of it too
    return (1.0 if abs(scale - 1) < NO_SCALE else scale), wrong


def _keep_chunks(r: Resized, x: DeltaRuleAxes) -> None:
    """Have dimensions of tokens that meet themselves keep their size: a series that is cut off is the inverse of a
    triangle that is small enough. Where they are long or symbolic, only a system that is solved will do for any."""
    others = {*x.b, *x.h, *x.k, *x.v}
    every = [[a for d in dims for a in flat(d)] for dims in map(tensor_dims, r.dims.values())]
    meeting = dict.fromkeys(a for dims in every for a in dims if a not in others and dims.count(a) > 1)
    for atom in meeting:
        size = number(atom.size)
        if (size is None or size > LONGEST_CHUNK) and any(n.target in SOLVES for n in r.nodes):
            r.axes.chosen[atom] = ANY_CHUNK
        else:
            pin([[atom]])


def _solve(r: Resized, turn: int) -> None:
    """Choose sizes. Dimensions that loops have unrolled keep theirs, and the others are as small as can be where the
    tensors that they make would be large; NoAxes where these are too large to try."""
    for small in (r.axes.small, SMALLEST):
        r.axes.small = small
        r.solve(turn)
        tensors = (n for n in r.nodes if isinstance(value(n), Tensor))
        count, name = max(((math.prod(r.shape(r.dims[n])), n.name) for n in tensors), default=(0, ""))
        if count <= MOST_ELEMENTS:
            return
    raise NoAxes(f"{name} would have {count} elements in the trial that tells what is computed")


def _tried(
    r: Resized, root: Node, exports: Sequence[Node], roles: Roles, eps: float | None, turn: int
) -> tuple[float, Node | None] | None:
    generator = torch.Generator().manual_seed(turn)  # of its own: a model draws the same, whatever is compiled
    names = {n: name for name, n in roles.nodes.items()}
    operands = {n: _random(names[n], r.shape(r.of(n)), eps, generator) for n in r.leaves}
    if turn == 0:  # keys that are alike: else high powers of a triangle are next to nothing, and lacked by nobody
        operands[roles.nodes["k"]] = operands[roles.nodes["k"]].abs()
    o, *states = r.run(operands, [root, *exports])
    x = roles.axes
    target = {
        "q": [x.b, x.t, x.h, x.k], "k": [x.b, x.t, x.h, x.k], "v": [x.b, x.t, x.h, x.v], "g": [x.b, x.t, x.h, x.k],
        "beta": [x.b, x.t, x.h], "initial_state": [x.b, x.h, x.k, x.v],
    }  # fmt: skip
    given = {name: arranged(r.axes, operands[n], r.of(n), target[name]) for name, n in roles.nodes.items()}
    want, state = recurrence(given, eps)
    got = arranged(r.axes, o, r.of(root), target["v"])
    scale = float((got * want).sum() / want.square().sum())
    if not math.isfinite(scale) or abs(scale) < NO_SCALE or not agree(got, scale * want, TOLERANCE):
        return None
    wrong = None
    for node, found in zip(exports, states, strict=True):
        dims = r.of(node)
        same = sorted(map(id, (a for d in dims for a in d))) == sorted(map(id, [*x.b, *x.h, *x.k, *x.v]))
        if not same or not agree(arranged(r.axes, found, dims, target["initial_state"]), state, TOLERANCE):
            wrong = wrong or node
    return scale, wrong


def recurrence(given: Mapping[str, Tensor], eps: float | None) -> tuple[Tensor, Tensor]:
    """o and the last state, token by token, of operands that all have their heads; gates a channel."""
    q, k, v = given["q"], given["k"], given["v"]
    if eps is not None:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    b, t, h, values = v.shape
    state = given["initial_state"].clone() if "initial_state" in given else v.new_zeros(b, h, k.shape[-1], values)
    decays: Sequence[Tensor | float] = given["g"].exp()[..., None].unbind(1) if "g" in given else [1.0] * t
    beta = given["beta"][..., None] if "beta" in given else v.new_ones(b, t, h, 1)
    o = []
    for q_t, k_t, v_t, decay, weight in zip(q.unbind(1), k.unbind(1), v.unbind(1), decays, beta.unbind(1), strict=True):
        state = decay * state
        u = weight * (v_t - (k_t[..., None] * state).sum(-2))
        state = state + k_t[..., None] * u[..., None, :]
        o.append((q_t[..., None] * state).sum(-2))
    return torch.stack(o, 1), state


def _random(name: str, shape: list[int], eps: float | None, generator: torch.Generator) -> Tensor:
    """Gates below 0 and weights from 0 to 1, as every model's; keys so short that no state grows, or, before a norm, as
    short as shows its eps."""
    if name in ("g", "beta"):
        drawn = torch.rand(shape, dtype=torch.float64, device="cpu", generator=generator)
        return -0.2 * drawn if name == "g" else drawn
    drawn = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
    if name in ("q", "k"):
        drawn *= 0.5 if eps is None else max(eps, 1e-12) ** 0.5
    return drawn
