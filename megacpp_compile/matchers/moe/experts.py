"""Matches one expert, a feed-forward block over rows, through whatever GEMMs multiply by its weights.

`down(f(gate(r)) * up(r))`, `down(f(up(r)))`, or with gate and up in one GEMM whose halves are split. Biases, other
activations and anything in between make a failure that names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.views import is_cast, is_outer_view, lane_slice

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight [out, in], or [in, out] if `transposed`.

    Attributes:
        tensor: the weight itself, or with `index` or `every` a tensor that holds one for each expert.
        index: this expert's place in `tensor`.
        every: whether this stands for the weights of all experts, of which each row takes one.
    """

    tensor: Node
    transposed: bool = False
    index: int | None = None
    every: bool = False


@dataclasses.dataclass(frozen=True)
class Gemm:
    """`node = x @ weight.T` over rows."""

    node: Node
    x: Node
    weight: Weight


@dataclasses.dataclass(frozen=True)
class Expert:
    """`node = down(activation(gate) * up)`; `ups` holds the GEMMs of gate and up, or the one of both."""

    node: Node
    x: Node
    ups: tuple[Gemm, ...]
    down: Gemm
    activation: str
    layout: str


MatchGemm = Callable[[Node], Gemm | MatchFailure | None]
_BIAS = "an expert's projection has a bias, which the op does not add"
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default,
           aten.minimum.default, aten.maximum.default)  # fmt: skip
_ROWS = (aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.select.int)


def match_linear_gemm(node: Node) -> Gemm | MatchFailure | None:
    """The GEMM of rows with one expert's own weight that `node` computes."""
    found = match_linear(node)
    if found is None:
        return None
    if found.b is not None:
        return MatchFailure(node, "bias", _BIAS)
    w, transposed = found.w, found.transposed
    while True:
        if is_cast(w) or w.target in (aten.alias.default, aten.clone.default, aten.contiguous.default):
            w = w.args[0]  # type: ignore[assignment]
        elif w.target is aten.t.default or (
            w.target is aten.transpose.int and {d % 2 for d in w.args[1:3]} == {0, 1}  # type: ignore[operator]
        ) or (w.target is aten.permute.default and [d % 2 for d in w.args[1]] == [1, 0]):  # type: ignore[union-attr]
            w, transposed = w.args[0], not transposed  # type: ignore[assignment]
        else:
            break
    if w.target is aten.select.int and value(w.args[0]).dim() == 3:
        stack, dim, index = w.args
        if dim % 3 == 0 and isinstance(index, int) and isinstance(value(stack).shape[0], int):  # type: ignore[operator]
            return Gemm(node, found.x, Weight(stack, transposed, index % value(stack).shape[0]))  # type: ignore[arg-type]
    if str(w.target) == "<built-in function getitem>" and isinstance(w.args[0], Node):
        parts, index = w.args
        if parts.target is aten.unbind.int and value(parts.args[0]).dim() == 3:
            if ([*parts.args, 0][1] or 0) % 3 == 0:  # type: ignore[operator]
                return Gemm(node, found.x, Weight(parts.args[0], transposed, index))  # type: ignore[arg-type]
    return Gemm(node, found.x, Weight(w, transposed))


