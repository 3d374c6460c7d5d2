"""RMSNorm with a SiLU gate before or behind it, from the norm outwards.

Downstream of the norm the matcher follows gains, numbers, casts and reshapes that keep every group of `size` channels
together, and at most one gate. Upstream it looks for the product of a tensor and a gate, perhaps reshaped into groups.
Source: Mamba-2, https://arxiv.org/abs/2405.21060, section 7.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import COPIES, FOLDS, RESHAPES, is_cast
from megacpp_compile.matchers.rms_norm import NoNorm, RmsNorm
from megacpp_compile.matchers.silu import match_sigmoid, match_silu

aten = torch.ops.aten
# Ops that keep the elements in row-major order and change the dimensions only.
_ROW_MAJOR = RESHAPES | FOLDS | {aten.unsqueeze.default, aten.squeeze.dim}
_MUL, _DIV = {aten.mul.Tensor, aten.mul.Scalar}, {aten.div.Tensor, aten.div.Scalar}
_OTHER_GATES = {aten.gelu.default: "GELU", aten.relu.default: "ReLU", aten.tanh.default: "tanh"}


@dataclasses.dataclass
class GatedNorm:
    """`node` is the norm of y, or of `y * silu(z)`, in groups of `size` channels, times gains and perhaps `silu(z)`.

    gains: (tensor, channels it spans: `size`, or a multiple, for groups that differ). internal: nodes up to `node`.
    """

    norm: RmsNorm
    node: Node
    y: Node
    z: Node
    gains: list[tuple[Node, int]]
    scale: float
    size: int
    norm_before_gate: bool
    internal: set[Node]


def match_gated_norm(norm: RmsNorm) -> GatedNorm | NoNorm | None:
    """The gated norm around `norm`, the innermost product that is a norm; None where there is no gate."""
    size = value(norm.x).shape[-1]
    if not isinstance(size, int):
        return None
    readers = _Downstream(norm, size)
    before = _gate_before(norm)
    if isinstance(before, NoNorm):
        return before
    if isinstance(before, _Gate):
        y, z, behind = before.y, before.z, False
        internal = before.internal | readers.walk(gate=False)
    else:
        internal = readers.walk(gate=True)
        if readers.other is not None:
            return readers.other
        if readers.z is None:
            return None
        y, z, behind = norm.x, readers.z, True
    y, z = (_source(n) for n in (y, z))
    end = readers.end
    bits = min(_bits(n) for n in (y, z, end))
    for n in sorted(internal):
        if isinstance(value(n), torch.Tensor) and _bits(n) < bits:
            return NoNorm(n, "precision", f"computed in {value(n).dtype}, lower than operands and result")
    return GatedNorm(norm, end, y, z, readers.gains, readers.scale, size, behind, internal)


def _bits(node: Node) -> int:
    return torch.finfo(value(node).dtype).bits


def _keeps_order(node: Node) -> bool:
    return node.op == "call_function" and node.target in _ROW_MAJOR | COPIES and isinstance(value(node), torch.Tensor)


def _source(node: Node) -> Node:
    """What `node` is made of by reshapes and widening casts."""
    while True:
        cast = is_cast(node) and _bits(node.args[0]) <= _bits(node)  # type: ignore[arg-type]
        if not cast and not (_keeps_order(node) and _fuller(node)):
            return node
        node = node.args[0]  # type: ignore[assignment]


def _fuller(node: Node) -> bool:
    """Whether a reshape's operand has as wide a last dimension as its result, or a wider one, of whole rows."""
    new, old = value(node).shape, value(node.args[0]).shape
    if not new or not old or not all(isinstance(s[-1], int) for s in (new, old)):
        return False
    return old[-1] % new[-1] == 0


def _same_shape(a: Node, b: Node) -> bool:
    x, y = value(a).shape, value(b).shape
    return len(x) == len(y) and all(map(same_size, x, y))


def _through(node: Any) -> Any:
    """`node` without casts, reshapes and copies, down to what computes it."""
    while isinstance(node, Node) and (is_cast(node) or _keeps_order(node)):
        node = node.args[0]
    return node


def _silu(factor: Any) -> tuple[Node, set[Node]] | None:
    """(z, nodes) where a factor is, behind casts and reshapes, SiLU of z."""
    found = match_silu(_through(factor))
    if found is None:
        return None
    z, internal = found[0], set(found[1])
    while factor not in internal:
        internal.add(factor)
        factor = factor.args[0]
    return z, internal


