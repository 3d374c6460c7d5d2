"""What a subgraph does to the last dimension of a tensor, lane by lane.

RoPE is spelled in dozens of ways: even/odd slices, rotate_half, complex products, stack/flatten, writes into an empty
tensor. They differ in syntax only. So instead of one pattern per spelling, the interpreter *executes* the subgraph on
symbols: every element of a feature dimension (a "lane") becomes a sum of terms

    coefficient * source[lane] * table[lane]

over a few source tensors, and the rules of RoPE are then checked on that result (`rotation.py`). A rotation matches in
any spelling, because it is proved equal; what computes something else cannot match, however alike it looks.

A value's dimensions are of two kinds: *outer* (batch, sequence, heads: carried along, permuted, broadcast) and *lane*
(the feature dimension and what views split it into). Terms are numpy arrays over the lane dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.fx.filled import ZEROS

# Source ids: no table in this term; memory nothing was written to; a product of tables.
NONE, UNDEFINED, SEVERAL = -1, -2, -3
MAX_TERMS = 4
MAX_LANES = 1 << 15


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor terms refer to.

    dims: for every outer dimension of the value that refers to it, the tensor's own dimension, or -1 where it is
    broadcast. lane_dims: the tensor's dimensions its lanes index, row-major. part: "re"/"im" of a complex table.
    rounded: what entries of a table are cast to on the way to a table that stands for them; no op reads such a source.
    """

    node: Node
    dims: tuple[int, ...]
    lane_dims: tuple[int, ...]
    part: str = ""
    rounded: torch.dtype | None = None


@dataclasses.dataclass
class Term:
    coef: np.ndarray
    src: np.ndarray
    lane: np.ndarray
    tab: np.ndarray
    tlane: np.ndarray

    def map(self, f: Callable[[np.ndarray], np.ndarray]) -> Term:
        return Term(*(f(getattr(self, x.name)) for x in dataclasses.fields(Term)))

    def scaled(self, c: float) -> Term:
        return dataclasses.replace(self, coef=self.coef * c)


@dataclasses.dataclass
class Lanes:
    """kinds: "o" or "l" per dimension; sizes: its sizes; terms: arrays over the "l" dimensions (plus, when `complex`,
    a last axis of real and imaginary part)."""

    kinds: str
    sizes: tuple[Any, ...]
    terms: list[Term]
    complex: bool = False

    def axis(self, dim: int) -> int:
        """The array axis of lane dimension `dim`."""
        return self.kinds[:dim].count("l")

    def outer(self, dim: int) -> int:
        """The outer position of outer dimension `dim`."""
        return self.kinds[:dim].count("o")

    def map(self, f: Callable[[np.ndarray], np.ndarray]) -> list[Term]:
        return [t.map(f) for t in self.terms]

    @property
    def live(self) -> np.ndarray:
        """Which lanes are not zero."""
        return np.any([t.coef != 0 for t in self.terms], axis=0)

    @property
    def rotated(self) -> bool:
        """Whether a table meets any lane."""
        return any((t.tab != NONE).any() for t in self.terms)

    @property
    def scaled(self) -> bool:
        """Whether any lane is multiplied by another number than 1 and -1."""
        return any((~np.isin(t.coef, (-1.0, 0.0, 1.0))).any() for t in self.terms)


class Opaque(GivenUp):
    """This node is not interpreted: it becomes a source of its own."""


EMPTY = ZEROS | {
    aten.new_empty.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}


class LaneContext(Protocol):
    """What a lane rule may ask of the interpreter that runs it.

    sources: what terms refer to, by number.
    """

    sources: list[Source]

    def get(self, node: Any) -> Lanes:
        """The lanes of an operand; raises `Opaque` where it has none."""
        ...

    def leaf(self, node: Node) -> Lanes | None:
        """The lanes of `node` taken as a source."""
        ...

    def source_id(self, source: Source) -> int:
        """The number by which terms refer to `source`."""
        ...

    def dtypes(self, lanes: Lanes) -> set[torch.dtype]:
        """The dtypes of the sources that the terms of `lanes` refer to, but for tables."""
        ...

    def redim(self, lanes: Lanes, f: Callable[[tuple[int, ...]], tuple[int, ...]]) -> list[Term]:
        """The terms of `lanes` with the outer dimension map of every source sent through `f`."""
        ...

    def is_table(self, node: Node) -> bool:
        """Whether `node` is a table: not computed from weights."""
        ...

    def met_again(self, node: Node) -> None:
        """Note that a table multiplies `node`, whose lanes have met one before."""
        ...

    def table_views(self, table: Node) -> Iterator[Lanes]:
        """The lanes of a table as views of smaller tables: with the last two dimensions as lanes where the last holds
        pairs, and with the last one."""
        ...

    def firsts(self, entries: Term, of: Term) -> Term:
        """`entries` of a table put together of the entries `of` other ones, each by the first that is the same."""
        ...


Rule = Callable[[LaneContext, Node], Lanes]
Unary = Callable[[LaneContext, Node, Lanes], Lanes]
RuleTable = dict[Any, Rule]


def rule_table() -> tuple[RuleTable, Callable[..., Callable[[Rule], Rule]], Callable[..., Callable[[Unary], Unary]]]:
    """An empty table of rules by op, and the decorators that enter a rule for its ops: one that is given the node, and
    one that is given the lanes of its first operand, too."""
    table: RuleTable = {}

    def rule(*targets: Any) -> Callable[[Rule], Rule]:
        def register(f: Rule) -> Rule:
            table.update(dict.fromkeys(targets, f))
            return f

        return register

    def unary(*targets: Any) -> Callable[[Unary], Unary]:
        def register(f: Unary) -> Unary:
            rule(*targets)(lambda it, node: f(it, node, it.get(node.args[0])))
            return f

        return register

    return table, rule, unary


_PRECISION = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.complex64: 2}


def precision(dtype: torch.dtype) -> int:
    """A number that is larger for a dtype that rounds less; the half precisions count as one."""
    return _PRECISION.get(dtype, 3)


def axis_of(dim: int, n: int) -> int:
    return dim + n if dim < 0 else dim


def is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def term(coef: np.ndarray, src: int, lane: np.ndarray) -> Term:
    none = np.full(coef.shape, NONE)
    return Term(coef, np.full(coef.shape, src), lane, none, none.copy())


def zero_term(shape: tuple[int, ...]) -> Term:
    z = np.full(shape, NONE)
    return Term(np.zeros(shape), z, z.copy(), z.copy(), z.copy())
