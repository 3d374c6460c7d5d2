"""Atoms: the dimensions that the dimensions of a subgraph's tensors are made of; see `axes`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.fx.edit import same_size


class NoAxes(GivenUp):
    """The subgraph's dimensions can't be told apart or resized."""


class Atom:
    """One dimension. `parts`, once known, are the atoms it is made of, outermost first."""

    def __init__(self, size: Any) -> None:
        self.size, self.pinned = size, False
        self.parts: list[Atom] | None = None


Dim = list[Atom]
Dims = tuple[Atom, ...]  # a dimension that can be looked up


def flat(dim: Iterable[Atom]) -> Dim:
    """The atoms of a dimension, those made of others resolved."""
    out: Dim = []
    for atom in dim:
        if atom.parts is None:
            out.append(atom)
        else:
            atom.parts = flat(atom.parts)
            out += atom.parts
    return out


def fresh(size: Any) -> Dim:
    return [] if is_one(size) else [Atom(size)]


def number(size: Any) -> int | None:
    """`size`, where it is a number, or known to be one by a guard, as the count of a loop that was unrolled is."""
    hint = size if isinstance(size, int) else size.node.hint
    return hint if hint is not None and same_size(size, hint) else None


def is_one(size: Any) -> bool:
    return same_size(size, 1)


def pin(dims: Iterable[Dim]) -> None:
    for dim in dims:
        for atom in flat(dim):
            atom.pinned = True


def length(dim: Dim) -> Any:
    return math.prod(a.size for a in flat(dim))


def bind(atom: Atom, parts: list[Atom]) -> None:
    """`atom` is made of `parts`."""
    if parts != [atom]:
        atom.parts = list(parts)
        if atom.pinned:
            pin([parts])
