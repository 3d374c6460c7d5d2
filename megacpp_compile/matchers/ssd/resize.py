"""Runs a subgraph at other sizes: a rule per op says what the op does to dimensions (`axes.py`) and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.ssd.axes import Axes, Dim, NoAxes, flat, fresh
from megacpp_compile.matchers.ssd.tensor_ops import RuleTable


class Resized:
    """The subgraph of `nodes` (in graph order) between `leaves`, with axes inferred, ready to be run.

    Raises `NoAxes` where a node's dimensions can't be followed.
    """

    def __init__(self, rules: RuleTable, nodes: Sequence[Node], leaves: Sequence[Node]) -> None:
        self.rules, self.axes, self.nodes, self.leaves = rules, Axes(), nodes, leaves
        self.dims: dict[Node, Any] = {n: [fresh(s) for s in value(n).shape] for n in leaves}
        for n in nodes:
            try:
                self.dims[n] = rules[n.target][0](self, n)
            except KeyError as e:
                raise NoAxes(f"{n.name} computes with a size") from e
        self.axes.close()

    def of(self, node: Node) -> list[Dim]:
        return [flat(d) for d in self.dims[node]]

    def shape(self, dims: Sequence[Dim]) -> list[int]:
        return [self.axes.size(d) for d in dims]

    def solve(self, turn: int) -> None:
        self.axes.solve([d for dims in self.dims.values() for d in dims if isinstance(d, list)], turn)

    def run(self, operands: dict[Node, Tensor], wanted: Sequence[Node]) -> list[Tensor]:
        """Values of `wanted` for `operands`, float64 tensors of the leaves' small shapes."""
        values: dict[Node, Any] = dict(operands)
        for n in self.nodes:
            try:  # what lends only its shape has no value
                result = self.rules[n.target][1](self, n, fx.map_arg(n.args, values.get))
            except RuntimeError as e:
                raise NoAxes(f"{n.name} can't be run at another size") from e
            if isinstance(result, Tensor) and list(result.shape) != self.shape(self.dims[n]):
                raise NoAxes(f"{n.name} comes out in another shape")
            values[n] = result
        return [values[n] for n in wanted]
