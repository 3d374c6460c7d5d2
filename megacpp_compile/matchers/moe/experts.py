"""Matches one expert, a feed-forward block over rows, through whatever GEMMs multiply by its weights.

`down(f(gate(r)) * up(r))`, `down(f(up(r)))`, or with gate and up in one GEMM whose halves are split, or whose channels
are theirs in turn. `activation.py` says what may lie between the GEMMs; a failure names anything else that does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import called, same_size, value
from megacpp_compile.fx.views import COMPOSITE_PERMUTATIONS, PERMUTATIONS, RESHAPES, is_cast
from megacpp_compile.fx.walks import near
from megacpp_compile.lowerings._activation import Activation, Bound
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse, refuse_if
from megacpp_compile.matchers.moe.activation import CLAMPS, bound_of, lane_cut, match_product, merged, shifted
from megacpp_compile.matchers.moe.gemms import Gemm, MatchGemm, Weight, match_linear_gemm, strip_row_views
from megacpp_compile.matchers.moe.routing import Mask
from megacpp_compile.matchers.moe.rows import picked, read_at
from megacpp_compile.reader.links import through

_NEAR = 24  # nodes to look at
_STACKED = {aten.bmm.default, aten.baddbmm.default, aten.matmul.default, aten.einsum.default}
_REARRANGED = RESHAPES | PERMUTATIONS | COMPOSITE_PERMUTATIONS
ONE_PROJECTION = "an expert is one projection of its rows: the op computes two with an activation between them"


@dataclasses.dataclass(frozen=True)
class Expert:
    """`node = down(activation(gate) * up)`; `ups` holds the GEMMs of gate and up, or the one of both."""

    node: Node
    x: Node
    ups: tuple[Gemm, ...]
    down: Gemm
    activation: str
    layout: str

    @property
    def parameters(self) -> list[Weight]:
        """The weights and biases."""
        return [part for gemm in (*self.ups, self.down) for part in gemm.parameters]

    @property
    def biased(self) -> bool:
        return any(gemm.bias is not None for gemm in (*self.ups, self.down))


def match_expert(node: Node, match_gemm: MatchGemm) -> Expert | MatchFailure | None:
    """The expert whose output is `node`; None where it does not even end in a GEMM."""
    down = match_gemm(strip_row_views(node))
    return expert_ending_in(down, match_gemm) if isinstance(down, Gemm) else down


@dataclasses.dataclass(frozen=True)
class Operand:
    """`size` channels of `gemm`, from `first` on and `step` apart, within a bound, plus a number."""

    gemm: Gemm
    first: int
    step: int
    size: Any
    bound: Bound
    offset: float

    @property
    def whole(self) -> bool:
        return (self.first, self.step) == (0, 1) and same_size(self.size, value(self.gemm.node).shape[-1])


@or_failure
def expert_ending_in(down: Gemm, match_gemm: MatchGemm) -> Expert | MatchFailure:
    """The expert whose last GEMM is `down`."""
    node, inner = down.node, strip_row_views(down.x)
    product = match_product(inner)
    if product is None or len(product.others) > 1:
        return _unmatched(inner, match_gemm)
    operands = [or_refuse(_operand(part, match_gemm)) for part in (product.gate, *product.others)]
    found = [operand for operand in operands if isinstance(operand, Operand)]
    if len(found) != len(operands) or found[0].offset:
        return _unmatched(inner, match_gemm)
    gate, *up = found
    activation = Activation(product.name, product.alpha, gate.bound, product.result, linear=product.linear)
    if not up:
        refuse_if(not gate.whole, inner, "halves", "an expert reads a part of its projection")
        return Expert(node, gate.gemm.x, (gate.gemm,), down, str(activation), "single")
    activation = dataclasses.replace(activation, up=up[0].bound, offset=up[0].offset + product.offset)
    return _gated(node, inner, str(activation), gate, up[0], down)


def _operand(node: Node, match_gemm: MatchGemm) -> Operand | MatchFailure | None:
    """The channels of a GEMM that `node` is, bounded and shifted."""
    bound, offset, first, step, size = Bound(), 0.0, 0, 1, value(node).shape[-1]
    while True:
        node = strip_row_views(node)
        if (cut := lane_cut(node)) is not None:
            node, first, step = cut[0], cut[1] + first * cut[2], step * cut[2]
        elif (limited := bound_of(node)) is not None and (both := merged(bound, limited[1])) is not None:
            node, bound = limited[0], both
        elif not bound and (sum_ := shifted(node)) is not None:
            node, offset = sum_[0], offset + sum_[1]
        else:
            found = match_gemm(node)
            return Operand(found, first, step, size, bound, offset) if isinstance(found, Gemm) else found


def _unmatched(inner: Node, match_gemm: MatchGemm) -> MatchFailure:
    """The failure that names everything between the first GEMMs and `inner`, which the last one reads."""
    reasons, others, order = dict[str, tuple[Node, str]](), dict[str, None](), [inner]
    gemms = 0
    for node in order:
        found, cut = match_gemm(node), lane_cut(node)
        if isinstance(found, Gemm):
            gemms += 1
            continue
        if isinstance(found, MatchFailure) and found.tag == "bias":
            reasons.setdefault("bias", (node, found.reason))
            continue
        if node.target in CLAMPS and bound_of(node) is None:
            reasons.setdefault("clamp", (node, "gate or up is clamped by what is no number on its side of zero"))
        elif cut is None and node.target not in CLAMPS:
            others[str(node.target).removeprefix("aten.").split(".")[0]] = None
        below = [strip_row_views(n) for n in ([cut[0]] if cut is not None else node.all_input_nodes)]
        given = [n for n in below if isinstance(value(n), torch.Tensor) and not _computed(n)]
        gemms += sum(isinstance(match_gemm(n), Gemm) for n in given)
        order += [n for n in below if n not in order and _computed(n)] if len(order) < _NEAR else []
    if not gemms and not reasons and len(order) < _NEAR:
        first = next(filter(multiplies_stacked, order), None)
        return MatchFailure(inner, "projections", ONE_PROJECTION) if first is None else changed_rows(first)
    if match_product(inner) is None:
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


# (first channel of the gate, of up, and how far apart channels are), in halves of the projection -> layout
_SHARED = {(0, 1, 1): "gate_up", (1, 0, 1): "up_gate", (0, 1, 2): "interleaved"}


@or_failure
def _gated(node: Node, inner: Node, activation: str, gate: Operand, up: Operand, down: Gemm) -> Expert | MatchFailure:
    """The expert `node` whose `inner` is the product of `gate`, activated, and `up`."""
    if gate.gemm.node is up.gemm.node:
        total, half, step = value(gate.gemm.node).shape[-1], gate.size, gate.step
        apart = half if step == 1 else 1
        known = isinstance(half, int) and gate.size == up.size and total == 2 * half and step == up.step
        if known and {gate.first, up.first} == {0, apart}:
            layout = _SHARED.get((gate.first // apart, up.first // apart, step))
            if layout is not None:
                return Expert(node, gate.gemm.x, (gate.gemm,), down, activation, layout)
        refuse(inner, "halves", "gate and up are not the halves of one projection")
    refuse_if(not (gate.whole and up.whole), inner, "halves", "gate and up are parts of two projections")
    same = _same_rows(strip_row_views(gate.gemm.x), strip_row_views(up.gemm.x))
    refuse_if(not same, inner, "inputs", "gate and up are projections of two different inputs")
    return Expert(node, gate.gemm.x, (gate.gemm, up.gemm), down, activation, "pair")


def _same_rows(a: Node, b: Node) -> bool:
    """Whether `a` and `b` are one node, or the same rows of one tensor."""
    if a is b:
        return True
    read = a.target in (aten.index.Tensor, aten.index_select.default) and a.target is b.target
    return read and a.args == b.args and a.kwargs == b.kwargs


def refuse_unlike(experts: list[Expert]) -> None:
    """Raise Refused where any expert is built unlike the first of them."""
    first = experts[0]
    for other in experts[1:]:
        same = (other.activation, other.layout) == (first.activation, first.layout)
        for a, b in zip((*first.ups, first.down), (*other.ups, other.down), strict=False):
            shapes = zip(_shape(a.weight), _shape(b.weight), strict=True)
            same = same and all(map(same_size, *zip(*shapes, strict=True))) and (a.bias is None) == (b.bias is None)
            same = same and value(a.node).dtype == value(b.node).dtype and a.dtype == b.dtype
        refuse_if(not same, other.node, "experts-differ", "the experts are not built alike")


def _shape(w: Weight) -> tuple[Any, Any]:
    a, b = value(w.tensor).shape[-2:]
    return (b, a) if w.transposed else (a, b)


def one_projection_of_all(outs: list[Node]) -> MatchFailure | None:
    """That `outs` are projections of what all of them read, and nothing more."""
    gemms = [match_linear_gemm(strip_row_views(out)) for out in outs]
    read = {strip_row_views(gemm.x) for gemm in gemms if isinstance(gemm, Gemm)}
    if len(outs) == 1 or len(read) != 1 or not all(isinstance(gemm, Gemm) for gemm in gemms):
        return None
    return MatchFailure(outs[0], "projections", ONE_PROJECTION)


def one_projection_of_rows(out: Node, mask: Mask) -> MatchFailure | None:
    """That `out` is a projection of the rows of `mask`, and nothing more."""
    gemm = match_linear_gemm(out)
    read = read_at(strip_row_views(gemm.x)) if isinstance(gemm, Gemm) else None
    alone = read is not None and picked(read[1]) == mask
    return MatchFailure(out, "projections", ONE_PROJECTION) if alone else None


def multiplies_stacked(node: Node) -> bool:
    """Whether `node` is a product with a weight of all experts."""
    return node.target in _STACKED and any(_is_stack(n) for n in node.all_input_nodes)


def _is_stack(node: Node) -> bool:
    node = through(node, _REARRANGED, is_cast)
    return node.op != "call_function" and value(node).dim() == 3


def changed_rows(first: Node) -> MatchFailure:
    """Why `first`, an expert's first projection, is none of rows: what they go through."""
    rows = [n for n in map(strip_row_views, first.all_input_nodes) if n.op == "call_function" and not _is_stack(n)]
    named = ", ".join(dict.fromkeys(called(n).split(".")[0] for n in rows))
    reason = f"an expert's first projection reads what {named} makes, which is not seen to be rows of tokens"
    return MatchFailure(first, "rows", reason)


def changed_before(out: Node) -> str:
    """Why `out`, which is weighted, is no expert's output: what its last GEMM goes through, if there is one."""
    between, gemms = [out], 0
    for node in between:
        if isinstance(match_linear_gemm(strip_row_views(node)), Gemm):
            gemms += 1
        elif node.op == "call_function" and len(between) < _NEAR:
            between += [n for n in node.all_input_nodes if n not in between]
    changes = [n for n in sorted(between) if n.op == "call_function" and strip_row_views(n) is n]
    own = [n for n in changes if not match_linear_gemm(n)]
    named = dict.fromkeys(str(n.target).removeprefix("aten.").split(".")[0] for n in own)
    if not gemms:
        return "what is weighted is no expert's output"
    if gemms > 1:
        joined = f"what is weighted is made of several projections ({', '.join(named)})"
        return f"{joined}: an expert's output is one, to which only a bias may be added"
    return f"an expert's output goes through {', '.join(named)} before it is weighted: only a bias may be added there"


def computed_from(node: Any) -> list[Node]:
    """`node` and what it is computed from in a few steps, tensors alone."""
    found = near(node, _NEAR) if isinstance(node, Node) else []
    return [n for n in found if n.op == "call_function" and isinstance(value(n), torch.Tensor)]
