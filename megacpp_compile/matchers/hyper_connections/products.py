"""Products of two tensors, summed over dimensions or not, by letters: which dimension of a factor is which of the
result.

`matmul`, `bmm`, `einsum`, `tensordot`, a product of broadcast tensors and a sum of one come out alike. A factor is
followed through casts and views down to what holds its numbers; each place on that way has its letters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import CASTS, FOLDS, RESHAPES, SQUEEZES, is_cast, uncast
from megacpp_compile.fx.walks import following
from megacpp_compile.reader.dims import below, reduced_dims, unreduced
from megacpp_compile.reader.links import above
from megacpp_compile.reader.products import BROADCAST, contraction, equation_of

# A letter for each dimension; None: of size 1, where the other factor has more.
Letters = tuple[int | None, ...]
_WHOLE = {aten.matmul.default, aten.bmm.default}


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor on the way to a factor, and its letters. through: the nodes between it and the product."""

    node: Node
    letters: Letters
    through: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Product:
    """`node` is the product of two factors, summed over the letters that `out` lacks. internal: nodes up to `node`."""

    node: Node
    factors: tuple[Node, Node]
    letters: tuple[Letters, Letters]
    out: Letters
    internal: tuple[Node, ...]

    def places(self, i: int) -> list[Place]:
        """Where factor `i` is read from, the nearest place first."""
        return list(following(Place(self.factors[i], self.letters[i], ()), _beneath))


@or_none
def product_of(node: Any) -> Product | None:
    """The product that `node` is, in whatever dtype; None for anything else."""
    inner = uncast(node)
    NoMatch.when(
        not isinstance(inner, Node) or inner.op != "call_function" or not isinstance(value(inner), torch.Tensor)
    )
    found = NoMatch.unless(_without_unit_dims(inner) or _summed(inner) or _multiplied(inner) or _contracted(inner))
    casts = above(node, inner)
    return dataclasses.replace(found, node=(casts or [inner])[0], internal=(*found.internal, *casts))


@or_none
def _without_unit_dims(node: Node) -> Product | None:
    """A product by a single row, and that row alone."""
    if node.target in SQUEEZES and (summed := _summed(node.args[0], keeps=True)) is not None:  # type: ignore[arg-type]
        whole = len(summed.out) == value(node).dim()
        return dataclasses.replace(summed, node=node, internal=(*summed.internal, node)) if whole else None
    drops = node.target in SQUEEZES or node.target is aten.select.int or node.target in RESHAPES
    NoMatch.when(not drops or value(node).dim() != value(node.args[0]).dim() - 1)
    found = NoMatch.unless(_contracted(node.args[0]))  # type: ignore[arg-type]
    NoMatch.when(node.args[0].target not in _WHOLE or not same_size(value(node.args[0]).shape[-2], 1))
    rows, kept = value(node.args[0]).shape, [*found.out[:-2], found.out[-1]]
    NoMatch.when(not all(map(same_size, value(node).shape, [*rows[:-2], rows[-1]])))
    unit, (left, right) = found.out[-2], found.letters
    letters = (tuple(None if letter == unit else letter for letter in left), right)
    return dataclasses.replace(found, node=node, out=tuple(kept), letters=letters, internal=(*found.internal, node))


def _multiplied(node: Node) -> Product | None:
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return None
    letters = tuple(range(value(node).dim()))
    first, second = (_broadcast(a, node, letters) for a in node.args[:2])  # type: ignore[arg-type]
    return Product(node, tuple(node.args[:2]), (first, second), letters, (node,))  # type: ignore[arg-type]


def _broadcast(factor: Node, node: Node, letters: Letters) -> Letters:
    sizes, full = value(factor).shape, value(node).shape
    own = letters[len(letters) - len(sizes) :]
    wide = full[len(full) - len(sizes) :]
    each = zip(sizes, wide, own, strict=True)
    return tuple(None if same_size(n, 1) and not same_size(m, 1) else c for n, m, c in each)