def strip_row_views(node: Node) -> Node:
    """What `node` is a cast of, or a view that leaves rows and channels as they are."""
    while is_cast(node) or (is_outer_view(node) and _rows_kept(node)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _rows_kept(view: Node) -> bool:
    """Whether `view` reads rows [.., R, d] with at most one dimension larger than 1: it cannot reorder them."""
    return sum(not (isinstance(n, int) and n == 1) for n in value(view.args[0]).shape[:-1]) <= 1


def _activation(node: Node) -> tuple[str, Node] | None:
    """(name, argument) of the activation that `node` computes."""
    node = strip_row_views(node)
    target, args = node.target, node.args
    if target is aten.silu.default:
        return "silu", args[0]  # type: ignore[return-value]
    if target is aten.gelu.default:
        kind = node.kwargs.get("approximate", args[1] if len(args) > 1 else "none")
        return "gelu" if kind == "none" else "gelu_tanh", args[0]  # type: ignore[return-value]
    if target is aten.relu.default:
        return "relu", args[0]  # type: ignore[return-value]
    squared = None
    if target is aten.pow.Tensor_Scalar and args[1] == 2 or target is aten.square.default:
        squared = args[0]
    elif target is aten.mul.Tensor and args[0] is args[1]:
        squared = args[0]
    if isinstance(squared, Node) and strip_row_views(squared).target is aten.relu.default:
        return "relu2", strip_row_views(squared).args[0]  # type: ignore[return-value]
    if target is aten.mul.Tensor and of_tensors(node):
        for h, s in (args, args[::-1]):
            s = strip_row_views(s)  # type: ignore[arg-type]
            if s.target is aten.sigmoid.default and strip_row_views(s.args[0]) is strip_row_views(h):  # type: ignore[arg-type]
                return "silu", h  # type: ignore[return-value]
    return None


def match_expert(node: Node, match_gemm: MatchGemm) -> Expert | MatchFailure | None:
    """The expert whose output is `node`; None where it does not even end in a GEMM."""
    node = strip_row_views(node)
    if (plain := gemm_before_bias(node, match_gemm)) is not None:
        return bias_failure(node, expert_ending_in(plain, match_gemm))
    down = match_gemm(node)
    return expert_ending_in(down, match_gemm) if isinstance(down, Gemm) else down


def gemm_before_bias(node: Node, match_gemm: MatchGemm) -> Gemm | None:
    """The GEMM to which `node` adds a bias: one row for all rows, or for each row its own expert's."""
    if node.target is not aten.add.Tensor or not of_tensors(node):
        return None
    for a, b in (node.args, node.args[::-1]):
        bias = strip_row_views(b)  # type: ignore[arg-type]
        if bias.target in _ROWS or all(isinstance(n, int) and n == 1 for n in value(bias).shape[:-1]):
            found = match_gemm(strip_row_views(a))  # type: ignore[arg-type]
            if isinstance(found, Gemm):
                return found
    return None


def bias_failure(node: Node, rest: object = None) -> MatchFailure:
    """The failure of an expert with a bias at `node`, joined with that of the `rest` of the expert if it is one."""
    others = rest.reason.removeprefix(_BIAS).removeprefix("; and ") if isinstance(rest, MatchFailure) else ""
    return MatchFailure(node, "bias", f"{_BIAS}; and {others}" if others else _BIAS)


def expert_ending_in(down: Gemm, match_gemm: MatchGemm) -> Expert | MatchFailure:
    """The expert whose last GEMM is `down`."""
    node, inner = down.node, strip_row_views(down.x)
    found = _activation(inner)
    if found is not None:
        up = match_gemm(strip_row_views(found[1]))
        if isinstance(up, Gemm):
            return Expert(node, up.x, (up,), down, found[0], "single")
        if isinstance(up, MatchFailure):
            return up
    if inner.target is not aten.mul.Tensor or not of_tensors(inner):
        return _unmatched(inner, match_gemm)
    for gate, up_side in (inner.args, inner.args[::-1]):
        found = _activation(gate)  # type: ignore[arg-type]
        if found is not None:
            return _gated(node, inner, found, strip_row_views(up_side), down, match_gemm)  # type: ignore[arg-type]
    return _unmatched(inner, match_gemm)


def _unmatched(inner: Node, match_gemm: MatchGemm) -> MatchFailure:
    """The failure that names everything between the first GEMMs and `inner`, which the last one reads."""
    reasons, others, order = dict[str, tuple[Node, str]](), dict[str, None](), [inner]
    for node in order:
        found, cut = match_gemm(node), lane_slice(node)
        if isinstance(found, Gemm):
            continue
        if isinstance(found, MatchFailure) and found.tag == "bias" or gemm_before_bias(node, match_gemm) is not None:
            reasons.setdefault("bias", (node, _BIAS))
            continue
        if node.target in _CLAMPS:
            reasons.setdefault("clamp", (node, "gate or up is clamped, which no activation of the op does"))
        elif node.target is aten.slice.Tensor and cut is None:
            reasons.setdefault("halves", (node, "gate and up are every other channel of a projection, not its halves"))
        elif cut is None:
            others[str(node.target).removeprefix("aten.").split(".")[0]] = None
        below = map(strip_row_views, [cut[0]] if cut is not None else node.all_input_nodes)
        order += [n for n in below if n not in order and _computed(n)] if len(order) < 24 else []
    known = inner.target is aten.mul.Tensor and any(_activation(a) for a in inner.args if isinstance(a, Node))
    if not known and _activation(inner) is None:
        others_named = f" ({', '.join(others)})" if others else ""
        reasons["activation"] = inner, f"its activation is none that is known{others_named}"
    elif not reasons:
        reasons["projections"] = inner, "the activation's operands are no projections of the expert's rows"
    tag = min(reasons, key=["bias", "clamp", "halves", "activation", "projections"].index)
    return MatchFailure(reasons[tag][0], tag, "; and ".join(reason for _, reason in reasons.values()))


def _computed(node: Node) -> bool:
    """Whether the graph computes `node`, and it has channels."""
    fake = value(node)
    computed = node.op == "call_function" and isinstance(fake, torch.Tensor)
    return computed and fake.is_floating_point() and fake.dim() > 1


def _gated(
    node: Node, inner: Node, found: tuple[str, Node], up_node: Node, down: Gemm, match_gemm: MatchGemm
) -> Expert | MatchFailure:
    """The expert `node` whose `inner` is `activation(gate) * up_node`, `found` being (activation, gate)."""
    activation, gate_node = found[0], strip_row_views(found[1])
    gate, up = _channels(gate_node, match_gemm), _channels(up_node, match_gemm)
    for part in (gate, up):
        if isinstance(part, MatchFailure):
            return part
    if gate is None or up is None or isinstance(gate, MatchFailure) or isinstance(up, MatchFailure):
        return _unmatched(inner, match_gemm)
    if gate[0].node is up[0].node:
        total, half = value(gate[0].node).shape[-1], gate[2]
        starts = (gate[1], up[1])
        if gate[2] != up[2] or total != 2 * half or sorted(starts) != [0, half]:
            return MatchFailure(inner, "halves", "gate and up are not the halves of one projection")
        layout = "gate_up" if starts[0] == 0 else "up_gate"
        return Expert(node, gate[0].x, (gate[0],), down, activation, layout)
    if any(part[1] or part[2] != value(part[0].node).shape[-1] for part in (gate, up)):
        return MatchFailure(inner, "halves", "gate and up are parts of two projections")
    if strip_row_views(gate[0].x) is not strip_row_views(up[0].x):
        return MatchFailure(inner, "inputs", "gate and up are projections of two different inputs")
    return Expert(node, gate[0].x, (gate[0], up[0]), down, activation, "pair")


def _channels(node: Node, match_gemm: MatchGemm) -> tuple[Gemm, int, Any] | MatchFailure | None:
    """(GEMM, first channel, how many) where `node` is a run of a GEMM's channels."""
    start, size = 0, value(node).shape[-1]
    while (cut := lane_slice(node)) is not None:
        node, start = strip_row_views(cut[0]), start + cut[1]
    found = match_gemm(node)
    return (found, start, size) if isinstance(found, Gemm) else found


def first_unlike(experts: list[Expert]) -> Node | None:
    """The first expert that is built unlike the first of them; None where all are alike."""
    first = experts[0]
    for other in experts[1:]:
        same = (other.activation, other.layout) == (first.activation, first.layout)
        for a, b in zip((*first.ups, first.down), (*other.ups, other.down), strict=False):
            shapes = zip(_shape(a.weight), _shape(b.weight), strict=True)
            same = same and all(map(same_size, *zip(*shapes, strict=True)))
            same = same and value(a.node).dtype == value(b.node).dtype
        if not same:
            return other.node
    return None


def _shape(w: Weight) -> tuple[Any, Any]:
    a, b = value(w.tensor).shape[-2:]
    return (b, a) if w.transposed else (a, b)
