"""Masks by which a scan starts anew with packed documents: what they are computed from, and what that says.

Beside operands and constants, a scan's subgraph may have masks: flags and whole numbers of the model's, and what is
computed of them alone. Those that are compared, or filled in by, are followed upstream to one tensor of a number or a
flag a token. What it means is tried: a trial draws where documents begin, and then the tensor that would say so.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import NEGATIONS
from megacpp_compile.fx.edit import same_shape, value
from megacpp_compile.fx.views import EXPANSIONS, PADS, REPETITIONS, SAME_VALUES
from megacpp_compile.matchers.ssd.tensor_ops import VIEWS, only, whole

_JUNCTIONS = {
    aten.bitwise_and.Tensor, aten.logical_and.default, aten.bitwise_or.Tensor, aten.logical_or.default,
    aten.__and__.Tensor, aten.__or__.Tensor,
}  # fmt: skip
_COMPARISONS = {aten.eq.Tensor, aten.ne.Tensor, aten.sub.Tensor}
_SIGNS = {aten.eq.Scalar, aten.ne.Scalar}
_PIECES = {aten.slice.Tensor, aten.select.int, aten.cat.default}


class Reading(enum.Enum):
    """What a tensor of a number or a flag a token says of documents."""

    CHANGES = "a document begins where the number is another than the one before"
    RUNS = "tokens of one number are one document, whose tokens are taken to be neighbours"
    STARTS = "a document begins where the flag is set"
    CONTINUES = "a document begins where the flag is not set"

    @property
    def flags(self) -> bool:
        return self in (Reading.STARTS, Reading.CONTINUES)

    def drawn(self, begins: Tensor) -> Tensor:
        """The tensor [..., t] that says that documents begin where `begins` [..., t] is set."""
        if self.flags:
            return begins if self is Reading.STARTS else ~begins
        return begins.cumsum(-1) % 3 if self is Reading.CHANGES else begins.cumsum(-1)


def readings(documents: Sequence[Node]) -> tuple[Reading, ...]:
    """What these nodes, which are all one, may say; the one that asks for less first."""
    flags = value(documents[0]).dtype is torch.bool
    return (Reading.STARTS, Reading.CONTINUES) if flags else (Reading.CHANGES, Reading.RUNS)


def of_whole_numbers(n: Node) -> bool:
    """Whether `n` is a tensor of flags or whole numbers."""
    fake = value(n)
    return isinstance(fake, Tensor) and not fake.is_floating_point() and not fake.is_complex()


def alike(a: Any, b: Any) -> bool:
    """Whether two nodes, or arguments of nodes, are one value computed twice."""
    if isinstance(a, Node) and isinstance(b, Node):
        drawn = torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())
        same = a.op == b.op == "call_function" and a.target is b.target and not drawn
        return a is b or same and a.kwargs == b.kwargs and alike(a.args, b.args)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


class Masks:
    """The masks of a graph, entered in its order.

    deep: flags are followed to the numbers that they compare; else a flag a token is where it ends.
    """

    def __init__(self, deep: bool) -> None:
        self.deep = deep
        self.made: dict[Node, frozenset[Node]] = {}  # a computed mask -> the tensors that it is made of
        self._compared: set[Node] = set()

    def leaves(self, n: Node) -> frozenset[Node]:
        return self.made.get(n, frozenset([n]))

    def take(self, n: Node, given: Sequence[Node]) -> bool:
        """Enters `n` where it is computed of masks alone; `given` are its operands that are no constants."""
        if not given or not all(a in self.made or of_whole_numbers(a) for a in given):
            return False
        leaves = frozenset[Node]().union(*map(self.leaves, given))
        if of_whole_numbers(n) and not self._followed(n, given, leaves):
            return False
        self.made[n] = leaves
        if n.target in _COMPARISONS or any(a in self._compared for a in given):
            self._compared.add(n)
        return True

    def _followed(self, n: Node, given: Sequence[Node], leaves: frozenset[Node]) -> bool:
        if n.target in NEGATIONS or n.target in SAME_VALUES | VIEWS | EXPANSIONS | REPETITIONS or whole(n) or only(n):
            return True
        if n.target in PADS and not any(n.args[1][0::2]):  # type: ignore[index]
            return True
        if n.target in _COMPARISONS:
            apart = not all(same_shape(a, n) for a in given)
            return len(given) == 2 and len(leaves) == 1 and (self.deep or apart)
        if n.target in _SIGNS:
            return n.args[1] == 0 and given[0].target is aten.sub.Tensor and given[0] in self.made
        if n.target in _JUNCTIONS:
            return any(a in self._compared for a in given)
        if self.deep:
            return n.target in _PIECES or n.target in PADS
        return n.target in _PIECES and value(n).dtype is not torch.bool and len(given) == len(n.all_input_nodes)
