"""What Dynamo's iterators have left to give, and what they give at a position that is a symbol."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megacpp_compile._torch import positions, variables
from megacpp_compile._torch._registry import find
from megacpp_compile._torch.watched_lists import Watched

PATHS = {
    "Iterator": "torch._dynamo.variables.iter.IteratorVariable",
    "RangeIterator": "torch._dynamo.variables.lists.RangeIteratorVariable",
    "ListIterator": "torch._dynamo.variables.lists.ListIteratorVariable",
    "Zip": "torch._dynamo.variables.iter.ZipVariable",
    "Range": "torch._dynamo.variables.lists.RangeVariable",
    "BaseList": "torch._dynamo.variables.lists.BaseListVariable",
    "enumerate": "torch._dynamo.polyfills.builtins.enumerate",  # Dynamo translates this in its place
}
# Under which names iterators go on, from release to release.
_ADVANCES = ("tp_iternext_impl", "next_variable", "unpack_var_sequence", "force_unpack_var_sequence")
ENDLESS = 1 << 62


def install(advanced: Callable[[Any], None]) -> bool:
    """Call `advanced` with each of Dynamo's iterators ahead of its going on; False where Dynamo is built otherwise."""
    base = find(PATHS["Iterator"])
    classes = [base] if base is not None else []
    for cls in classes:  # it grows
        classes += [c for c in cls.__subclasses__() if c not in classes]
    found = [(cls, name) for cls in classes for name in _ADVANCES if name in vars(cls)]
    for cls, name in found:
        setattr(cls, name, _telling(vars(cls)[name], advanced))
    return bool(found)


