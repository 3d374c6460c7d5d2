"""Sequences of which each rank of a group has a part: which part, in what order, and who says so."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args

from megacpp_compile._torch import context_parallel
from megacpp_compile.errors import BadOptionError

Order = Literal["contiguous", "head_tail"]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that the ranks of a group have of every sequence.

    why: what splits sequences, as a sentence without its full stop. by_user: whether `sharded_sequences` says so.
    group: the name of the process group. places: the place in the sequence of each rank's pieces, rank by rank; mine:
    those of this rank. unknown: why these are not known; "" where they are.
    """

    why: str
    by_user: bool = False
    group: str = ""
    places: tuple[int, ...] = ()
    mine: tuple[int, ...] = ()
    unknown: str = ""

    @property
    def pieces(self) -> int:
        """How many pieces of a sequence a rank has."""
        return len(self.mine)


_said: list[Parts] = []


@contextlib.contextmanager
def sharded_sequences(group: Any, order: Order = "contiguous") -> Iterator[None]:
    """Within it, each rank of `group` calls compiled models with its own part of every sequence.

    Scans, delta rules, linear attention and causal convolutions that passes put in place then take the state, or the
    last steps, of the part before, and give gradients back to it. Torch's `context_parallel` says the same of itself.
    Attention is left as the model has it. Parts have equal lengths.

    Args:
        group: a process group, or a mesh of one dimension.
        order: "contiguous": rank r has the r-th of as many parts as there are ranks. "head_tail": sequences are cut
            into twice as many pieces, and rank r of R has the r-th and, behind it, the (2 R - 1 - r)-th, as torch's
            `context_parallel` has it where it balances ranks' work.

    Raises BadOptionError for another order and for a mesh of several dimensions.
    """
    if order not in get_args(Order):
        raise BadOptionError("order", order, " or ".join(map(repr, get_args(Order))))
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise BadOptionError("group", group, "a process group, or a mesh of one dimension, as mesh['context']")
        group = group.get_group()
    _said.append(_parts("sharded_sequences is in force", group, order == "head_tail", by_user=True))
    try:
        yield
    finally:
        _said.pop()


def parts_in_force() -> Parts | None:
    """The parts that sequences are in while this runs; None where nothing splits them, or over one rank."""
    if _said:
        return _said[-1] if len(_said[-1].places) > _said[-1].pieces else None
    if not (why := context_parallel.in_force()):
        return None
    if (found := context_parallel.mesh_in_force()) is None:
        return Parts(why, unknown="the order of its parts is not known: `megacpp_compile.sharded_sequences` says it")
    mesh, balanced = found
    if mesh.ndim != 1:
        return Parts(why, unknown="its mesh has several dimensions: it takes one, as mesh['context']")
    return _parts(why, mesh.get_group(), balanced)


def _parts(why: str, group: Any, balanced: bool, by_user: bool = False) -> Parts:
    ranks = group.size()
    of_rank = [(r, 2 * ranks - 1 - r) if balanced else (r,) for r in range(ranks)]
    places = tuple(place for pieces in of_rank for place in pieces)
    return Parts(why, by_user, group.group_name, places, of_rank[group.rank()])
