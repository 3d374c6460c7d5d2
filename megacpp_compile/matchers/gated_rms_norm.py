"""RMSNorm with a SiLU or sigmoid gate before or behind it, from the norm outwards.

Downstream of the norm the matcher follows gains, numbers, casts and reshapes that keep every group of `size` channels
together, and at most one gate. Upstream it looks for the product of a tensor and a gate, perhaps reshaped into groups.
Source: Mamba-2, https://arxiv.org/abs/2405.21060, section 7.1.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import DIVISIONS, MULTIPLICATIONS, SCALINGS
from megacpp_compile.fx.edit import of_tensors, same_shape, value
from megacpp_compile.fx.views import COPIES, FOLDS, RESHAPES, is_cast
from megacpp_compile.matchers._match import MatchFailure, bits_of, or_failure, refuse_narrower
from megacpp_compile.matchers.rms_norm import RmsNorm
from megacpp_compile.matchers.silu import match_sigmoid, match_silu
from megacpp_compile.reader.links import chain, through, widens

# Ops that keep the elements in row-major order and change the dimensions only.
_ROW_MAJOR = RESHAPES | FOLDS | {aten.unsqueeze.default, aten.squeeze.dim}
_GATES = {"silu": match_silu, "sigmoid": match_sigmoid}
_OTHER_GATES = {aten.gelu.default: "GELU", aten.relu.default: "ReLU", aten.tanh.default: "tanh"}


@dataclasses.dataclass
class GatedNorm:
    """`node` is the norm of y, or of `y * f(z)`, in groups of `size` channels, times gains and perhaps `f(z)`.

    activation: the name of f. gains: (tensor, channels it spans: `size`, or a multiple, for groups that differ).
    internal: nodes up to `node`.
    """

    norm: RmsNorm
    node: Node
    y: Node
    z: Node
    gains: list[tuple[Node, int]]
    scale: float
    size: int
    norm_before_gate: bool
    activation: str
    internal: set[Node]


@or_failure
@or_none
def match_gated_norm(norm: RmsNorm) -> GatedNorm | MatchFailure | None:
    """The gated norm around `norm`, the innermost product that is a norm; None where there is no gate."""
    size = value(norm.x).shape[-1]
    NoMatch.when(not isinstance(size, int))
    readers = _Downstream(norm, size)
    before = _gate_before(norm)
    if isinstance(before, MatchFailure):
        return before
    if isinstance(before, _Gate):
        y, z, behind, activation = before.y, before.z, False, before.activation
        internal = before.internal | readers.walk(gate=False)
    else:
        internal = readers.walk(gate=True)
        if readers.other is not None:
            return readers.other
        NoMatch.when(readers.z is None)
        y, z, behind, activation = norm.x, readers.z, True, readers.activation
    y, z = (_source(n) for n in (y, z))
    end = readers.end
    refuse_narrower(internal, (y, z, end), "operands and result")
    return GatedNorm(norm, end, y, z, readers.gains, readers.scale, size, behind, activation, internal)



def _keeps_order(node: Node) -> bool:
    return node.op == "call_function" and node.target in _ROW_MAJOR | COPIES and isinstance(value(node), torch.Tensor)


def _source(node: Node) -> Node:
    """What `node` is made of by reshapes and widening casts."""
    return through(node, widens, lambda n: _keeps_order(n) and _fuller(n))


def _fuller(node: Node) -> bool:
    """Whether a reshape's operand has as wide a last dimension as its result, or a wider one, of whole rows."""
    new, old = value(node).shape, value(node.args[0]).shape
    if not new or not old or not all(isinstance(s[-1], int) for s in (new, old)):
        return False
    return old[-1] % new[-1] == 0


def _through(node: Any) -> Any:
    """`node` without casts, reshapes and copies, down to what computes it."""
    return through(node, is_cast, _keeps_order)


@or_none
def _gate(factor: Any, activation: str) -> tuple[Node, set[Node]] | None:
    """(z, nodes) where a factor is, behind casts and reshapes, the `activation` of z."""
    found = NoMatch.unless(_GATES[activation](_through(factor)))
    z, internal = found
    return z, {*internal, *chain(factor, lambda n: n not in internal)}


def _other_gate(factor: Any, node: Node) -> MatchFailure | None:
    gate = _through(factor)
    if not isinstance(gate, Node):
        return None
    kind = _OTHER_GATES.get(gate.target)
    return MatchFailure(node, "gate-activation", f"the gate is {kind}, not SiLU or sigmoid") if kind else None


@dataclasses.dataclass
class _Gate:
    y: Node
    z: Node
    activation: str
    internal: set[Node]


