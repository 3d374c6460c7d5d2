"""Keeps what a block chose in its forward, so that its recomputation does not choose again.

A router's scores come out of a GEMM. Computed a second time they may be a rounding apart, behind an atomic add for one,
and a token near a tie then goes to another expert: backward would differentiate another function than forward computed,
with other numbers of rows an expert, or with the same and unnoticed. So the contexts of `choices` keep, of one call,

- the results of selections (top-k, sort, argmax, nonzero: `OpTraits.selection`);
- the results of GEMMs and of ops that may add in any order, as far as selections read them: scores before top-k.

What lies between is pointwise, or a reduction in a fixed order, and gives the same bits again.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megacpp_compile._torch import present
from megacpp_compile._torch.dispatch import DispatchKey, TorchDispatchMode, set_excluded
from megacpp_compile._torch.ops import OpOverload
from megacpp_compile._torch.pytree import tree_map
from megacpp_compile.fx.edit import arguments
from megacpp_compile.lowerings._traits import name_of, traits_of

# Their order of adding is not fixed on GPUs, beside that of the ops whose trait is "kernel".
_ADD_UP = ("aten::cumsum", "aten::index_add", "aten::index_reduce", "aten::histc")
# The n-th call of an op, of those that are watched. Others may come between: a checkpoint's own `detach`, casts that
# autocast has cached.
Call = tuple[Any, int]


@dataclasses.dataclass(eq=False)
class _Source:
    """A result that may be another the next time. version: of `result`, to tell a write to it."""

    call: Call
    result: Any
    version: int


@dataclasses.dataclass
class Choices:
    """What the calls of one block chose.

    Attributes:
        routed: whether a selection has run whose operands are computed in the block.
        flips: entries of choices that came out otherwise when they were made again; counted by `choices(count=True)`.
        again: choices that were made again for that.
    """

    routed: bool = False
    flips: int = 0
    again: int = 0


@dataclasses.dataclass(eq=False)
class _Kept:
    """A result that a recomputation is handed: a copy of a choice, or the result itself, as long as nobody has written
    to it (versions)."""

    result: Any
    versions: tuple[int, ...] | None = None

    def intact(self) -> bool:
        return self.versions is None or self.versions == _versions(self.result)

    def handed(self) -> Any:
        """A choice may be written to again; of anything else a write shows in its version."""
        copied = _copy if self.versions is None else _alias
        return tree_map(copied, self.result)


def choices(
    found: Choices, count: bool = False, saves: Callable[[Any], bool] | None = None
) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`, and of Transformer Engine's, for one block.

    found: what is learnt of the block's calls. count: debugging: recompute scores too, choose from them and count in
    `found.flips` the entries that differ; backward goes by the first choice all the same.
    saves: called with an op, says whether its results are kept, too. What draws random numbers is not, as drawing is
    what moves the generator on for those behind it; nor what somebody wrote to afterwards: both run again.
    """

    def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        kept: dict[Call, _Kept] = {}
        return _Keep(found, kept, saves), _Reuse(found, kept, saves, count)

    return contexts


