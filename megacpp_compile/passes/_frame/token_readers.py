"""What reads other tokens of a sequence in a frame: ops by their trait, convolutions, recurrences, and what nearly is.

Each reader is told by what it computes, `what`, and the node that does, in order of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.edit import argument, called, dynamo_value
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.matchers.recurrences import NAMES, find_recurrences
from megacpp_compile.passes._driver import all_passes
from megacpp_compile.report.records import MissedFusion

_CONVOLUTIONS = frozenset({"conv1d", "conv_transpose1d", "convolution"})
# Torch's own recurrences, and ops of other libraries, of which nothing but the name is known.
_BY_NAME = re.compile(r"(^|\W|_)scan(\W|_|$)|causal_conv|delta_rule|linear_att|wkv|(^|\W)(lstm|gru|rnn_\w+)(\W|$)")


def named(nodes: Iterable[Node]) -> Iterator[tuple[str, Node]]:
    """Calls of one op each, in a captured graph or in Dynamo's."""
    for node in nodes:
        if not node.op.startswith("call"):
            continue
        if _convolves(node):
            what = "conv1d" if _overlaps(node) else ""
        elif name_of(node).startswith("megacpp::"):
            what = name_of(node) if traits_of(node).tokens is not None else ""
        else:
            what = _name(node) if _BY_NAME.search(_name(node)) else ""
        if what:
            yield what, node


def spelled(nodes: Iterable[Node]) -> Iterator[tuple[str, Node]]:
    """The recurrences that a captured graph holds unrolled."""
    return ((NAMES[found.kind], found.node) for found in find_recurrences(nodes) if found.kind in NAMES)


def near(misses: Iterable[MissedFusion], nodes: Iterable[Node]) -> Iterator[tuple[MissedFusion, Node]]:
    """What passes that make such ops came near to in a captured graph; `named` has convolutions."""
    reads = {p.name for p in all_passes() if traits_of(p.op).tokens is not None}
    by_name = {n.name: n for n in nodes}
    for miss in misses:
        node = by_name.get(miss.node)
        if miss.pass_name in reads and node is not None and not _convolves(node):
            yield miss, node


def _name(node: Node) -> str:
    name = name_of(node) if isinstance(node.target, OpOverload) else called(node) or str(node.target)
    return name.lower()


def _convolves(node: Node) -> bool:
    """Whether it is a convolution along one dimension."""
    is_one = node.op == "call_function" and called(node).partition(".")[0] in _CONVOLUTIONS
    return is_one and len(_shape(argument(node, 1, "weight"))) == 3


def _overlaps(node: Node) -> bool:
    """Whether a convolution reads more steps at a time than it goes on by, so that a result depends on others' own."""
    stride = argument(node, 3, "stride", 1)
    return bool(_shape(argument(node, 1, "weight"))[-1] > (stride[0] if isinstance(stride, (tuple, list)) else stride))


def _shape(node: Any) -> Any:
    return dynamo_value(node).shape
