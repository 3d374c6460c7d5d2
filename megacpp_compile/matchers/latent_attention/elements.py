"""Which elements of one tensor the elements of another are, followed back through views.

A view only moves elements, so that a chain of views in any spelling is told by where it takes each element from. Here a
grid of elements is followed back: by batch, head, row and channel, of which all heads and channels are looked at and
some places of the others. Views move elements by digits of their index, in which places that differ in each digit tell
as much as all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.fx.views import ALL_PERMUTATIONS, DETACH, FOLDS, IDENTITIES, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.fx.walks import following
from megacpp_compile.reader.dims import regrouped, repetition, unpermuted
from megacpp_compile.reader.parts import Part, part_of

AXES = "bhscr"  # batch, head, row, channel of a head, channel of the latent
ZERO = np.zeros([1] * len(AXES), dtype=np.int64)
_SAME_ORDER = RESHAPES | FOLDS | UNIT_DIMS


@dataclasses.dataclass(frozen=True)
class Elements:
    """A grid of elements of `node`.

    samples: axis -> the places along it that are looked at. index: for each dimension of `node`, where the element is
    along it: an array over AXES, of size 1 along those it does not depend on.
    """

    node: Node
    samples: Mapping[str, np.ndarray]
    index: tuple[np.ndarray, ...]

    def varies(self, dim: int, axis: str) -> bool:
        """Whether the place along `dim` depends on `axis`."""
        return bool((np.diff(self.index[dim], axis=AXES.index(axis)) != 0).any())

    def depends(self, axis: str) -> bool:
        return any(self.varies(dim, axis) for dim in range(len(self.index)))

    def at_first(self, axes: str) -> Elements:
        """The elements at the first place along `axes`."""
        index = self.index
        for axis in axes:
            index = tuple(np.take(i, [0], AXES.index(axis)) for i in index)
        return Elements(self.node, {a: v[:1] if a in axes else v for a, v in self.samples.items()}, index)

    def is_that_of(self, other: Elements) -> bool:
        """Whether both are the same elements of the same tensor."""
        if self.node is not other.node or any(len(self.samples[a]) != len(other.samples[a]) for a in AXES):
            return False
        return all((a == b).all() for a, b in zip(self.index, other.index, strict=True))


def places(size: Any, all_of: bool) -> np.ndarray:
    """The places to look at along an axis of `size`."""
    n = hint(size)
    some = {0, 1, 2, n // 2, n - 2, n - 1}
    return np.arange(n) if all_of else np.array(sorted(i for i in some if 0 <= i < n))


def along(axis: str, values: np.ndarray) -> np.ndarray:
    """`values` as an array over AXES."""
    return values.reshape([-1 if a == axis else 1 for a in AXES])


def elements(node: Node, axes: Sequence[str | None], samples: Mapping[str, np.ndarray]) -> Elements:
    """The elements of `node`, whose dimensions are `axes`, None for one of size 1."""
    return Elements(node, samples, tuple(ZERO if a is None else along(a, samples[a]) for a in axes))


@or_none
def back(at: Elements) -> Elements | None:
    """The elements of the tensor that `at.node` is a view or cast of; None where it is none."""
    node = at.node
    NoMatch.when(node.op != "call_function" or not node.args or not isinstance(node.args[0], Node))
    source = node.args[0]
    if (part := part_of(node)) is not None:
        return _whole(at, part)
    NoMatch.when(not isinstance(value(source), torch.Tensor) or not isinstance(value(node), torch.Tensor))
    if node.target in IDENTITIES or node.target is DETACH or is_cast(node):
        return Elements(source, at.samples, at.index)
    if node.target in _SAME_ORDER:
        index = _reshaped(at.index, value(node).shape, value(source).shape)
        return None if index is None else Elements(source, at.samples, index)
    if node.target in ALL_PERMUTATIONS:
        return Elements(source, at.samples, tuple(unpermuted(node, at.index)))
    times, inside = NoMatch.unless(repetition(node))
    first = len(times) - value(source).dim()
    sizes = [hint(n) for n in (times[first:] if inside else value(source).shape)]
    found = [i // n if inside else i % n for i, n in zip(at.index[first:], sizes, strict=True)]
    return Elements(source, at.samples, tuple(found))


def operand(at: Elements, source: Node) -> Elements | None:
    """The elements of `source`, which is broadcast to `at.node`; None where it is not."""
    here, there = value(at.node).shape, value(source).shape
    own, first = list[np.ndarray](), len(here) - len(there)
    for d, size in enumerate(there):
        if not same_size(size, here[first + d]) and not same_size(size, 1):
            return None
        own.append(at.index[first + d] * 0 if same_size(size, 1) else at.index[first + d])
    return Elements(source, at.samples, tuple(own))


def levels(at: Elements) -> list[Elements]:
    """`at`, and the elements of each tensor that it is views of, to the one that is no view."""
    return list(following(at, back))


@or_none
def cut(at: Elements) -> list[Elements] | None:
    """The elements of each tensor that `at.node` has side by side along the channels, as `cat` does, and writes into a
    part of another; None where it is something else."""
    node, rank = at.node, len(at.index)
    if node.target is aten.cat.default:
        dim = (node.args[1] if len(node.args) > 1 else 0) % rank  # type: ignore[operator]
        given: Any = node.args[0]
        ends = [0, *itertools.accumulate(hint(value(part).shape[dim]) for part in given)]
        runs = list(zip(given, ends, ends, ends[1:], strict=False))
    elif node.target is aten.slice_scatter.default:
        base, source, dim, start, _, step = [*node.args, *(None,) * 4][:6]
        dim, whole = (dim or 0) % rank, hint(value(node).shape[(dim or 0) % rank])  # type: ignore[operator]
        start = start or 0
        NoMatch.when(not isinstance(start, int) or start < 0 or step not in (None, 1))
        end = start + hint(value(source).shape[dim])
        runs = [(base, 0, 0, start), (source, start, start, end), (base, 0, end, whole)]
    else:
        return None
    NoMatch.when(any(at.varies(dim, axis) for axis in AXES if axis != "c"))
    place, axis = np.broadcast_to(at.index[dim].reshape(-1), at.samples["c"].shape), AXES.index("c")
    found = []
    for part, first, lo, hi in runs:
        chosen = np.flatnonzero((place >= lo) & (place < hi))
        if len(chosen) and (np.diff(chosen) == 1).all():
            index = [i if i.shape[axis] == 1 else np.take(i, chosen, axis) for i in at.index]
            index[dim] = index[dim] - first
            found.append(Elements(part, {**at.samples, "c": at.samples["c"][chosen]}, tuple(index)))
        elif len(chosen):
            return None
    return found


def _whole(at: Elements, part: Part) -> Elements | None:
    """The elements of what `part` is of."""
    source, dim, start, step = part.source, part.dim, part.start, part.step
    if not part.kept and isinstance(start, int):
        chosen = np.full([1] * len(AXES), start % hint(part.whole))
        return Elements(source, at.samples, (*at.index[:dim], chosen, *at.index[dim:]))
    if part.by is at.node and not (isinstance(start, int) and start >= 0 and isinstance(step, int)):
        return None  # where a slice begins, is data
    moved = at.index[dim] * step + hint(start)
    return Elements(source, at.samples, (*at.index[:dim], moved, *at.index[dim + 1 :]))


def _reshaped(index: Sequence[np.ndarray], here: Sequence[Any], there: Sequence[Any]) -> tuple[np.ndarray, ...] | None:
    """The index of elements of sizes `here` in the same order under sizes `there`."""
    if (runs := regrouped(here, there)) is None:
        return None
    new = [ZERO for _ in there]
    for own, theirs in runs:
        flat = ZERO
        for d in own:
            flat = flat * hint(here[d]) + index[d]
        for d in reversed(theirs):
            new[d], flat = flat % hint(there[d]), flat // hint(there[d])
    return tuple(new)
