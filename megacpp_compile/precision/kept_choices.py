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
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megacpp_compile._torch import present
from megacpp_compile._torch.dispatch import DispatchKey, TorchDispatchMode, set_excluded
from megacpp_compile._torch.ops import OpOverload
from megacpp_compile._torch.pytree import tree_leaves, tree_map
from megacpp_compile.lowerings._traits import name_of, traits_of

# Their order of adding is not fixed on GPUs, beside that of the ops whose trait is "kernel".
_ADD_UP = ("aten::cumsum", "aten::index_add", "aten::index_reduce", "aten::histc")
# The n-th call of an op. Other ops may come between: a checkpoint's own `detach`, casts that autocast has cached.
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
        return _Keep(found, kept, saves), _Reuse(found, kept, count)

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
        # A living tensor holds its sources, and no other: a GEMM's result outlives its last reader by nothing.
        self.sources: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = func, self.calls[func]
        self.calls[func] += 1
        operands = list(_tensors((args, kwargs)))
        sources = frozenset().union(*(self.sources.get(t, ()) for t in operands))
        if _restorable(func) and traits_of(func).selection and (sources or any(map(_is_float, operands))):
            self.found.routed = True
            self.kept[call] = _Kept(tree_map(_copy, result))
            for source in sources:
                if source.result._version == source.version:  # what was written since is computed again
                    self.kept[source.call] = _Kept(source.result, (source.version,))
            sources = frozenset()
        elif _restorable(func) and _may_differ(func) and isinstance(result, Tensor) and _is_float(result):
            sources = frozenset({_Source(call, kept := _alias(result), kept._version)})
        if self.saves is not None and call not in self.kept and _restorable(func) and self.saves(func):
            if not draws(func, args, kwargs):
                self.kept[call] = _Kept(held := tree_map(_alias, result), _versions(held))
        for t in _tensors(result):
            if sources:
                self.sources[t] = sources
        return result


class _Reuse(_Seeing):
    """Runs a recomputation with what `_Keep` has kept. A second backward enters it again."""

    def __init__(self, found: Choices, kept: dict[Call, _Kept], count: bool) -> None:
        super().__init__()
        self.found, self.kept, self.count, self.calls = found, kept, count, Counter[Any]()

    def __enter__(self) -> Any:
        self.calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = func, self.calls[func]
        self.calls[func] += 1
        kept, choice = self.kept.get(call), traits_of(func).selection
        if kept is None or not kept.intact() or (self.count and not choice):
            return func(*args, **(kwargs or {}))  # under `count` scores as they come the second time, to choose from
        if self.count or draws(func, args, kwargs):
            result = func(*args, **(kwargs or {}))
            self.found.again += self.count
            self.found.flips += self.count and _flips(kept.result, result)
        return kept.handed()


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
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    return not ("dropout_p" in names and given.get("dropout_p", 0.0) == 0.0)


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
    return (t for t in tree_leaves(values) if isinstance(t, Tensor))


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