def _other_gate(factor: Any, node: Node) -> NoNorm | None:
    gate = _through(factor)
    if not isinstance(gate, Node):
        return None
    kind = "sigmoid" if match_sigmoid(gate) is not None else _OTHER_GATES.get(gate.target)
    return NoNorm(node, "gate-activation", f"the gate is {kind}, not SiLU") if kind else None


@dataclasses.dataclass
class _Gate:
    y: Node
    z: Node
    internal: set[Node]


def _gate_before(norm: RmsNorm) -> _Gate | NoNorm | None:
    """The product with a gate, where that is what `norm` norms."""
    internal: set[Node] = set()
    node = norm.x
    while is_cast(node) or _keeps_order(node):
        internal.add(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return None
    pairs = (node.args, node.args[::-1])
    for y, factor in pairs:
        found = _silu(factor)
        if found is not None and _same_shape(y, factor):  # type: ignore[arg-type]
            return _Gate(y, found[0], internal | {node} | found[1])  # type: ignore[arg-type]
    others = (_other_gate(factor, node) for y, factor in pairs if _same_shape(y, factor))  # type: ignore[arg-type]
    return next((o for o in others if o is not None), None)


class _Downstream:
    """Follows the norm to its readers while every value has exactly one."""

    def __init__(self, norm: RmsNorm, size: int) -> None:
        self.norm, self.size, self.end = norm, size, norm.node
        self.gains = [(g, size) for g in norm.gains]
        self.scale = norm.scale
        self.z: Node | None = None
        self.other: NoNorm | None = None

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
                if _bits(user) <= _bits(node):
                    internal |= pending
                    self.end = user
                node = user
                continue
            more = self._factor(user, node, gate and self.z is None)
            if more is None:
                break
            internal |= pending | more
            self.end = node = user
        return internal

    def _factor(self, user: Node, node: Node, gate: bool) -> set[Node] | None:
        """The nodes that a product or quotient adds to the gated norm; None where it ends it."""
        if user.target not in _MUL | _DIV or user.kwargs:
            return None
        first, second = user.args[:2]
        divides = user.target in _DIV
        other = second if first is node else first
        if other is node or divides and (first is not node or isinstance(other, Node)):
            return None
        if not isinstance(other, Node):
            if not isinstance(other, (int, float)):
                return None
            self.scale = self.scale / other if divides else self.scale * other
            return {user}
        if not isinstance(value(other), torch.Tensor):
            return None
        if (channels := self._gain_channels(other, node)) is not None and _same_shape(user, node):
            self.gains.append((other, channels))
            return {user}
        if not _same_shape(other, node):
            return None
        found = _silu(other) if gate else None
        if found is not None:
            self.z = found[0]
            return {user} | found[1]
        if gate and self.other is None:
            self.other = _other_gate(other, user)
        return None

    def _gain_channels(self, gain: Node, node: Node) -> int | None:
        """Over how many neighbouring channels of `node` a gain varies; None for what is no gain."""
        shape, full = value(gain).shape, value(node).shape
        dims = [i - len(shape) for i, n in enumerate(shape) if not (isinstance(n, int) and n == 1)]
        if not dims:
            return self.size
        if len(full) < len(shape) or len(full) == len(dims):
            return None
        if not all(isinstance(full[d], int) and full[d] == shape[d] for d in dims):
            return None
        if dims == [-1]:
            return int(full[-1])
        return int(full[-1] * full[-2]) if dims == [-2, -1] else None


def same_source(node: Node, tensors: tuple[Node, ...]) -> bool:
    """Whether `node` is one of `tensors` but for casts and reshapes."""
    return (is_cast(node) or _keeps_order(node)) and any(_through(node) is _through(t) for t in tensors)


def gate_nearby(norm: Node) -> bool:
    """Whether a SiLU gate is applied right before or behind `norm`, a node that is nearly a norm."""
    node = norm
    for _ in range(6):
        if len(node.users) != 1:
            break
        (node,) = node.users
        if node.target is aten.mul.Tensor and any(_silu(a) is not None for a in node.args):
            return True
        if not (is_cast(node) or _keeps_order(node) or node.target in _MUL):
            break
    pending, seen = [norm], set[Node]()
    for _ in range(16):
        if not pending:
            return False
        node = pending.pop()
        if node.target is aten.mul.Tensor and any(_silu(a) is not None for a in node.args):
            return True
        if node.op == "call_function" and (node is norm or node.target not in _PRODUCERS) and node not in seen:
            seen.add(node)
            pending.extend(n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor))
    return False


# What makes another tensor: nothing before it belongs to the norm behind it.
_PRODUCERS = {aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default}
