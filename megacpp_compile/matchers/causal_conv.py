"""A depthwise causal convolution, told by the input steps that an output step reads; padding, slices, transpositions
and casts may stand anywhere around it.

Padding adds `left` steps before time 0; a slice keeps the output from `first` on. Output step i then reads the inputs
`i + first - left ... i + first - left + k - 1`, which is causal where `left - first == k - 1` and as many steps are
kept as came in.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import padded_in_front
from megacpp_compile.fx.views import COPIES, is_cast
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if, refuse_narrower
from megacpp_compile.matchers.silu import match_silu
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.parts import part_of


@dataclasses.dataclass
class CausalConv:
    """`end = act(conv(x))` over time.

    x, end: [b, t, c] where their `time` is 1, [b, c, t] where it is 2. weight: [c, 1, k]. internal: nodes from the
    convolution up to `end`. seq_idx: the document of each step [b, t], where a step sees its own alone.
    """

    conv: Node
    x: Node
    x_time: int
    weight: Node
    bias: Node | None
    activation: str
    end: Node
    end_time: int
    internal: set[Node]
    seq_idx: Node | None = None


@or_failure
@or_none
def match_causal_conv(node: Node) -> CausalConv | MatchFailure | None:
    """The causal convolution that `node` computes; None where `node` is neither depthwise nor causal."""
    call = NoMatch.unless(_call(node))
    operand, weight, bias, stride, padding, dilation, groups = call
    channels, taps = value(operand).shape[1], value(weight).shape[2]
    NoMatch.when(not all(isinstance(n, int) for n in (channels, taps)) or taps == 1)
    depthwise = groups == channels and value(weight).shape[:2] == (channels, 1) and channels > 1
    x, x_time, left = _source(operand)
    steps = _Steps(node, left + padding, taps, value(x).shape[x_time])
    found = _walk(steps)
    if not depthwise:
        NoMatch.when(found is None or groups == 1 == channels)
        what = f"{groups} groups for {channels} channels and {value(weight).shape[0]} outputs"
        refuse(node, "groups", f"not depthwise: {what}")
    reason = f"stride {stride}, dilation {dilation}"
    refuse_if(stride != 1 or dilation != 1, node, "stride" if stride != 1 else "dilation", reason)
    if found is None:
        refuse(*steps.why_not())
    end, end_time, activation, internal = found
    refuse_narrower(internal - {end}, (x, end), "operand and result")
    return CausalConv(node, x, x_time, weight, bias, activation, end, end_time, internal)


def _filled(node: Node, defaults: tuple[Any, ...]) -> list[Any]:
    return [*node.args, *defaults[len(node.args) :]]


@or_none
def _call(node: Node) -> tuple[Node, Node, Node | None, int, int, int, int] | None:
    """(operand, weight, bias, stride, padding, dilation, groups) of a 1D convolution whose parameters are numbers."""
    NoMatch.when(node.op != "call_function")
    if node.target is aten.conv1d.default:
        x, w, b, stride, padding, dilation, groups = _filled(node, (None, None, None, [1], [0], [1], 1))
    elif node.target is aten.conv1d.padding:
        x, w, b, stride, kind, dilation, groups = _filled(node, (None, None, None, [1], "valid", [1], 1))
        NoMatch.when(kind != "valid")
        padding = [0]
    elif node.target is aten.convolution.default:
        x, w, b, stride, padding, dilation, transposed, _, groups = _filled(node, ())
        NoMatch.when(transposed)
    else:
        return None
    numbers = [n[0] if isinstance(n, (list, tuple)) and len(n) == 1 else n for n in (stride, padding, dilation)]
    NoMatch.when(
        value(x).dim() != 3 or not value(x).is_floating_point() or not all(isinstance(n, int) for n in numbers)
    )
    return x, w, b, *numbers, groups  # type: ignore[return-value]


def _source(operand: Node) -> tuple[Node, int, int]:
    """(x, its dimension of time, steps of zeros put before it): the tensor that the operand [b, c, t] is made of by
    padding, transpositions, copies and widening casts."""
    node, time, left = operand, 2, 0
    while True:
        if (swapped := is_swap(node)) is not None:
            node, time = swapped, 3 - time
        elif node.target in COPIES or is_cast(node) and _bits(node.args[0]) <= _bits(node):
            node = node.args[0]  # type: ignore[assignment]
        elif (padded := padded_in_front(node, time)) is not None:
            node, left = padded[0], left + padded[1]
        else:
            return node, time, left


def is_swap(node: Node) -> Node | None:
    """The tensor of rank 3 whose last two dimensions `node` swaps, or None."""
    base = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(base, Node) or not isinstance(value(base), torch.Tensor) or value(base).dim() != 3:
        return None
    adjoint = node.target is getattr(aten.matrix_H, "default", aten.mT.default)
    return base if adjoint or permutation(node) == [0, 2, 1] else None


def _bits(node: Any) -> int:
    return torch.finfo(value(node).dtype).bits


class _Steps:
    """Where the convolution's output is complete, and the last value reached for the reason where it never is."""

    def __init__(self, conv: Node, left: int, taps: int, length: Any) -> None:
        self.conv, self.left, self.taps, self.length = conv, left, taps, length
        self.last, self.readers = conv, list(conv.users)

    def complete(self, node: Node, time: int, first: int) -> bool:
        return self.left - first == self.taps - 1 and same_size(value(node).shape[time], self.length)

    def why_not(self) -> tuple[Node, str, str]:
        if len(self.readers) > 1:
            names = ", ".join(sorted(u.name for u in self.readers))
            return self.last, "escapes", f"the convolution with its padding is read by several: {names}"
        return self.last, "not-causal", (
            f"{self.left} steps of padding before {self.taps} taps, and {value(self.conv).shape[2]} outputs, "
            f"are not cut to one output for each of {self.length} steps that sees no later one"
        )  # fmt: skip


def _walk(steps: _Steps) -> tuple[Node, int, str, set[Node]] | None:
    """(end, its dimension of time, activation, nodes up to it), followed while every value has exactly one reader."""
    node, time, first, activation = steps.conv, 2, 0, ""
    internal = {node}
    best = (node, time, activation, set(internal)) if steps.complete(node, time, first) else None
    while True:
        steps.last, steps.readers = node, list(node.users)
        silu = next((s for u in node.users for s in silu_of(node, u)), None) if not activation else None
        is_end = True
        if silu is not None:
            internal |= silu[1]
            node, activation = silu[0], "silu"
        elif len(node.users) != 1:
            return best
        else:
            (user,) = node.users
            if is_swap(user) is not None:
                time = 3 - time
            elif user.target is aten.slice.Tensor and (begin := _begin(user, time)) is not None:
                first += begin
            elif user.target in COPIES:
                is_end = time == 1
            elif is_cast(user):
                is_end = _bits(user) <= _bits(node)
            else:
                return best
            node = user
            internal.add(node)
        if is_end and steps.complete(node, time, first):
            best = (node, time, activation, set(internal))


def silu_of(node: Node, reader: Node) -> list[tuple[Node, set[Node]]]:
    """SiLU of `node`, if that is all that reads it, `reader` being a part of it."""
    for top in (reader, *reader.users):
        found = match_silu(top)
        if found is not None and found[0] is node and set(node.users) <= found[1]:
            if all(set(n.users) <= found[1] for n in found[1] - {top}):
                return [(top, found[1])]
    return []


def _begin(slice_node: Node, time: int) -> int | None:
    """Where a slice along time begins; None for other slices."""
    part = part_of(slice_node)
    return part.start if part is not None and part.is_run and part.dim == time and part.start >= 0 else None
