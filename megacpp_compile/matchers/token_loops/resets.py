"""Decays and states that flags clear, as where a document begins."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import REARRANGEMENTS
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers.documents import is_constant
from megacpp_compile.matchers.latent_attention.core import WHERES
from megacpp_compile.matchers.linear import is_projection
from megacpp_compile.reader.links import chain

# (tag, reason) of a step that clears the state, and of decays that no op takes the flags of.
STATE = ("documents", "flags clear the state itself: multiply the decay by them, or write -1e4 into its logarithm")
DECAYS = ("documents", "flags clear the decays of a scan whose step size is in them: no op takes documents there")
_MOST = 40  # nodes in front of what a loop reads


@dataclasses.dataclass(frozen=True)
class Cleared:
    """`node`, but 0 where `flags` hold, or with `kept` where they do not."""

    node: Node
    flags: Node
    kept: bool


def cleared_by_flags(node: Node) -> Cleared | None:
    """What `node` is before flags clear it; None where they do not."""
    args: Any = node.args
    if node.target is aten.masked_fill.Scalar and args[2] == 0:
        return Cleared(args[0], args[1], False)
    if node.target in WHERES:
        nothing = [_is_nothing(a) for a in args[1:]]
        if nothing[0] != nothing[1] and isinstance(kept := args[1 + nothing[0]], Node):
            return Cleared(kept, args[0], nothing[1])
    if node.target is aten.mul.Tensor and all(isinstance(a, Node) for a in args):
        flags = [is_flags(a) for a in args]
        if flags[0] != flags[1]:
            return Cleared(args[flags[0]], args[flags[1]], True)
    return None


def clears(node: Node) -> bool:
    """Whether flags of the model's, and no constants, clear something in `node`."""
    found = cleared_by_flags(node)
    return found is not None and not is_constant(found.flags)


def is_flags(node: Any) -> bool:
    """Whether `node` is of 0s and 1s, by what it is computed from."""
    return any(getattr(value(n), "dtype", None) is torch.bool for n in chain(node, REARRANGEMENTS, _from_one))


def _from_one(node: Node) -> Any:
    """What `node` subtracts from 1, or None."""
    one, other = (1, 0) if node.target is aten.rsub.Scalar else (0, 1)
    return node.args[other] if node.target in (aten.rsub.Scalar, aten.sub.Tensor) and node.args[one] == 1 else None


def cleared_in_front(nodes: Iterable[Node]) -> bool:
    """Whether flags of the model's clear anything that `nodes` are computed from, behind the projections."""
    return any(map(clears, itertools.islice(ancestors(nodes, lambda a: not is_projection(a)), _MOST)))


def _is_nothing(given: Any) -> bool:
    if isinstance(given, Node) and given.target is aten.scalar_tensor.default:
        given = given.args[0]
    return is_filled(given, 0.0) if isinstance(given, Node) else given == 0