class _Seeing(TorchDispatchMode):
    """Sees every op. FlexAttention runs as it is, an operator of higher order that compiles itself in eager."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # asked by torch 2.11 and newer; older ones refuse FlexAttention, and run compiled code in eager


class _Keep(_Seeing):
    """Runs a forward and keeps its choices and their sources."""

    def __init__(self, found: Choices, kept: dict[Call, _Kept], saves: Callable[[Any], bool] | None) -> None:
        super().__init__()
        self.found, self.kept, self.saves, self.calls = found, kept, saves, Counter[Any]()
        # By identity of a living tensor, which holds its sources and no other: a GEMM's result outlives its last reader
        # by nothing. References are never followed, so that none brings a tensor back that only C++ holds.
        self.sources: dict[int, frozenset[_Source]] = {}
        self.living: dict[int, Any] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.sources.clear()
        self.living.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        selects, differs, restorable = _facts(func)
        sources = self._sources_of(args, kwargs)
        if restorable and (selects or differs or (self.saves is not None and self.saves(func))):
            sources = self._watched(func, args, kwargs, result, sources)
        if sources:
            for t in _tensors(result):
                self.sources[id(t)] = sources
                if id(t) not in self.living:
                    self.living[id(t)] = weakref.ref(t, functools.partial(self._forget, id(t)))
        return result

    def _watched(
        self, func: Any, args: Any, kwargs: Any, result: Any, sources: frozenset[_Source]
    ) -> frozenset[_Source]:
        """Keep what is to be kept of a call; returns the sources of its result."""
        call = func, self.calls[func]
        self.calls[func] += 1
        selects, differs, _ = _facts(func)
        if selects and (sources or any(map(_is_float, (*_tensors(args), *_tensors(kwargs))))):
            self.found.routed = True
            self.kept[call] = _Kept(tree_map(_copy, result))
            for source in sources:
                if source.result._version == source.version:  # what was written since is computed again
                    self.kept[source.call] = _Kept(source.result, (source.version,))
            return frozenset()
        if differs and isinstance(result, Tensor) and _is_float(result):
            sources = frozenset({_Source(call, kept := _alias(result), kept._version)})
        if self.saves is not None and self.saves(func) and not draws(func, args, kwargs):
            self.kept[call] = _Kept(held := tree_map(_alias, result), _versions(held))
        return sources

    def _sources_of(self, args: Any, kwargs: Any) -> frozenset[_Source]:
        if not self.sources:
            return frozenset()
        found = [s for t in (*_tensors(args), *_tensors(kwargs)) if (s := self.sources.get(id(t)))]
        return found[0] if len(found) == 1 else frozenset().union(*found)

    def _forget(self, key: int, _: Any) -> None:
        self.sources.pop(key, None)
        self.living.pop(key, None)


class _Reuse(_Seeing):
    """Runs a recomputation with what `_Keep` has kept. A second backward enters it again."""

    def __init__(
        self, found: Choices, kept: dict[Call, _Kept], saves: Callable[[Any], bool] | None, count: bool
    ) -> None:
        super().__init__()
        self.found, self.kept, self.saves, self.count, self.calls = found, kept, saves, count, Counter[Any]()

    def __enter__(self) -> Any:
        self.calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selects, differs, restorable = _facts(func)
        if not restorable or not (selects or differs or (self.saves is not None and self.saves(func))):
            return func(*args, **(kwargs or {}))
        kept = self.kept.get((func, self.calls[func]))
        self.calls[func] += 1
        if kept is None or not kept.intact() or (self.count and not selects):
            return func(*args, **(kwargs or {}))  # under `count` scores as they come the second time, to choose from
        if self.count or draws(func, args, kwargs):
            result = func(*args, **(kwargs or {}))
            self.found.again += self.count
            self.found.flips += self.count and _flips(kept.result, result)
        return kept.handed()


@functools.cache
def _facts(func: OpOverload) -> tuple[bool, bool, bool]:
    """Whether an op selects, may round otherwise in a second run, and has results that may be handed out again."""
    return traits_of(func).selection, _may_differ(func), _restorable(func)


def _restorable(func: Any) -> bool:
    """Whether a result may be handed out in the place of a call: none that writes or returns a view."""
    if not isinstance(func, OpOverload):
        return False
    return not func._schema.is_mutable and not any(r.alias_info for r in func._schema.returns)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call moves a generator of random numbers on. Attention says so of itself, and does not without
    dropout."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return arguments(func, args, kwargs or {}).get("dropout_p") != 0.0


def _may_differ(func: Any) -> bool:
    """Whether a second run may round otherwise: a GEMM, an attention core, another kernel that may add in any order."""
    traits = traits_of(func)
    return traits.gemm or traits.core or traits.kernel == "kernel" or name_of(func) in _ADD_UP


def _flips(first: Any, second: Any) -> int:
    """Entries of integer results that differ; all of the longer one where lengths do."""
    found = 0
    for a, b in zip(_tensors(first), _tensors(second), strict=True):
        if not _is_float(a):
            found += int((a != b).sum()) if a.shape == b.shape else max(a.numel(), b.numel())
    return found


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an op's operands or results, which stand in lists at most; this runs for every op."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point()


def _alias(value: Any) -> Any:
    """The same memory without autograd's graph, on which writes count as on `value`: below autograd a `detach` by
    itself begins to count anew."""
    if not isinstance(value, Tensor):
        return value
    if not present(DispatchKey, set_excluded):
        return value.clone()
    with set_excluded(DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(values: Any) -> tuple[int, ...]:
    return tuple(t._version for t in _tensors(values))


def _copy(value: Any) -> Any:
    return torch.clone(value) if isinstance(value, Tensor) else value