def _gate_before(norm: RmsNorm) -> _Gate | MatchFailure | None:
    """The product with a gate, where that is what `norm` norms."""
    *between, node = chain(norm.x, is_cast, _keeps_order)
    internal = {*between}
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return None
    pairs = (node.args, node.args[::-1])
    for activation, (y, factor) in itertools.product(_GATES, pairs):
        found = _gate(factor, activation)
        if found is None or not same_shape(y, factor):  # type: ignore[arg-type]
            continue
        # A sigmoid also makes activations, of the value that it gates, and gates values that others read beside a norm.
        itself = _through(y) is _through(found[0])
        if activation == "silu" or not itself and norm.internal | internal >= set(node.users):
            return _Gate(y, found[0], activation, internal | {node} | found[1])  # type: ignore[arg-type]
    others = (_other_gate(factor, node) for y, factor in pairs if same_shape(y, factor))  # type: ignore[arg-type]
    return next((o for o in others if o is not None), None)


class _Downstream:
    """Follows the norm to its readers while every value has exactly one."""

    def __init__(self, norm: RmsNorm, size: int) -> None:
        self.norm, self.size, self.end = norm, size, norm.node
        self.gains = [(g, size) for g in norm.gains]
        self.scale = norm.scale
        self.z: Node | None = None
        self.activation = ""
        self.other: MatchFailure | None = None

    def walk(self, gate: bool) -> set[Node]:
        """The nodes from the norm to `end`. gate: whether a gate may be among them."""
        internal, pending = set(self.norm.internal), set[Node]()
        node = self.norm.node
        while len(node.users) == 1:
            (user,) = node.users
            if _keeps_order(user):
                last = value(user).shape[-1] if value(user).dim() else 0
                if not isinstance(last, int) or last == 0 or last % self.size:
                    break
                pending.add(user)
                node = user
                continue
            if is_cast(user):
                pending.add(user)
                if bits_of(user) <= bits_of(node):
                    internal |= pending
                    self.end = user
                node = user
                continue
            more = self._factor(user, node, gate)
            if more is None:
                break
            internal |= pending | more
            self.end = node = user
        return internal

    @or_none
    def _factor(self, user: Node, node: Node, gate: bool) -> set[Node] | None:
        """The nodes that a product or quotient adds to the gated norm; None where it ends it."""
        NoMatch.when(user.target not in SCALINGS or user.kwargs)
        first, second = user.args[:2]
        divides = user.target in DIVISIONS
        other = second if first is node else first
        NoMatch.when(other is node or divides and (first is not node or isinstance(other, Node)))
        if not isinstance(other, Node):
            NoMatch.when(not isinstance(other, (int, float)))
            self.scale = self.scale / other if divides else self.scale * other
            return {user}
        NoMatch.when(not isinstance(value(other), torch.Tensor))
        if (channels := self._gain_channels(other, node)) is not None and same_shape(user, node):
            self.gains.append((other, channels))
            return {user}
        NoMatch.when(not same_shape(other, node))
        return self._gate(other, user) if gate else None

    def _gate(self, other: Node, user: Node) -> set[Node] | None:
        """The nodes that `other`, a factor of the norm's shape, adds as the gate."""
        if self.z is not None:  # the two factors of a SiLU, one after the other
            same = _through(other) is _through(self.z) and bits_of(other) >= bits_of(self.z)
            if self.activation == "sigmoid" and same:
                self.activation = "silu"
                return {user}
            return None
        for activation in _GATES:
            if (found := _gate(other, activation)) is not None:
                self.z, self.activation = found[0], activation
                return {user} | found[1]
        if self.other is None:
            self.other = _other_gate(other, user)
        return None

    @or_none
    def _gain_channels(self, gain: Node, node: Node) -> int | None:
        """Over how many neighbouring channels of `node` a gain varies; None for what is no gain."""
        shape, full = value(gain).shape, value(node).shape
        dims = [i - len(shape) for i, n in enumerate(shape) if not (isinstance(n, int) and n == 1)]
        if not dims:
            return self.size
        NoMatch.when(len(full) < len(shape) or len(full) == len(dims))
        NoMatch.when(not all(isinstance(full[d], int) and full[d] == shape[d] for d in dims))
        if dims == [-1]:
            return int(full[-1])
        return int(full[-1] * full[-2]) if dims == [-2, -1] else None


def same_source(node: Node, tensors: tuple[Node, ...]) -> bool:
    """Whether `node` is one of `tensors` but for casts and reshapes."""
    return (is_cast(node) or _keeps_order(node)) and any(_through(node) is _through(t) for t in tensors)


def gate_nearby(norm: Node) -> bool:
    """Whether a gate is applied right before or behind `norm`, a node that is nearly a norm."""
    node = norm
    for _ in range(6):
        if len(node.users) != 1:
            break
        (node,) = node.users
        if _gated(node):
            return True
        if not (is_cast(node) or _keeps_order(node) or node.target in MULTIPLICATIONS):
            break
    pending, seen = [norm], set[Node]()
    for _ in range(16):
        if not pending:
            return False
        node = pending.pop()
        if _gated(node):
            return True
        if node.op == "call_function" and (node is norm or node.target not in _PRODUCERS) and node not in seen:
            seen.add(node)
            pending.extend(n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor))
    return False


def _gated(node: Node) -> bool:
    """Whether `node` is a product with a SiLU."""
    return node.target is aten.mul.Tensor and any(_gate(a, "silu") is not None for a in node.args)


# What makes another tensor: nothing before it belongs to the norm behind it.
_PRODUCERS = {aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default}
