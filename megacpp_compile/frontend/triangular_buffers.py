"""Masks that a module holds as a buffer, `register_buffer("mask", torch.tril(torch.ones(n, n)))`, as code.

A graph has such a buffer as data, of which nothing is known: kernels would read it and compute all that it hides. Its
numbers are looked at when a frame is compiled. Where they say no more than whether a place is inside or outside of a
band of diagonals, what reads the buffer reads `torch.ones(n, n).tril(k)` in its place, from which masks are understood.

A guard of Dynamo's holds each tensor in that place to it: a frame whose buffer has other numbers is compiled again. The
numbers of a tensor are looked at again where it was written to, by its version and address. What is written to often,
as DDP does with all buffers ahead of each step, stays data. Writes through `.data` are not seen, as torch counts none.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from megacpp_compile._torch._registry import present
from megacpp_compile._torch.ddp import writes_buffers
from megacpp_compile._torch.dynamo import guard_of, install_guard
from megacpp_compile._torch.guards import TracingContext
from megacpp_compile._torch.modes import in_own_thread
from megacpp_compile.frontend.hidden_writes import storage_of, written_tensors
from megacpp_compile.fx.copies import changed
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.fx.fake_state import STANDS_FOR
from megacpp_compile.report import log

# Numbers of the largest buffer that is looked at, as of 16384 tokens, and of what is compared at once.
LARGEST, AT_ONCE = 2**28, 2**24
# Calls of a frame between two writes to a buffer, and how often there may be fewer.
APART, SOON = 100, 1


class Band(NamedTuple):
    """Rows and columns of a matrix, its number where `low <= row - column <= high`, and that elsewhere."""

    rows: int
    columns: int
    low: float
    high: float
    inside: float
    outside: float
    dtype: torch.dtype


def as_code(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Dynamo's graph `gm` itself where no module's tensor in it is a band, else a copy that makes them where they are
    read, and guards on what it knows of them."""
    if writes_buffers() or not present(TracingContext, install_guard) or TracingContext.try_get() is None:
        return gm
    holders = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    mine = [n for n in holders if n.users and _of_a_module(getattr(n, "_dynamo_source", None))]
    found = {n: band for n in mine if (band := band_of(holders[n])) is not None}
    if found:
        kept = {storage_of(w) for n in gm.graph.nodes for w in written_tensors(n)}
        kept |= {storage_of(n) for n in gm.graph.output_node().all_input_nodes}  # whose memory others see
        found = {n: band for n, band in found.items() if storage_of(n) not in kept}
    for node, band in found.items():
        says = f"{node.name} has the numbers of a band"
        install_guard(guard_of(node._dynamo_source, functools.partial(_still, band), says))  # type: ignore[attr-defined]
        log.logger.info("%s is computed, not read: %s", node.name, band)
    bands = {n.name: band for n, band in found.items()}
    return changed(gm, list(found), lambda n: _compute(n, bands[n.name]))


def band_of(tensor: Any) -> Band | None:
    """What `tensor` is as a band; None where it is none, or has been written to too often."""
    tensor = getattr(tensor, STANDS_FOR, tensor)
    if type(tensor) not in _PLAIN or tensor.device.type == "meta":
        return None
    unlike = tensor.requires_grad or tensor.is_inference() or tensor.is_complex() or tensor.layout != torch.strided
    if unlike or tensor.dim() < 2 or min(tensor.shape[-2:]) < 2 or not _one_matrix(tensor):
        return None
    key, now = id(tensor), (tensor._version, tensor.data_ptr())
    known = _read.get(key)
    if known is None or known.tensor() is not tensor:
        known = _read[key] = _Reading(weakref.ref(tensor, lambda _: _read.pop(key, None)))
    if known.state != now:
        known.soon += known.state is not None and known.calls < APART
        known.state, known.calls = now, 0
        known.band = in_own_thread(lambda: _looked_at(tensor)) if known.soon <= SOON else None
    known.calls += 1
    return known.band


