"""Loops of which a few steps stand for all, marked in the graph by ops that compute nothing.

`count` steps were shown to be one step at consecutive positions, and `short` of them are in the graph: what they read
of all positions is `shortened` in front of them, what they leave is `lengthened` behind them. Neither can be run. Who
finds what the loop computes has to put something in its place that is as long as the loop is; what keeps a mark is
traced anew with all steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_library = torch.library.Library("megacpp_short", "DEF")
# What Dynamo's graph has until its steps are repeated: the position, results, and where the step ends.
_SCHEMAS = (
    "position(int loop, int count) -> SymInt",
    "result(Tensor before, Tensor after, int loop) -> Tensor",
    "collected(Tensor each, int dim, int count, bool joined, int loop) -> Tensor",
    "end(int loop) -> ()",
    "shortened(Tensor all, int dim, int short, int count) -> Tensor",
    "lengthened(Tensor some, int dim, int short, int count) -> Tensor",
)


def _position(loop: int, count: int) -> Any:
    raise RuntimeError("the steps of a loop were not repeated")


def _result(before: Tensor, after: Tensor, loop: int) -> Tensor:
    return after.clone()


def _collected(each: Tensor, dim: int, count: int, joined: bool, loop: int) -> Tensor:
    sizes = list(each.shape)
    if joined:
        sizes[dim] *= count
    else:
        sizes.insert(dim, count)
    return each.new_empty(sizes)


def resized(x: Tensor, dim: int, of: int, to: int) -> Tensor:
    """An empty tensor like `x`, of whose dimension each of `of` parts became one of `to`; `dim` -1 for none."""
    sizes = list(x.shape)
    if dim >= 0:
        sizes[dim] = sizes[dim] // of * to
    return x.new_empty(sizes)


def _shortened(all: Tensor, dim: int, short: int, count: int) -> Tensor:
    return resized(all, dim, count, short)


def _lengthened(some: Tensor, dim: int, short: int, count: int) -> Tensor:
    return resized(some, dim, short, count)


def _end(loop: int) -> None:
    return None


for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _body = globals()[f"_{_name}"]
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacpp_short::{_name}", _body, lib=_library)
ops = torch.ops.megacpp_short
position, result, collected, end = (getattr(ops, n).default for n in ("position", "result", "collected", "end"))
shortened, lengthened = ops.shortened.default, ops.lengthened.default
MARKS = (shortened, lengthened)
torch.fx.node.has_side_effect(end)


def marks(graph: Graph) -> list[Node]:
    """The nodes of `graph` that are not as long as the loop that they stand for."""
    return [n for n in graph.nodes if n.target in MARKS]
