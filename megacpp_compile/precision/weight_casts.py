"""Casts of weights to float8 that calls share for as long as nobody changes a weight.

    with megacpp_compile.cached_weight_casts():      # the microbatches of a step, or a whole generation
        for batch in microbatches:
            model(batch).backward()
    optimizer.step()

As autocast's cache of casts has it: what is cast in the context is kept until it ends. Without one every call of a
frame casts anew. It is a promise, and no guess: `weight.data.copy_` changes a weight, and not its version.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.config.warn_once import warn_once


@dataclasses.dataclass(frozen=True)
class _Kept:
    """weights: what was cast, held so that their ids stay theirs. versions: of each, when it was."""

    weights: tuple[Tensor, ...]
    versions: tuple[int, ...]
    casts: tuple[Tensor, ...]


class _Cache:
    """The casts of the outermost context that is open, in all threads: recomputation in backward calls frames, too."""

    def __init__(self) -> None:
        self.depth, self.asked = 0, False
        self.kept: dict[tuple[Hashable, ...], _Kept] = {}


_CACHE = _Cache()


@contextlib.contextmanager
def cached_weight_casts() -> Iterator[None]:
    """Have models that are compiled with `cache_weight_casts=True` cast each weight to float8 once in this context.

    Promises that no weight changes in it: open it around the microbatches of a step, backward included, and close it
    before the optimizer's step. A weight that an operation in place has changed all the same is cast anew; one that was
    written to through `.data` cannot be told. It holds 2 bytes for each element of such a weight until it ends (1 where
    nothing is trained). Contexts may be nested; the outermost counts. Warns, once a process, where no compiled model
    asked for a cast.
    """
    _CACHE.depth += 1
    try:
        yield
        if _CACHE.depth == 1 and not _CACHE.asked:
            warn_once(
                "cached_weight_casts() has no effect: no model that was called in it casts weights to float8 in front "
                "of its graph. Compile with a precision plan and options={'cache_weight_casts': True}."
            )
    finally:
        _CACHE.depth -= 1
        if not _CACHE.depth:
            _CACHE.kept, _CACHE.asked = {}, False


def cast(key: Hashable, weights: Sequence[Tensor], make: Callable[..., Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """`make(*weights)`, or in a context what it returned for these very weights under this `key`."""
    if not _CACHE.depth:
        return _made(weights, make)
    _CACHE.asked = True
    place = (key, *map(id, weights))
    versions = tuple(map(_version, weights))
    found = _CACHE.kept.get(place)
    if found is None or found.versions != versions:
        found = _CACHE.kept[place] = _Kept(tuple(weights), versions, _made(weights, make))
    return found.casts


def _made(weights: Sequence[Tensor], make: Callable[..., Any]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(make(*weights))


def _version(weight: Tensor) -> int:
    """How often the weight was written to; an inference tensor does not count it, and cannot be trained."""
    return 0 if weight.is_inference() else weight._version