class _Reading:
    """What a tensor was when it was looked at last, and how often it was asked for since. soon: writes after less."""

    def __init__(self, tensor: weakref.ref[Tensor]) -> None:
        self.tensor = tensor
        self.state: tuple[int, int] | None = None
        self.band: Band | None = None
        self.calls = self.soon = 0


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_read: dict[int, _Reading] = {}


def _still(band: Band, tensor: Any) -> bool:
    return band_of(tensor) == band


def _of_a_module(source: Any) -> bool:
    """Whether Dynamo found a tensor in a module, and was not handed it."""
    while source is not None:
        if "NNModule" in type(source).__name__:
            return True
        source = getattr(source, "base", None)
    return False


def _one_matrix(tensor: Tensor) -> bool:
    return math.prod(tensor.shape[-2:]) == tensor.numel() <= LARGEST


def _looked_at(tensor: Tensor) -> Band | None:
    rows, columns = tensor.shape[-2:]
    matrix = tensor.detach().reshape(rows, columns)
    if len({*torch.stack([matrix[0, 0], matrix[0, 1], matrix[1, 0], matrix[0, -1], matrix[-1, 0]]).tolist()}) > 2:
        return None  # as of nearly every weight that is not trained
    edge = torch.cat([matrix[0].flip(0), matrix[1:, 0]]).tolist()  # by row - column, from 1 - columns on
    ends = [i for i in range(1, len(edge)) if edge[i] != edge[i - 1]]
    if not 1 <= len(ends) <= 2 or edge[0] != edge[-1] and len(ends) == 2:
        return None
    low, high = ends[0] + 1 - columns, ends[1] - columns if len(ends) == 2 else math.inf
    band = Band(rows, columns, low, high, edge[ends[0]], edge[0], tensor.dtype)
    step = max(AT_ONCE // columns, 1)
    same = [_same(matrix[i : i + step], i, band) for i in range(0, rows, step)]
    return band if bool(torch.stack(same).all()) else None


def _same(part: Tensor, first: int, band: Band) -> Tensor:
    """Whether rows of a matrix, from number `first` on, are those of the band."""
    row, column = (torch.arange(n, device=part.device) for n in part.shape)
    distance = (row + first).unsqueeze(1) - column
    inside = (distance >= band.low) & (distance <= band.high)
    return torch.where(inside, part == band.inside, part == band.outside).all()


def _compute(holder: Node, band: Band) -> None:
    """Have each node that reads `holder` read a band made ahead of it."""
    fake = dynamo_value(holder)
    for user in list(holder.users):
        place = {k: v for k, v in user.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
            node = holder.graph.call_function(function, args, kwargs)
            given = [dynamo_value(a) if isinstance(a, Node) else a for a in args]
            with fake.fake_mode:
                node.meta |= place | {"example_value": function(*given, **kwargs)}  # noqa: B023
            return node

        with holder.graph.inserting_before(user):
            user.replace_input_with(holder, _made(band, fake, call))


def _made(band: Band, like: Tensor, call: Callable[..., Node]) -> Node:
    """The calls, each made by `call`, of what `like` is a fake of."""
    made = call(torch.ones, band.rows, band.columns, dtype=torch.bool, device=like.device)
    made = call(torch.tril, made, -band.low)
    if band.high != math.inf:
        made = call(torch.triu, made, -band.high)
    if {band.inside, band.outside} == {0, 1}:
        made = made if band.inside else call(torch.logical_not, made)
        made = made if band.dtype == torch.bool else call(torch.Tensor.to, made, band.dtype)
    else:
        sides = (call(torch.full, (), n, dtype=band.dtype, device=like.device) for n in (band.inside, band.outside))
        made = call(torch.where, made, *sides)
    return made if made.meta["example_value"].shape == like.shape else call(torch.reshape, made, tuple(like.shape))
