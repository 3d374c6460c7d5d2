"""Which rows each query sees where a mask is made of a list of rows: those of the list that all other parts of the mask
let it see.

A mask is taken apart into parts that all have to hold: conditions joined by and (hidden: by or), masks that are added,
or filled one over another. One part is of a list alone (`lists.py`). Of the others a causal one is the op's own, told
by what it compares (`masks.py`); any of bool is read at the listed rows, whatever it says.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import FILLS, NEGATIONS
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.matchers.latent_attention.core import WHERES, Core, constant, is_low
from megacpp_compile.matchers.latent_attention.lists import Axes, Named, axes_of, behind, named_rows
from megacpp_compile.matchers.latent_attention.masks import (
    AND,
    OR,
    NotRows,
    Seen,
    Sum,
    beside_diagonal,
    last_row,
    limits_of,
)


@dataclasses.dataclass(frozen=True)
class Condition:
    """A tensor of bool over `axes` that says which rows are seen, or `hidden`."""

    node: Node
    axes: Axes
    hidden: bool


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rows of `index`, a list over `axes` with "k", where `conditions` hold, and which are at most `last` + the
    query's number, unless it is None. repeats: whether the list may name a row twice."""

    index: Node
    axes: Axes
    conditions: tuple[Condition, ...]
    last: int | None
    repeats: bool


def selection_of(core: Core) -> Selection | NotRows | None:
    """What the masks of `core` select, or why that cannot be told; None where no list is in them."""
    reader = _Reader(core)
    for mask in core.masks:
        reader.read(mask.node, axes_of(mask.node, core.scores_axes), mask.kind)
    if reader.failures and reader.named:
        return reader.failures[0]
    if not reader.found:
        return None
    first, *others = reader.found
    if others:
        return NotRows("it is made of more than one list")
    if "h" in first.axes:
        return NotRows("each head has a list of its own")
    return Selection(first.index, first.axes, tuple(reader.conditions), reader.last, first.repeats)


class _Reader:
    def __init__(self, core: Core) -> None:
        self.tokens = core.scores[0][0].size("t")
        self.found: list[Named] = []
        self.conditions: list[Condition] = []
        self.last: int | None = 0 if core.causal else None
        self.failures: list[NotRows] = []
        self.named = False  # whether there is a list, fit or not

    def read(self, node: Any, axes: Axes, kind: str) -> None:
        """A mask of a kind as in `core.Mask`."""
        try:
            listed = named_rows(node, axes)
        except NotRows as why:
            self.failures.append(why)
            self.named = True
            return
        self.named = self.named or listed is not None
        try:
            if listed is not None:
                self._listed(listed, kind)
            elif kind == "added":
                self._added(node, axes)
            else:
                self._condition(node, axes, kind == "hidden")
        except NotRows as why:
            self.failures.append(why)

    def _listed(self, listed: Named, kind: str) -> None:
        shown, hidden = listed.named, listed.other
        if kind == "hidden":
            shown, hidden = 1 - shown, 1 - hidden
        NotRows.when(
            (shown, hidden) != (1, 0) if kind != "added" else shown != 0 or not hidden <= -60000,
            f"it is {listed.named:g} at the rows of the list and {listed.other:g} at the others",
        )
        self.found.append(listed)

    def _added(self, node: Any, axes: Axes) -> None:
        """Of what is 0, or so low that nothing is left."""
        if constant(node) == 0:
            return
        NotRows.when(not isinstance(node, Node), "it is data")
        if node.target in WHERES or node.target in FILLS:
            condition, a, b = node.args if node.target in WHERES else (node.args[1], node.args[2], node.args[0])
            for shown, filled, kind in ((a, b, "seen"), (b, a, "hidden")):
                if is_low(filled):
                    self.read(condition, axes_of(condition, axes), kind)  # type: ignore[arg-type]
                    self._part(shown, axes, "added")
                    return
        if node.target is aten.add.Tensor and not node.kwargs:
            for part in node.args:
                self._part(part, axes, "added")
        elif node.target is aten.triu.default and is_low(node.args[0]):
            self._limits(axes, [beside_diagonal(node).plus(1)])
        elif (step := behind(node, axes)) is not None:
            self.read(*step, "added")
        else:
            raise NotRows(f"what {node} adds is data: give it as a mask of bool")

    def _condition(self, node: Node, axes: Axes, hidden: bool) -> None:
        if constant(node) == (0 if hidden else 1):
            return
        if node.target in NEGATIONS and value(node).dtype == torch.bool:
            self.read(node.args[0], axes, "seen" if hidden else "hidden")
        elif node.target is aten.tril.default and not hidden and constant(node.args[0]) is None:
            self._limits(axes, [beside_diagonal(node)])
            self._part(node.args[0], axes, "seen")
        elif node.target in (OR if hidden else AND) and all(_is_bool(a) for a in node.args[:2]):
            for part in node.args[:2]:
                self._part(part, axes, "hidden" if hidden else "seen")
        else:
            try:
                self._limits(axes, limits_of(node, hidden))
            except NotRows:
                if (step := behind(node, axes)) is not None and _is_bool(step[0]):
                    self.read(*step, "hidden" if hidden else "seen")
                elif _is_bool(node) and "h" not in axes:
                    self.conditions.append(Condition(node, axes, hidden))
                else:
                    raise

    def _part(self, part: Any, axes: Axes, kind: str) -> None:
        self.read(part, axes_of(part, axes) if isinstance(part, Node) else (), kind)

    def _limits(self, axes: Axes, limits: list[Sum]) -> None:
        """Rows up to one that moves with the query."""
        for limit in limits:
            own = axes[len(axes) - len(limit.steps) :]
            NotRows.when(any(step for axis, step in zip(own, limit.steps, strict=True) if axis is None), "it is data")
            seen = last_row({axis: step for axis, step in zip(own, limit.steps, strict=True) if axis}, limit)
            NotRows.when(seen.last.parts or not self._moves(seen), "it is data")
            self.last = seen.last.number if self.last is None else min(self.last, seen.last.number)

    def _moves(self, seen: Seen) -> bool:
        return seen.moves or same_size(self.tokens, 1)


def _is_bool(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), torch.Tensor) and value(node).dtype == torch.bool