def _telling(method: Callable[..., Any], advanced: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        advanced(self)
        return method(self, *args, **kwargs)

    return told


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of a range."""

    start: int
    stride: int
    count: int
    unread = False

    def at(self, translator: Any, position: Any) -> Any:
        return positions.scaled(translator, position, self.stride, self.start)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Equal parts of a dimension of a tensor, from part `first` on. length: of each; None where the dimension is taken
    away. unread: whether the graph does not hold them."""

    whole: Any
    dim: int
    first: int
    length: int | None
    count: int
    unread: bool = False
    gradients: bool = True

    def at(self, translator: Any, position: Any) -> Any:
        if self.unread and self.gradients != torch.is_grad_enabled():
            raise ValueError("the parts of a tensor are taken and read in different grad modes")
        step = self.length or 1
        begin = positions.scaled(translator, position, step, step * self.first)
        if self.length is None:
            return variables.computed(translator, torch.select, self.whole, self.dim, begin)
        return variables.computed(translator, torch.narrow, self.whole, self.dim, begin, self.length)

    def after(self, taken: int) -> Parts:
        """What is left when `taken` of them are gone."""
        return dataclasses.replace(self, first=self.first + taken, count=self.count - taken)


@dataclasses.dataclass(frozen=True)
class Zipped:
    """Tuples of one entry of each column."""

    columns: list[Any]
    count: int

    @property
    def unread(self) -> bool:
        return any(column.unread for column in self.columns)

    def at(self, translator: Any, position: Any) -> Any:
        return variables.row([column.at(translator, position) for column in self.columns])


class Cut(Watched):
    """The entries of a tuple of parts of a tensor, which the graph does not hold yet."""

    def __init__(self, parts: Parts, read: Callable[[], None]) -> None:
        super().__init__([], read)
        self.parts = parts

    def __len__(self) -> int:
        return self.parts.count


def cut(function: Any, args: Any, kwargs: Any, least: int) -> Parts | None:
    """The parts that `torch.unbind`, `split` or `chunk` (`function`) is called for, where these are equal and at least
    `least`; None for any other call."""
    given = dict(zip(("x", "dim") if function is torch.unbind else ("x", "size", "dim"), args, strict=False))
    named = {"input": "x", "tensor": "x", "chunks": "size", "split_size_or_sections": "size", "split_size": "size"}
    given |= {named.get(name, name): value for name, value in kwargs.items()}
    whole = variables.realized(given["x"])
    found = variables.tensor(whole)
    if found is None or type(found[1]).__name__ != "FakeTensor" or found[1].layout is not torch.strided:
        return None
    numbers = {name: variables.plain(variables.realized(given[name])) for name in ("size", "dim") if name in given}
    dim, shape, unbinds = numbers.get("dim", 0), found[1].shape, function is torch.unbind
    if type(dim) is not int or not -len(shape) <= dim < len(shape) or len(shape) < 2:
        return None
    asked = numbers.get("size")
    given_sizes = [shape[dim]] if unbinds else [shape[dim], getattr(asked, "sym_num", asked)]
    sizes = [positions.likely(v) for v in given_sizes]
    if any(v is None or v < 1 for v in sizes):
        return None
    extent, size = sizes[0] or 0, sizes[-1] or 1
    length = None if unbinds else size if function is torch.split else -(-extent // size)
    if extent % (length or 1) or (count := extent // (length or 1)) < least:
        return None
    for v in given_sizes:
        int(v or 0)  # guards what Dynamo would: how many parts there are
    return Parts(whole, dim % len(shape), 0, length, count, True, torch.is_grad_enabled())


def left(variable: Any) -> Any:
    """What an iterator has left to give, as `Numbers`, `Parts` or `Zipped`; None for what is not known to be
    regular."""
    held = variables.realized(variable)
    if isinstance(held, find(PATHS["RangeIterator"])):
        return _numbers(held.start, held.step, held.len)
    if isinstance(held, find(PATHS["ListIterator"])):
        return None if getattr(held, "is_exhausted", False) else _entries(held.items, held.index)
    if isinstance(held, find(PATHS["Zip"])):
        several = held.iterables if hasattr(held, "iterables") else held.iterable.items
        return _rows([_entries(v, held.index) if isinstance(v, list) else left(v) for v in several])
    if (found := _enumerated(held)) is not None:
        iterable, start = found
        return _rows([_numbers(start, 1, ENDLESS), _iterable(iterable)])
    return None


def exhaust(variable: Any) -> None:
    """Have an iterator given all that it has left."""
    held = variables.realized(variable)
    if isinstance(held, find(PATHS["RangeIterator"])):
        held.start, held.len = held.start + held.step * held.len, 0
    elif isinstance(held, find(PATHS["ListIterator"])):
        held.index, held.is_exhausted = len(held.items), True
    elif isinstance(held, find(PATHS["Zip"])):
        if hasattr(held, "index"):
            held.index = ENDLESS
        for each in held.iterables if hasattr(held, "iterables") else held.iterable.items:
            if not isinstance(each, list):
                exhaust(each)
    else:
        held.inline_tracer.generator_exhausted = True


def _numbers(start: Any, stride: Any, count: Any) -> Numbers | None:
    return Numbers(start, stride, count) if all(type(v) is int for v in (start, stride, count)) else None


def _enumerated(held: Any) -> tuple[Any, int] | None:
    """(what is iterated over, the first number) of an `enumerate` that has given nothing yet."""
    tracer, function = getattr(held, "inline_tracer", None), inspect.unwrap(find(PATHS["enumerate"]))
    if tracer is None or tracer.f_code is not function.__code__:
        return None
    if not held._is_generator_just_started() or tracer.generator_exhausted:
        return None
    start = variables.plain(variables.realized(tracer.symbolic_locals["start"]))
    return (tracer.symbolic_locals["iterable"], start) if type(start) is int else None


def _iterable(variable: Any) -> Any:
    held = variables.realized(variable)
    if isinstance(held, find(PATHS["Range"])):
        return _numbers(held.start(), held.step(), held.range_length())
    if isinstance(held, find(PATHS["BaseList"])):
        return _entries(held.items, 0)
    return left(held)


def _rows(columns: list[Any]) -> Zipped | None:
    """`Zipped` of columns that are equally long: else some iterators go on when others have nothing left."""
    counts = {c.count for c in columns if c is not None} - {ENDLESS}
    return Zipped(columns, counts.pop()) if None not in columns and len(counts) == 1 else None


def _entries(entries: list[Any], taken: int) -> Any:
    if isinstance(entries, Cut):
        return entries.parts.after(taken)
    held = [] if taken else [variables.seen(v) for v in entries]  # a loop may look at some of them only
    if len(held) < 2 or None in held:
        return None
    if all(type(variables.plain(v)) is int for v in held):
        numbers = [variables.plain(v) for v in held]
        stride = numbers[1] - numbers[0]
        regular = numbers == [numbers[0] + i * stride for i in range(len(numbers))]
        return Numbers(numbers[0], stride, len(numbers)) if regular else None
    rows = [variables.parts(v) for v in held]
    if all(row is not None and len(row) == len(rows[0] or ()) > 0 for row in rows):
        return _rows([_entries(list(column), 0) for column in zip(*rows, strict=True)])  # type: ignore[arg-type]
    return _parts(held)


def _parts(held: list[Any]) -> Parts | None:
    """The tensor of which the tensors `held` are the parts, one behind the other."""
    tensors = [variables.tensor(v) for v in held]
    if None in tensors:
        return None
    whole = tensors[0][0]  # type: ignore[index]
    for _ in range(2):  # an entry of what `unbind` gives, or a part itself
        whole = whole.args[0] if whole.args and isinstance(whole.args[0], torch.fx.Node) else whole
        if isinstance(of := whole.meta.get("example_value"), torch.Tensor):
            break
    if not isinstance(of, torch.Tensor) or of.layout is not torch.strided:
        return None
    fakes, proxy = [t[1] for t in tensors], torch.fx.Proxy(whole, held[0].as_proxy().tracer)  # type: ignore[index]
    for dim, size in enumerate(positions.known(s) for s in of.shape):
        for length in (None, size // len(held)) if size is not None else ():
            if size == len(held) * (length or 1) and _cuts(of, dim, length, fakes):
                return Parts(_Proxied(proxy), dim, 0, length, len(held))
    return None


def _cuts(of: torch.Tensor, dim: int, length: int | None, parts: list[torch.Tensor]) -> bool:
    """Whether `parts` are all of `of`, in order, along a dimension that it is cut along or, without a length, loses."""
    sizes, strides = list(of.shape), list(of.stride())
    each = strides[dim] * (length or 1)
    if length is None:
        del sizes[dim], strides[dim]
    else:
        sizes[dim] = length
    alike = (of.dtype, of.is_conj(), of.is_neg(), of.requires_grad, of.untyped_storage()._cdata)
    return all(
        type(p) is type(of) and (list(p.shape), list(p.stride())) == (sizes, strides)
        and p.storage_offset() == of.storage_offset() + i * each
        and (p.dtype, p.is_conj(), p.is_neg(), p.requires_grad, p.untyped_storage()._cdata) == alike
        for i, p in enumerate(parts)
    )  # fmt: skip


class _Proxied:
    """A tensor of the graph that Dynamo holds nothing for."""

    def __init__(self, proxy: torch.fx.Proxy) -> None:
        self._proxy = proxy

    def as_proxy(self) -> torch.fx.Proxy:
        return self._proxy
