"""The nodes of a graph that are tensor algebra, and which of them are computed from which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import SAME_VALUES
from megacpp_compile.fx.walks import descendants, reached
from megacpp_compile.matchers.ssd.packed import Masks, of_whole_numbers
from megacpp_compile.matchers.ssd.tensor_ops import (
    CONDITION,
    CREATION,
    LIKE,
    MASKS,
    REPEATS,
    VIEWS,
    RuleTable,
    only,
    whole,
)
from megacpp_compile.reader.links import chain


class Algebra:
    """Which nodes of a graph are tensor algebra, i.e. have one of `rules`, and which of them are constants.

    masks: gets those that tell documents apart; without it there are none, and what they are applied to is no algebra.
    when: of ops that have a rule, whether a node has one.
    """

    def __init__(
        self, graph: fx.Graph, rules: RuleTable, masks: Masks | None = None,
        when: Mapping[Any, Callable[[Node], bool]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.nodes: set[Node] = set()
        self.constants: set[Node] = set()
        self.masks = masks
        for n in graph.nodes:
            if n.op != "call_function" or n.target not in rules or n.target in when and not when[n.target](n):
                continue
            inputs = tensors(n)
            constant = n.target in CREATION | LIKE or bool(inputs) and all(a in self.constants for a in inputs)
            condition = CONDITION.get(n.target)
            mask = not constant and masks and masks.take(n, [a for a in inputs if a not in self.constants])
            data = n.target in MASKS or condition is not None and not self._known(n.args[condition])
            if constant:
                self.constants.add(n)
            elif mask or data or not _float(n):
                continue
            self.nodes.add(n)

    def _known(self, n: Any) -> bool:
        return n in self.constants or self.is_mask(n)

    def is_mask(self, n: Node) -> bool:
        """Whether `n` is made of flags and whole numbers alone, of which it may be one."""
        if self.masks is None or n in self.constants:
            return False
        return n in self.masks.made or of_whole_numbers(n)

    def inputs(self, n: Node) -> list[Node]:
        """What the value of `n` depends on; a constant, a mask, and what only lends its shape, is not."""
        return [] if n in self.constants else [a for a in tensors(n) if not self._known(a)]

    def ancestors(self, roots: Iterable[Node], stop: Iterable[Node] = (), constants: bool = False) -> set[Node]:
        """Everything `roots` are made of by algebra up to `stop`, themselves and the operands it begins with included.
        constants: constants, too; what only lends its shape to one is none of it."""
        stops = set(stop)

        def made_of(n: Node) -> list[Node]:
            if n not in self.nodes or n in stops or constants and n.target in CREATION | LIKE:
                return []
            return tensors(n) if constants else self.inputs(n)

        return set(reached(roots, made_of))

    def descendants(self, root: Node, constants: bool = False) -> list[Node]:
        """Everything algebra makes of `root`, in graph order. constants: constants, too."""
        return sorted(descendants([root], lambda n: n in self.nodes and (constants or n not in self.constants)))

    def source(self, n: Node) -> Node:
        """What `n` is a view, a repetition or an exact cast of."""
        return self.path(n)[0]

    def path(self, n: Node) -> tuple[Node, set[Node]]:
        """(`source`, the nodes from `n` to it)."""
        *between, n = chain(n, self.passes_on)
        return n, {*between}

    def passes_on(self, n: Node) -> bool:
        if n not in self.nodes or n in self.constants:
            return False
        if n.target not in SAME_VALUES | VIEWS | REPEATS and not whole(n) and not only(n):
            return False
        source = n.args[0]
        assert isinstance(source, Node)
        have, made = value(source).dtype, value(n).dtype
        return have.is_floating_point and torch.promote_types(have, made) == made


def tensors(n: Node) -> list[Node]:
    """The inputs of `n` that are tensors, or several; sizes are not."""
    return [a for a in n.all_input_nodes if isinstance(value(a), (torch.Tensor, tuple, list))]


def _float(n: Node) -> bool:
    """Whether `n` is a tensor of floats, or several of which any is one: each is looked at for itself."""
    values = value(n)
    values = values if isinstance(values, (tuple, list)) else [values]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def operand_of(algebra: Algebra, n: Node) -> tuple[Node, set[Node]]:
    """(the operand to read instead of `n`, the nodes between): through padding, repetition, casts and new dimensions,
    but not through other views alone, which cost nothing."""
    way = chain(n, algebra.passes_on)
    keep = max((i + 1 for i, m in enumerate(way[:-1]) if m.target not in VIEWS - {aten.unsqueeze.default}), default=0)
    return way[keep], set(way[:keep])


def read_operand(algebra: Algebra, n: Node, inside: set[Node]) -> Node:
    """The operand to read instead of `n`; the nodes between go to `inside`."""
    operand, between = operand_of(algebra, n)
    inside |= between
    return operand


def constants_of(algebra: Algebra, n: Node) -> set[Node]:
    """`n` and what it is made of, where it is a constant."""
    def constants(nodes: Iterable[Node]) -> list[Node]:
        return [m for m in nodes if m in algebra.constants]

    return set(reached(constants([n]), lambda m: constants(tensors(m)) if m.target not in CREATION | LIKE else []))


def lends_shape(algebra: Algebra, reader: Node, read: Node) -> bool:
    """Whether `reader` reads only the shape and dtype of `read`: a size, or a constant like it."""
    if not isinstance(value(reader), (torch.Tensor, tuple, list)):
        return reader.op != "output"
    if reader.target in LIKE | CREATION and reader.args[0] is read:
        return True
    return reader in algebra.nodes and all(lends_shape(algebra, u, reader) for u in reader.users)