@or_none
def _summed(node: Node, keeps: bool = False) -> Product | None:
    """keeps: the dimensions that are summed are kept, until a `squeeze` behind."""
    NoMatch.when(not isinstance(node, Node) or node.target is not aten.sum.dim_IntList)
    found = NoMatch.unless(product_of(node.args[0]) if reduced_dims(node)[1] == keeps else None)
    NoMatch.when(not node.args[1])
    out = tuple(unreduced(node, found.out))
    return dataclasses.replace(found, node=node, out=out, internal=(*found.internal, node))


def _contracted(node: Node) -> Product | None:
    """The product of two tensors in one op; by a matrix for all tokens only where an equation says so."""
    made, rank = contraction(node), value(node).dim()
    if made is None or made.bias is not None or len(made.factors) != 2:
        return None
    if node.target in _WHOLE and (rank < 3 or any(len(factor.dims) != rank for factor in made.factors)):
        return None
    if node.target not in _WHOLE and equation_of(node) is None:
        return None
    first, second = (tuple(None if d == BROADCAST else d for d in factor.dims) for factor in made.factors)
    a, b = (factor.node for factor in made.factors)
    return Product(node, (a, b), (first, second), tuple(range(rank)), (node,))


@or_none
def _beneath(at: Place) -> Place | None:
    """The tensor that the one `at` a place is a view or a cast of."""
    NoMatch.when(at.node.op != "call_function" or not at.node.args)
    source: Any = at.node.args[0]
    NoMatch.when(not isinstance(source, Node) or not isinstance(value(source), torch.Tensor))
    letters = NoMatch.unless(_below(at.node, source, at.letters))
    return Place(source, letters, (*at.through, at.node))


def _below(node: Node, source: Node, letters: Letters) -> Letters | None:
    """The letters of `source`, of which `node` is a view or a cast; None where it is another, or repeats numbers."""
    if node.target is aten.unsqueeze.default:
        at = node.args[1] % len(letters)  # type: ignore[operator]
        return letters[:at] + letters[at + 1 :]
    if node.target in RESHAPES | FOLDS | SQUEEZES:
        return _unit_dims(node, source, letters)
    own = below(node, letters, None)
    return None if own is None or node.target in CASTS and not is_cast(node) else tuple(own)


@or_none
def _unit_dims(node: Node, source: Node, letters: Letters) -> Letters | None:
    """Through a reshape that drops or adds dimensions of size 1 alone."""
    new, old = value(node).shape, value(source).shape
    kept = [(n, letter) for n, letter in zip(new, letters, strict=True) if not same_size(n, 1)]
    sizes = [n for n in old if not same_size(n, 1)]
    NoMatch.when(len(kept) != len(sizes) or not all(same_size(n, m) for (n, _), m in zip(kept, sizes, strict=True)))
    if len(new) == len(old):
        return letters
    units = [letter for n, letter in zip(new, letters, strict=True) if same_size(n, 1)]
    # which dimension of size 1 is which
    NoMatch.when(any(letter is not None for letter in units) and sum(same_size(n, 1) for n in old))
    rest = iter(kept)
    return tuple(None if same_size(n, 1) else next(rest)[1] for n in old)


def deepest(places: Sequence[Place], wanted: Sequence[int | None], ordered: bool, rounded: bool) -> Place | None:
    """The place furthest down that has just the letters `wanted`, in this order if `ordered`. rounded: casts to fewer
    bits may lie between."""
    found = None
    for place in places:
        if not rounded and place.through and _rounds(place.through[-1]):
            break
        if place.letters == tuple(wanted) if ordered else sorted(place.letters, key=str) == sorted(wanted, key=str):
            found = place
    return found


def _rounds(node: Node) -> bool:
    return is_cast(node) and value(node).dtype.itemsize < value(node.args[0]).dtype.itemsize
