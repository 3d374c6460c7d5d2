"""Runs a subgraph at other sizes: a rule per op says what the op does to dimensions (`axes.py`) and how it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.numbers import is_number, number_of
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat, fresh
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.tensor_ops import RuleTable


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An operand or a result: `node`, and the atoms of each of its dimensions."""

    node: Node
    dims: tuple[tuple[object, ...], ...]


class Resized:
    """The subgraph of `nodes` (in graph order) between `leaves`, with axes inferred, ready to be run. apart: loops that
    run one after another take no dimension apart that is the same, however alike its pieces. Numbers that a model
    computes with, which `dynamic=True` makes inputs, are run as they are; what is found on them has to `fix` them.

    Raises `NoAxes` where a node's dimensions can't be followed.
    """

    def __init__(
        self, rules: RuleTable, nodes: Sequence[Node], leaves: Sequence[Node], axes: AxisEquations | None = None,
        apart: bool = False,
    ) -> None:  # fmt: skip
        self.rules, self.axes, self.nodes, self.leaves = rules, axes or AxisEquations(), nodes, leaves
        self.dims: dict[Node, Any] = {n: [fresh(s) for s in value(n).shape] for n in leaves}
        given = {a for n in nodes for a in n.all_input_nodes}
        self.numbers = {a: value(a).node.hint for a in given if isinstance(value(a), torch.SymFloat) and is_number(a)}
        self.dims |= {a: [] for a in self.numbers}
        for n in nodes:
            try:
                self.dims[n] = rules[n.target][0](self, n)
            except KeyError as e:
                raise NoAxes(f"{n.name} computes with a size") from e
        self.axes.close(nodes if apart else None)

    def fix(self) -> None:
        """Have the frame compiled again for other numbers."""
        for number in self.numbers:
            number_of(number)

    def of(self, node: Node) -> list[Dim]:
        return [flat(d) for d in self.dims[node]]

    def atoms(self, node: Node) -> Dim:
        """The atoms of all dimensions."""
        return [a for d in self.of(node) for a in d]

    def leaf(self, node: Node) -> Leaf:
        return Leaf(node, tuple(tuple(d) for d in self.of(node)))

    def draw(self, turn: int, uniform: Mapping[Node, float] = MappingProxyType({})) -> dict[Node, Tensor]:
        """Random leaves of the sizes that are solved: normal ones, those of `uniform` between 0 and a number."""
        generator = torch.Generator().manual_seed(turn)  # its own: what a model draws does not depend on compiling
        drawn = {n: torch.randn(self.shape(self.of(n)), dtype=torch.float64, generator=generator) for n in self.leaves}
        return drawn | {
            n: most * torch.rand(drawn[n].shape, dtype=torch.float64, generator=generator)
            for n, most in uniform.items()
        }

    def shape(self, dims: Sequence[Dim]) -> list[int]:
        return [self.axes.size(d) for d in dims]

    def solve(self, turn: int) -> None:
        tensors = [one for dims in self.dims.values() for one in (dims if _several(dims) else [dims])]
        self.axes.solve([d for dims in tensors for d in dims], turn)

    def run(self, operands: dict[Node, Tensor], wanted: Sequence[Node]) -> list[Tensor]:
        """Values of `wanted` for `operands`, float64 tensors of the leaves' small shapes."""
        values: dict[Node, Any] = {**operands, **self.numbers}
        last = {a: n for n in self.nodes for a in n.all_input_nodes}
        for n in self.nodes:
            try:  # what lends only its shape has no value
                result = self.rules[n.target][1](self, n, fx.map_arg(n.args, values.get))
            except RuntimeError as e:
                raise NoAxes(f"{n.name} can't be run at another size") from e
            NoAxes.when(
                isinstance(result, Tensor) and list(result.shape) != self.shape(self.dims[n]),
                f"{n.name} comes out in another shape",
            )
            values[n] = result
            for a in n.all_input_nodes:  # unrolled loops have thousands of values
                if last[a] is n and a not in wanted:
                    values.pop(a, None)
        return [values[n] for n in wanted]


def tensor_dims(dims: Any) -> list[Dim]:
    """The dimensions of a tensor; none of several tensors, each of which has its own node."""
    return [] if _several(dims) else dims


def _several(dims: Sequence[Any]) -> bool:
    """Whether `dims` are those of several tensors: a dimension is a list of atoms, never of lists."""
    return any(isinstance(x, list) for d in dims for x in d)


def agree(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two results at small sizes are the same, but for `tolerance` of the largest element."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
